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

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.data import BatchSampler, Piece, Stream
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.check import unwatched_optimizers as strangers
from dynamix.runtime.check.advice import (
    ACCUMULATE,
    BY_HAND,
    DUE,
    EARLY,
    FOREIGN,
    ONCE,
    ORDER,
    PASS_OVER,
    PIECES,
    REPEATED,
    SHORT,
    STEP,
    SUM,
    WRAP_ONCE,
)
from dynamix.runtime.check.dealt import may_hold, samples_lost
from dynamix.runtime.check.steps_in_backward import WHY, GradientPasses
from dynamix.runtime.check.unreached import unreached
from dynamix.runtime.check.unreduced import Unreduced
from dynamix.runtime.check.unwatched_optimizers import parameters_of
from dynamix.runtime.sync.optimizer_means import KNOWN, without_gradients
from dynamix.runtime.sync.shards import Shards, is_fully_sharded

Fail = Callable[[DynamixError], DynamixError]

MATCHES = 4  # passes in a row whose inputs were as long as the batch: then that is how this loop's inputs are
READ = 8  # batches that came as long as dealt, and none longer: then the first dimension of inputs counts samples


class ModelCheck:
    """What the loop has done with one connected model since the last `step()`.

    reduces    whether its gradients cross ranks in DDP's hook, or in FSDP2's reduce-scatter
    shards     what FSDP2 holds of it, which then says where gradients are
    """

    def __init__(
        self, loop: "LoopCheck", model: nn.Module, optimizer: Optimizer, *, reduces: bool, shards: Shards | None
    ) -> None:
        self.loop, self.optimizer, self.reduces, self.shards = loop, optimizer, reduces, shards
        left = getattr(model, "parameters_to_ignore", ())
        if shards is not None:
            held = {id(p) for p in shards.parameters()}
            left = [name for name, p in model.named_parameters() if id(p) not in held]
        self._adds = reduces or (shards is not None and loop.workers > 1)
        self.unreduced = Unreduced(model, loop.gather, left, sharded=shards is not None)
        self.partners: list[ModelCheck] = []  # of the same model, with its other optimizers
        self._model = weakref.ref(model)  # DDP keeps this object, in C++
        KNOWN.add(optimizer)
        self.reductions = 0
        self.local = False  # some of what is in `.grad` has not crossed ranks
        self._made = False  # a pass has made gradients since the optimizer's last step
        self._crossed = False  # a pass of this batch was reduced
        self._held_since: int | None = None  # optimizer step in which what is in `.grad` was made
        self.inside = False  # `optimizer.step()` runs: a closure may go through the model again
        self._closure = False  # the optimizer's step under way makes gradients itself
        self.probe: nn.Parameter | None = None
        if not is_fully_sharded(model):
            self.probe = self._one_of(model, parameters_of(optimizer))
        self._stale = False
        if self.probe is not None:
            self.probe.register_hook(_weakly(self._before_adding))
            self.probe.register_post_accumulate_grad_hook(_weakly(self._added))
        optimizer.register_step_pre_hook(_weakly(self._before_optimizer))
        optimizer.register_step_post_hook(_weakly(self._after_optimizer))

    def _one_of(self, model: nn.Module, owned: set[int]) -> nn.Parameter | None:
        """The first parameter of `owned`, by `id`, whose gradients `model` reduces as far as that is known yet."""
        ignored, reduced = getattr(model, "parameters_to_ignore", ()), self.loop.reduced
        known = any(id(p) in reduced for p in model.parameters())
        for name, p in getattr(model, "module", model).named_parameters():
            if p.requires_grad and id(p) in owned and name not in ignored and (id(p) in reduced or not known):
                return p
        return None

    def fail(self, message: str) -> None:
        """Raise `UsageError`, on every rank."""
        self.loop.fail(message)

    def covers(self, parameters: list[Tensor]) -> None:
        """The gradients of these are reduced."""
        self.loop.reduced.update(map(id, parameters))

    def reducing(self) -> None:
        """A synchronised backward pass has its first gradients."""
        loop = self.loop
        if not loop.forwards and not self.inside:
            loop.fail(loop.without_batch())
        piece = loop.piece_of_pass()
        if loop.needs_piece and not loop.in_piece:
            loop.fail(f"backward() crossed ranks, but with meet='auto' ranks step apart in some rounds: {PIECES}")
        if loop.in_pieces and piece is not None and not piece.last and not self.inside:
            early = f"backward() of piece {piece.number + 1} of {piece.of} of this rank's share crossed ranks"
            loop.fail(f"{early}, and ranks have unlike numbers of pieces: {PIECES}")
        self.reductions += 1
        if self.reductions > 1 and loop.models == 1 and not self.inside:
            found = f"{self.reductions} synchronised backward passes before controller.step()"
            loop.fail(f"{found}, where one batch has one: {STEP}; {SUM}; {ACCUMULATE}")
        if self.shards is not None and not loop.muted():
            stale = self._older() and any(map(_nonzero, self.shards.reduced()))
            self._held_since = loop.group
            if stale:
                self._fail_stale()

    def reduced(self) -> None:
        """All gradients of a synchronised backward pass are on their way: nothing is local any more."""
        for check in (self, *self.partners):
            check.local, check._made, check._crossed = False, True, True

    def _before_adding(self, gradient: Tensor) -> None:
        """The probe's gradient is known: whether it would be added to that of an earlier batch."""
        older = self._older() and not self.loop.muted()
        self._stale = older and self.probe is not None and _nonzero(self.probe.grad)

    def _older(self) -> bool:
        return self._held_since is not None and self._held_since < self.loop.group

    def _added(self, probe: Tensor) -> None:
        """The probe's gradient was added to its `.grad`; `torch.autograd.grad` does not."""
        loop = self.loop
        if loop.muted():
            return
        self.local, self._held_since, self._made = True, loop.group, True
        if self._stale:
            self._fail_stale()

    def _fail_stale(self) -> None:
        loop = self.loop
        before = "backward() adds to the gradient of an earlier batch, for which optimizer.step() was never called"
        do = EARLY if loop.in_pieces else ACCUMULATE
        if loop.apart(loop.piece_of_pass()):
            do = "with meet='parameters' every piece has an optimizer step, and then optimizer.zero_grad()"
        loop.fail(f"{before}: {do}; else call optimizer.zero_grad()")

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        loop = self.loop
        if loop.muted():
            return None
        self.inside, self._held_since = True, None
        made, self._made = self._made, False
        piece = loop.piece_of_optimizer()
        if apart := loop.apart(piece):
            if loop.too_late() and self.probe is not None and _nonzero(self.probe.grad):
                late = "optimizer.step() came after controller.step(), where the workers may have met already"
                do = "with meet='parameters' every piece has its optimizer step before controller.step()"
                loop.fail(f"{late}: {do}" + (f"; or {REPEATED}" if loop.epoch_over() else ""))
            if piece is not None and not piece.samples:
                return without_gradients(optimizer, args, kwargs)
        elif piece is not None and not piece.last:
            early, do = f"optimizer.step() after {piece.number + 1} of this round's {piece.of} pieces", DUE
            if not loop.in_pieces:
                early = f"optimizer.step() after {piece.number + 1} of accumulate={loop.accumulate} batches"
                do = f"call it with the last of them, `if (i + 1) % {loop.accumulate} == 0`; {ACCUMULATE}"
            loop.fail(f"{early}: {do}" if loop.grown is None else loop.grown[1])
        if self._adds and not apart and piece is not None:
            own = []  # a plain loop, as it is run in every step
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in loop.reduced and parameter.requires_grad:
                        own.append(parameter)
            if own:
                self._look_at(own)
        self._closure = not apart and (len(args) > 1 or kwargs.get("closure") is not None)
        if not apart and not self._closure:
            self.all_crossed("optimizer.step()")
            if self.reduces and not made and self.probe is not None:
                self._require_made(self.probe)
        return None

    def _look_at(self, unreduced: list[nn.Parameter]) -> None:
        """The optimizer is about to step trainable parameters that are not known to be reduced."""
        if self.shards is not None:  # its parameters may be others since its first pass
            self.loop.reduced.update(map(id, self.shards.parameters()))
            unreduced = [p for p in unreduced if id(p) not in self.loop.reduced]
        known = bool(self.loop.reduced)  # not before the first backward pass, as inside of a closure
        if known and unreduced and (why := self.unreduced.look(unreduced)) is not None:
            self.loop.fail(why)

    def _require_made(self, probe: nn.Parameter) -> None:
        """No backward pass was reduced since the optimizer's last step: raise if it has gradients all the same."""
        if _nonzero(probe.grad):
            self.fail(f"optimizer.step() with a gradient that no backward pass has made since the last: {BY_HAND}")
        if probe.grad is None and not self._crossed and (model := self._model()) is not None:
            held = any(_nonzero(p.grad) for group in self.optimizer.param_groups for p in group["params"])
            if held and (why := unreached(model)) is not None:
                self.fail(f"optimizer.step() with gradients that have not crossed ranks: {why}")

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.inside = False
        if self._closure and not self.loop.muted():  # its backward pass was the last of those that accumulate
            self._closure = False
            self.all_crossed("optimizer.step(closure)")

    def all_crossed(self, where: str) -> None:
        """Raise if a gradient of this rank alone is left."""
        if self.reduces and self._is_local():
            if torch._C._current_graph_task_id() != -1:
                if self.shards is not None:
                    return  # FSDP2 gives a parameter no gradient that has not crossed ranks
                self.loop.fail(WHY)
            alone = f"{where} with gradients that have not crossed ranks, which would leave every rank its own model"
            model = self._model()
            if self.shards is None and model is not None and (reason := unreached(model)) is not None:
                self.loop.fail(f"{alone}: {reason}")
            why = "the last backward pass ran under no_sync(), past the DDP module (model.module), or a second time"
            why += ", or it left out parameters that DDP waits for (write DDP(net, find_unused_parameters=True))"
            self.loop.fail(f"{alone}: {why}. Leave no_sync() out for the last of them; {ACCUMULATE}")

    def _is_local(self) -> bool:
        if self.shards is not None:
            return any(map(_nonzero, self.shards.kept_back()))
        return self.local and self.probe is not None and _nonzero(self.probe.grad)

    def step_over(self, *, group_over: bool) -> None:
        """`controller.step()`: this batch is over."""
        if group_over and self.loop.models == 1:
            self.all_crossed("controller.step()")
        self.reductions, self.inside, self._crossed = 0, False, False


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
        delivered = source.delivered()
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
        belongs = self.forwards or ((now.last or now.plan.apart) and source.delivered() > source.batches_consumed)
        return now if belongs else self.stepped

    @staticmethod
    def apart(piece: Piece | None) -> bool:
        """Whether a batch is an optimizer step of this rank's own."""
        return piece is not None and piece.plan.apart

    def too_late(self) -> bool:
        """Whether every batch that the loop has is over."""
        source = self.source
        return source is not None and 0 < source.delivered() <= source.batches_consumed

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
        if source is not None and source.batches_consumed >= source.delivered():
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


def _weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """`method` for a hook that must not keep its owner: what torch holds in C++ no collector of garbage can see."""
    alive = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return None if (method := alive()) is None else method(*args)

    return call


def _nonzero(gradient: Tensor | None) -> bool:
    """Whether there is a gradient; one set to zeros is none. Asks the device."""
    if gradient is None:
        return False
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.detach().count_nonzero())


def _length(inputs: Iterable[Any]) -> int | None:
    """Of the first tensor's first dimension; a model may take a dict of tensors."""
    for value in inputs:
        if isinstance(value, Tensor):
            return len(value) if value.dim() else None
        if isinstance(value, Mapping) and (length := _length(value.values())) is not None:
            return length
    return None
