"""Whether the training loop does what the plan says: every batch forwarded, reduced once and stepped, in its turn.

Counters and flags only: a check asks no other rank and, but where something is wrong already, no device. An error goes
through `fail`, which tells the other ranks.
"""

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.data import BatchSampler, Piece, Stream
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.check import unwatched_optimizers as strangers
from dynamix.runtime.check.advice import ACCUMULATE, FOREIGN, ONCE, ORDER, PASS_OVER, REPEATED, SHORT, STEP, WRAP_ONCE
from dynamix.runtime.check.dealt import may_hold, samples_lost
from dynamix.runtime.check.model_check import ModelCheck
from dynamix.runtime.check.steps_in_backward import WHY, GradientPasses
from dynamix.runtime.check.unwatched_optimizers import parameters_of
from dynamix.runtime.sync.shards import Shards

Fail = Callable[[DynamixError], DynamixError]

MATCHES = 4  # passes in a row whose inputs were as long as the batch: then that is how this loop's inputs are
READ = 8  # batches that came as long as dealt, and none longer: then the first dimension of inputs counts samples


class LoopCheck:
    """What the loop has done since the last `step()`.

    fail_with   gets the error, tells others, and returns it to be raised
    muted       whether passes are being discarded (warm-up, the search for limits)
    gather      what every rank tells in a collective call, which is named
    """

    def __init__(
        self,
        accumulate: int,
        fail_with: Fail,
        muted: Callable[[], bool],
        gather: Callable[[Any, str], list[Any]],
        *,
        rank: int,
        workers: int,
    ) -> None:
        self.accumulate, self._fail, self.muted, self.workers = accumulate, fail_with, muted, workers
        self.gather = gather
        self.reduced = set[int]()  # `id` of the parameters whose gradients some connected model reduces
        self.rank = rank
        self._matches, self._sizes = 0, deque[int](maxlen=8)  # samples of the last batches
        self._length: int | None = None  # of the inputs before
        self._late = False  # the inputs before were as long as the batch before theirs, where sizes had changed
        self._read = 0  # batches that came as long as dealt
        self._fits = False  # a pass of the batch in hand had its samples, once or several times
        self.odd = 0  # samples of the passes of the batch in hand that were of another number
        self.source: BatchSampler | Stream | None = None
        self.forwards = self.group = 0
        self.needs_piece = self.in_piece = False  # whether passes must be under `controller.piece()`, and are now
        self._checks: list[ModelCheck] = []
        self._first: dict[int, ModelCheck] = {}  # by model
        self._ahead: int | None = None  # batches received and not consumed when this iteration's first forward ran
        self.grown: tuple[int, str] | None = None  # batches received when it was more, and what that may mean
        self._iteration = -1
        self._forwarded = 0  # micro-steps that had a forward pass, as far as that can be told
        self.stepped: Piece | None = None  # the batch that was consumed last
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._harmless: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._passes = GradientPasses()
        if workers > 1:
            strangers.watch(self)

    @property
    def models(self) -> int:
        """How many models the loop trains."""
        return len(self._first)

    @property
    def connected(self) -> Iterable[int]:
        """`id` of the models that the loop trains."""
        return self._first.keys()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that were given to `wrap`."""
        return [check.optimizer for check in self._checks]

    @property
    def trained(self) -> set[int]:
        """`id` of their parameters."""
        return {p for optimizer in self.optimizers for p in parameters_of(optimizer)}

    def close(self) -> None:
        """Look at nothing any more: the models and optimizers may be trained on by others."""
        self.muted, self.source = lambda: True, None
        strangers.forget(self)

    def fail(self, message: str) -> None:
        raise self._fail(UsageError(message))

    def connect(
        self, model: nn.Module, optimizer: Optimizer, *, reduces: bool, hooked: bool, shards: Shards | None = None
    ) -> ModelCheck:
        """Watch one more model; `hooked`: a communication hook of the user's has its gradients, and may apply them."""
        if reduces and not hooked and shards is None:
            self._passes.connect(model)
        check = ModelCheck(self, model, optimizer, reduces=reduces, shards=shards)
        self._checks.append(check)
        self._first[id(model)] = check
        return check

    def add_optimizer(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Watch a further optimizer of a connected model; False if the model is not connected yet."""
        if any(optimizer is check.optimizer for check in self._checks):
            raise UsageError(f"wrap() was already called with this optimizer: {WRAP_ONCE}")
        first = self._first.get(id(model))
        if first is not None:
            check = ModelCheck(self, model, optimizer, reduces=first.reduces, shards=first.shards)
            self._checks.append(check)
            first.partners.append(check)
        return first is not None

    # ------------------------------------------------------------ in the order of a step

    def cut_short(self) -> str | None:
        """What is wrong with an epoch that ends here; None if nothing is."""
        left = 0 if self.source is None else self.source.cut_short
        return SHORT.format(left) if left else None

    def begin(self) -> None:
        """An iteration begins, or an epoch is chosen: the one before must not have left a batch behind."""
        source = self.source
        if (short := self.cut_short()) is not None:
            self.fail(short)
        if source is not None and source.abandons and self.stepped is not None and not self.stepped.last:
            self.group += 1  # the round is dealt anew: what its pieces left in `.grad` must not be added to
        if source is None or not source.exhausted or source.batches_consumed >= source.batches_issued:
            return
        left = source.batches_issued - source.batches_consumed
        if self._iteration == source.iteration and self._forwarded >= source.batches_issued:
            self.fail(f"the epoch ended with {left} of its batches never stepped: {STEP}")

    def forward(self, inputs: Iterable[Any]) -> None:
        """A forward pass that records gradients begins, of `inputs`."""
        source = self.source
        if source is None:
            return
        delivered = source.batches_delivered
        if self._iteration != source.iteration:
            self._iteration, self._ahead, self.grown = source.iteration, None, None
        ahead = delivered - source.batches_consumed
        if ahead <= 0:
            return  # no pass of the loop's
        if self._ahead is None:
            self._ahead = ahead
        if ahead <= self._ahead:
            self.grown = None
        elif source.issuer == threading.get_ident() and not source.reader_gone:
            self._look_at_growth(delivered)
        if not source.reader_gone:
            self._forwarded = source.batches_consumed + 1
        self.forwards += 1
        if self.models == 1 and self.workers > 1 and not source.reader_gone:
            self._in_turn(source, inputs, alone=ahead == 1)

    def _look_at_growth(self, delivered: int) -> None:
        """More batches are waiting than when the epoch began. Raise if another was taken before they were stepped.

        A loop may read more at once than before. One that passed over a batch takes the next while one waits too many.
        """
        if self.grown is None:
            passed = f"a batch was taken from the loader and neither trained nor stepped: {PASS_OVER}"
            unstepped = f"a new batch, but controller.step() was not called for the one before: {STEP}; {ACCUMULATE}"
            self.grown = delivered, unstepped if self.forwards else passed
        elif delivered > self.grown[0]:
            self.fail(self.grown[1])

    def _in_turn(self, source: BatchSampler | Stream, inputs: Iterable[Any], *, alone: bool) -> None:
        """Raise where the inputs are as long as another batch, in a loop in which they were as long as their own.

        alone   the loop has no other batch that is not stepped: then it may have dropped samples, see `require_dealt`
        """
        mine, length = source.piece().samples, _length(inputs)
        before, self._length = self._length, length
        if not mine or length is None:
            return
        if length == mine:
            self._fits = True
            if self._late and length != before:
                self.fail(f"batches are trained one turn after their own: {ORDER}")
            self._matches, self._late = self._matches + 1, False
            return
        self._fits = self._fits or may_hold(inputs, mine)
        self.odd += length
        others = {*self._sizes, *(piece.samples for piece in source.waiting())}
        if self._matches >= MATCHES and length != before and length in others and not (self._fits or alone):
            turned = f"a batch of {length} samples was trained in the turn of one of {mine}: {ORDER}"
            self.fail(turned if self.grown is None else self.grown[1])
        self._late = self._matches >= MATCHES and bool(self._sizes) and length == before == self._sizes[-1]
        self._matches = 0

    def require_dealt(self, mine: int, loss: Any) -> None:
        """Raise if the batch in hand reached the model as fewer than the `mine` samples that were dealt."""
        if self.odd > mine:
            self._read = 0  # padded, or rows are no samples
        elif self._read >= READ and not self._fits and (lost := samples_lost(mine, self.odd, loss)) is not None:
            self.fail(lost)

    @property
    def in_pieces(self) -> bool:
        """Whether shares are cut by size, so that ranks have unlike numbers of batches."""
        return self.source is not None and self.source.micro_batch is not None

    def piece_of_pass(self) -> Piece | None:
        """The batch that a pass now belongs to, None if there is none."""
        source = self.source
        return source.piece() if source is not None and source.issued > source.consumed else None

    def piece_of_optimizer(self) -> Piece | None:
        """The batch that an optimizer's step now belongs to; None before the first."""
        source, now = self.source, self.piece_of_pass()
        if source is None or now is None:
            return self.stepped
        # Without a forward pass it may be for a batch that was passed over, or come after `step()`.
        belongs = self.forwards or ((now.last or now.plan.apart) and source.batches_delivered > source.batches_consumed)
        return now if belongs else self.stepped

    @staticmethod
    def apart(piece: Piece | None) -> bool:
        """Whether a batch is an optimizer step of this rank's own."""
        return piece is not None and piece.plan.apart

    def too_late(self) -> bool:
        """Whether every batch that the loop has is over."""
        source = self.source
        return source is not None and 0 < source.batches_delivered <= source.batches_consumed

    def epoch_over(self) -> bool:
        """Whether the loop has stepped all batches of an epoch."""
        return self.source is not None and self.source.exhausted and self.too_late()

    def without_batch(self) -> str:
        """What is wrong where a backward pass belongs to no batch."""
        if self.source is None or not self.source.batches_issued:
            return FOREIGN
        before = "backward() came after controller.step(), so its gradient would get another batch's weight"
        return f"{before}: {REPEATED if self.epoch_over() else ONCE}; {STEP}"

    def before_step(self, piece: Piece) -> None:
        """`controller.step()` begins, for `piece`."""
        source = self.source
        if source is not None and source.batches_consumed >= source.batches_delivered:
            twice = "controller.step() was called twice for one batch, or before the first"
            self.fail(f"{twice}: {REPEATED if self.epoch_over() else STEP}")
        for check in self._checks:
            check.step_over(group_over=piece.last and not piece.plan.apart)
        self._read += self._fits and piece.samples > 1 and not self.odd
        self.forwards, self.stepped, self._fits, self.odd = 0, piece, False, 0
        self._sizes.append(piece.samples)
        self.group += piece.last or piece.plan.apart

    def stranger(self, optimizer: Optimizer) -> None:
        """An optimizer that was not given to `wrap` steps: it must not be that of a DDP model in this loop."""
        source = self.source
        if source is None or not self._checks or self.muted() or optimizer in self._harmless:
            return
        before, now = self._strangers.get(optimizer), source.batches_consumed
        self._strangers[optimizer] = now
        if before is None or now != before + 1:
            return
        self._harmless.add(optimizer)  # looked at once: that is slow
        apart = self.apart(self.piece_of_optimizer())
        if apart and any(check.inside for check in self._checks):
            return  # a wrapped optimizer is made of it
        if apart and not parameters_of(optimizer) <= self.trained:
            left = f"an optimizer ({type(optimizer).__name__}) in this loop was not given to controller.wrap()"
            own = "what it trains is not averaged, and stays every worker's own"
            warnings.warn(f"{left}: {own}. {WRAP_ONCE}", RuntimeWarning, stacklevel=6)
        if not apart and (alone := self._reduced_by_nobody(optimizer)):
            left = f"an optimizer ({type(optimizer).__name__}) that was not given to controller.wrap() steps"
            own = "which DDP does not reduce: unless the loop does, every rank moves its own"
            warnings.warn(f"{left} {', '.join(alone[:3])}, {own}. {WRAP_ONCE}", RuntimeWarning, stacklevel=6)
        if (name := strangers.unconnected_of(optimizer)) is not None:
            why = f"its {name} model is not connected, so unequal batches would weigh alike in its gradient"
            self.fail(f"an optimizer in this loop was not given to controller.wrap(): {why}. {WRAP_ONCE}")

    def _reduced_by_nobody(self, optimizer: Optimizer) -> list[str]:
        """Names of what `optimizer`, which `wrap` was not given, trains of connected models that reduce the rest."""
        own = parameters_of(optimizer) - self.reduced if self.reduced else set[int]()
        return [name for check in self._first.values() if check.reduces for name in check.unreduced.names(own)]

    def step_in_backward(self, optimizer: Optimizer) -> None:
        """An optimizer, given to `wrap` or not, steps inside of a backward pass: its gradients must have crossed."""
        if not self.muted() and not self.apart(self.piece_of_pass()) and self._passes.unreduced(optimizer):
            self.fail(WHY)


def _length(inputs: Iterable[Any]) -> int | None:
    """Of the first tensor's first dimension; a model may take a dict of tensors."""
    for value in inputs:
        if isinstance(value, Tensor):
            return len(value) if value.dim() else None
        if isinstance(value, Mapping) and (length := _length(value.values())) is not None:
            return length
    return None
