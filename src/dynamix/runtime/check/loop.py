"""Whether the training loop does what the plan says: every batch forwarded, reduced once and stepped, in its turn.

Counters and flags only: a check asks no other rank and, but where something is wrong already, no device. An error goes
through `fail`, which tells the other ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from dynamix.data import BatchSampler, Piece, Stream
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.check.advice import FOREIGN, ONCE, REPEATED, SHORT, STEP, WRAP_ONCE
from dynamix.runtime.check.model import ModelCheck
from dynamix.runtime.check.steps_in_backward import WHY, GradientPasses
from dynamix.runtime.check.turns import Turns
from dynamix.runtime.check.unwatched_optimizers import Strangers, parameters_of
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.part import Observation, Part
from dynamix.runtime.sync.shards import Shards


class LoopCheck(Part):
    """What the loop has done since the last `step()`.

    recorder     is muted while passes are discarded (warm-up, the search for limits)
    fail_with    gets the error, tells others, and returns it to be raised
    gather       what every rank tells in a collective call, which is named
    needs_piece  passes must be under `controller.piece()`
    """

    def __init__(
        self,
        accumulate: int,
        recorder: Recorder,
        fail_with: Callable[[DynamixError], DynamixError],
        gather: Callable[[Any, str], list[Any]],
        *,
        workers: int,
        needs_piece: bool,
    ) -> None:
        self.accumulate, self.recorder, self.workers, self._fail = accumulate, recorder, workers, fail_with
        self.gather = gather
        self.needs_piece = needs_piece and workers > 1
        self.under_piece = False  # passes are under `controller.piece()` now
        self.reduced = set[int]()  # `id` of the parameters whose gradients some connected model reduces
        self.source: BatchSampler | Stream | None = None
        self.piece: Piece | None = None  # of the passes since the last `step()`
        self.stepped: Piece | None = None  # the batch that was consumed last
        self.forwards = self.group = self.models = 0  # passes of the batch in hand; optimizer steps; models that train
        self._checks: list[ModelCheck] = []
        self._first: dict[int, ModelCheck] = {}  # by model
        self._turns = Turns(self.fail)
        self._passes = GradientPasses()
        self._strangers = Strangers(self) if workers > 1 else None

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

    @property
    def in_pieces(self) -> bool:
        """Whether shares are cut by size, so that ranks have unlike numbers of batches."""
        return self.source is not None and self.source.micro_batch is not None

    def fail(self, message: str) -> NoReturn:
        """Raise `UsageError`, on every rank."""
        raise self._fail(UsageError(message))

    # ------------------------------------------------------------ setting up

    def feed(self, source: BatchSampler | Stream) -> None:
        """The loop's batches come from `source`."""
        self.source = source

    def connect(
        self, model: nn.Module, optimizer: Optimizer, *, reduces: bool, hooked: bool, shards: Shards | None = None
    ) -> ModelCheck:
        """Watch one more model; `hooked`: a communication hook of the user's has its gradients, and may apply them."""
        if reduces and not hooked and shards is None:
            self._passes.connect(model)
        check = ModelCheck(self, model, optimizer, reduces=reduces, shards=shards)
        self._checks.append(check)
        self._first[id(model)] = check
        self.models = len(self._first)
        return check

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Where an error is raised inside, the models that were connected there are looked at no more."""
        known, first = len(self._checks), dict(self._first)
        try:
            yield
        except Exception:
            for check in self._checks[known:]:
                check.close()
            del self._checks[known:]
            self._first, self.models = first, len(first)
            raise

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

    def job_ends(self) -> None:
        """Look at nothing any more: the models and optimizers may be trained on by others."""
        self.source = None
        for check in self._checks:
            check.close()
        if self._strangers is not None:
            self._strangers.close()

    # ------------------------------------------------------------ in the order of a step

    def cut_short(self) -> str | None:
        """What is wrong with an epoch that ends here; None if nothing is."""
        left = 0 if self.source is None else self.source.cut_short
        return SHORT.format(left) if left else None

    def iteration_begins(self) -> None:
        """An iteration begins, or an epoch is chosen: the one before must not have left a batch behind."""
        source = self.source
        if (short := self.cut_short()) is not None:
            self.fail(short)
        if source is not None and source.abandons and self.stepped is not None and not self.stepped.last:
            self.group += 1  # the round is dealt anew: what its pieces left in `.grad` must not be added to
        if source is None or not source.exhausted or source.batches_consumed >= source.batches_issued:
            return
        left = source.batches_issued - source.batches_consumed
        if self._turns.all_forwarded(source):
            self.fail(f"the epoch ended with {left} of its batches never stepped: {STEP}")

    @contextmanager
    def piece_in_hand(self) -> Iterator[None]:
        """Passes inside are under `controller.piece()`."""
        self.under_piece = True
        try:
            yield
        finally:
            self.under_piece = False

    def look_at(self, piece: Piece, inputs: Iterable[Any]) -> None:
        """A forward pass of `inputs` begins that records gradients, `piece` being the batch in hand."""
        compares = self.models == 1 and self.workers > 1
        source = self.source
        if source is not None and self._turns.pass_begins(
            source, piece, inputs, again=self.forwards > 0, compares=compares
        ):
            self.forwards += 1
            self.piece = piece

    def piece_of_optimizer(self) -> Piece | None:
        """The batch that an optimizer's step without a forward pass belongs to; None before the first.

        It may be for a batch that was passed over, or come after `step()`.
        """
        source = self.source
        now = None if source is None else source.current
        if source is None or now is None:
            return self.stepped
        belongs = self.forwards or ((now.last or now.plan.apart) and source.delivered() > source.batches_consumed)
        return now if belongs else self.stepped

    def steps_apart(self) -> bool:
        """Whether the batch in hand is an optimizer step of this rank's own."""
        piece = None if self.source is None else self.source.current
        return piece is not None and piece.plan.apart

    def too_late(self) -> bool:
        """Whether every batch that the loop has is over."""
        source = self.source
        return source is not None and 0 < source.delivered() <= source.batches_consumed

    def epoch_over(self) -> bool:
        """Whether the loop has stepped all batches of an epoch."""
        return self.source is not None and self.source.exhausted and self.too_late()

    def growth(self) -> str | None:
        """What it may mean that more batches wait than at the epoch's beginning; None if no more do."""
        return None if self._turns.grown is None else self._turns.grown[1]

    def without_batch(self) -> str:
        """What is wrong where a backward pass belongs to no batch."""
        if self.source is None or not self.source.batches_issued:
            return FOREIGN
        before = "backward() came after controller.step(), so its gradient would get another batch's weight"
        return f"{before}: {REPEATED if self.epoch_over() else ONCE}; {STEP}"

    def require_dealt(self, piece: Piece, loss: Any) -> None:
        """Raise if the batch in hand reached the model as fewer samples than were dealt."""
        self._turns.require_dealt(piece.samples, loss)

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        source = self.source
        if source is not None and source.batches_consumed >= source.delivered():
            twice = "controller.step() was called twice for one batch, or before the first"
            self.fail(f"{twice}: {REPEATED if self.epoch_over() else STEP}")
        apart = piece.plan.apart
        for check in self._checks:
            check.piece_done(round_over=piece.last and not apart)
        self._turns.piece_done(piece)
        self.forwards, self.piece, self.stepped = 0, None, piece
        self.group += piece.last or apart

    # ------------------------------------------------------------ optimizers that the loop steps besides

    def stranger(self, optimizer: Optimizer) -> None:
        """An optimizer that was not given to `wrap` steps: it must not be that of a DDP model in this loop."""
        source, apart = self.source, False
        if source is None or not self._checks or self.recorder.muted or self._strangers is None:
            return
        piece = self.piece_of_optimizer()
        apart = piece is not None and piece.plan.apart
        stepping = any(check.inside for check in self._checks)
        if (
            wrong := self._strangers.look(optimizer, source.batches_consumed, apart=apart, stepping=stepping)
        ) is not None:
            self.fail(wrong)

    def reduced_by_nobody(self, optimizer: Optimizer) -> list[str]:
        """Names of what `optimizer`, which `wrap` was not given, trains of connected models that reduce the rest."""
        own = parameters_of(optimizer) - self.reduced if self.reduced else set[int]()
        return [name for check in self._first.values() if check.reduces for name in check.unreduced.names(own)]

    def step_in_backward(self, optimizer: Optimizer) -> None:
        """An optimizer, given to `wrap` or not, steps inside of a backward pass: its gradients must have crossed."""
        if not self.recorder.muted and not self.steps_apart() and self._passes.unreduced(optimizer):
            self.fail(WHY)
