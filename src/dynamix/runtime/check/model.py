"""Records what a loop has done with one connected model since its last `controller.step()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.data import BatchSampler, Piece, Stream
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.check.advice import ACCUMULATE, BY_HAND, DUE, EARLY, FOREIGN, LOCAL, ONCE, REPEATED, STEP
from dynamix.runtime.check.unreached import IN_BACKWARD, unreached
from dynamix.runtime.check.unreduced import Unreduced
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.sync.optimizer_means import KNOWN, without_gradients
from dynamix.runtime.sync.shards import Shards, is_fully_sharded


@dataclass(eq=False)
class Loop:
    """The state of a training loop: the current batch, and what each model has done with it.

    recorder     is muted while passes are discarded (warm-up, the search for limits)
    fail_with    takes the error, informs the other ranks, and returns the error to raise
    gather       collective call: returns every rank's object; the second argument names the call
    tell         takes figures, for the window's row, of samples that a rank trained but was not dealt
    reduced      `id` of the parameters whose gradients some connected model reduces
    piece        the batch of the passes since the last `step()`; `stepped` is the batch that was consumed last
    forwards     forward passes of the current batch
    models       those that have trained so far
    group        number of optimizer steps
    """

    accumulate: int
    recorder: Recorder
    fail_with: Callable[[DynamixError], DynamixError]
    gather: Callable[[Any, str], list[Any]]
    tell: Callable[[Any], None]
    workers: int
    models: Sequence[Any]
    reduced: set[int] = field(default_factory=set)
    source: BatchSampler | Stream | None = None
    piece: Piece | None = None
    stepped: Piece | None = None
    forwards: int = 0
    group: int = 0

    def samples_in_hand(self) -> int | None:
        """The samples of the current batch; None if there is none."""
        return None if self.source is None or self.source.current is None else self.source.current.samples

    def fail(self, message: str) -> NoReturn:
        """Raise `UsageError`, on every rank."""
        raise self.fail_with(UsageError(message))

    @property
    def in_pieces(self) -> bool:
        """Whether shares are cut into pieces of a fixed size, so that ranks run different numbers of batches."""
        return self.source is not None and self.source.micro_batch is not None

    def piece_of_optimizer(self) -> Piece | None:
        """The batch to which an optimizer step without a forward pass belongs; None before the first.

        The step may be for a skipped batch, or come after `step()`.
        """
        source = self.source
        now = None if source is None else source.current
        if source is None or now is None:
            return self.stepped
        belongs = self.forwards or ((now.last or now.round.apart) and source.received()[0] > source.batches_consumed)
        return now if belongs else self.stepped

    def steps_apart(self) -> bool:
        """Whether the current batch is a local optimizer step of this rank."""
        piece = None if self.source is None else self.source.current
        return piece is not None and piece.round.apart

    def too_late(self) -> bool:
        """Whether every batch that the loop has received is done."""
        source = self.source
        return source is not None and 0 < source.received()[0] <= source.batches_consumed

    def epoch_over(self) -> bool:
        """Whether the loop has stepped all batches of an epoch."""
        return self.source is not None and self.source.exhausted and self.too_late()

    def backwards(self) -> int:
        """Backward passes counted so far."""
        return 0

    def growth(self) -> str | None:
        """The likely reason why more batches wait than at the epoch's beginning; None if they do not."""
        return None


class Held(Enum):
    """What backward passes have left in `.grad` since the optimizer's last step."""

    NOTHING = auto()
    LOCAL = auto()  # part of it has not been reduced over ranks
    CROSSED = auto()


class ModelCheck:
    """A connected model with one of its optimizers, whose step ends an update. A batch may have any number of updates.

    An update may have any number of passes, too. A gradient that was reduced already is equal on all ranks, so a
    further reduction keeps it. Several passes then give the sum of the gradients of their union batches.

    reduces    whether its gradients cross ranks in DDP's hook, or in FSDP2's reduce-scatter
    shards     FSDP2's state of the model; if given, it says where the gradients are
    """

    def __init__(
        self, loop: Loop, model: nn.Module, optimizer: Optimizer, *, reduces: bool, shards: Shards | None
    ) -> None:
        self.loop, self.optimizer, self.reduces, self.shards = loop, optimizer, reduces, shards
        self._adds = reduces or (shards is not None and loop.workers > 1)
        self.unreduced = Unreduced(model, loop.gather, shards)
        self.partners: list[ModelCheck] = []  # checks of the same model with its other optimizers
        self.model = weakref.ref(model)  # weak, because DDP holds this object in C++
        KNOWN.add(optimizer)
        self._held = Held.NOTHING
        self._held_since: int | None = None  # round in which `_held` was set
        self._applied: tuple[weakref.ref[Tensor], int] | None = None  # the last step's probe gradient, its version
        self.inside = self._meets = False  # whether `optimizer.step()` runs; whether its gradients are reduced
        self.updates = self.backwards = 0  # optimizer steps of the current batch; backward passes so far
        self.probe = None if is_fully_sharded(model) else self._one_of(model, parameters_of(optimizer))
        self._stale = False
        self._hooks: list[Any] = [] if self.probe is None else self._watch(self.probe)
        self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer))
        self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer))

    def close(self) -> None:
        """Stop checking: other code may go on to train the model with its optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _one_of(self, model: nn.Module, owned: set[int]) -> nn.Parameter | None:
        """The first parameter of `owned` (a set of `id`) whose gradients `model` reduces, as far as is known yet."""
        ignored, reduced = getattr(model, "parameters_to_ignore", ()), self.loop.reduced
        known = any(id(p) in reduced for p in model.parameters())
        for name, p in getattr(model, "module", model).named_parameters():
            if p.requires_grad and id(p) in owned and name not in ignored and (id(p) in reduced or not known):
                return p
        return None

    def _watch(self, probe: nn.Parameter) -> list[Any]:
        """Hook `probe`. Hooks must not refer to this object: garbage collection does not see references in C++."""
        alive = weakref.ref(self)

        def before_adding(gradient: Tensor) -> None:
            if (check := alive()) is not None:
                check._before_adding()

        def added(probe: Tensor) -> None:  # not called by `torch.autograd.grad`
            if (check := alive()) is not None:
                check._added()

        return [probe.register_hook(before_adding), probe.register_post_accumulate_grad_hook(added)]

    def _before_adding(self) -> None:
        """The probe has a new gradient: note whether it would be added to an earlier batch's."""
        older = self._held_since is not None and self._held_since < self.loop.group
        muted, probe = self.loop.recorder.muted, self.probe
        self._stale = older and not muted and probe is not None and _nonzero(probe.grad)

    def _added(self) -> None:
        """The probe's gradient was added to its `.grad`."""
        if not self.loop.recorder.muted:
            self._held, self._held_since = Held.LOCAL, self.loop.group
            self.backwards += 1
            if self._stale:
                self._fail_stale()

    def fail(self, message: str) -> NoReturn:
        """Raise `UsageError`, on every rank."""
        self.loop.fail(message)

    def covers(self, parameters: list[Tensor]) -> None:
        """Note that the gradients of these are reduced."""
        self.loop.reduced.update(map(id, parameters))

    def reducing(self, piece: Piece | None) -> None:
        """A synchronised backward pass of `piece` has produced its first gradients."""
        loop = self.loop
        self.backwards += 1
        if not loop.forwards and not self.inside:
            if loop.source is None or not loop.source.batches_issued:
                loop.fail(FOREIGN)
            after = "backward() came after controller.step(), so its gradient would get another batch's weight"
            loop.fail(f"{after}: {REPEATED if loop.epoch_over() else ONCE}; {STEP}")
        if piece is not None and (piece.round.apart or (piece.by_size and not piece.last and not self.inside)):
            crossed = "backward() exchanged gradients in the middle of a round, when other ranks may send none"
            loop.fail(f"{crossed}: {LOCAL}")
        if self.shards is not None:
            older = self._held_since is not None and self._held_since < loop.group
            stale = older and any(map(_nonzero, self.shards.reduced()))
            self._held_since = loop.group
            if stale:
                self._fail_stale()

    def reduced(self) -> None:
        """All gradients of a synchronised backward pass are being reduced, so none stays local."""
        self._held = Held.CROSSED
        for check in self.partners:
            check.reduced()

    def _fail_stale(self) -> None:
        loop = self.loop
        before = "backward() adds to the gradient of an earlier batch, for which optimizer.step() was never called"
        do = EARLY if loop.in_pieces else ACCUMULATE
        if loop.steps_apart():
            do = "with meet='parameters' call optimizer.step() and then optimizer.zero_grad() for every piece"
        loop.fail(f"{before}: {do}; else call optimizer.zero_grad()")

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        loop = self.loop
        if loop.recorder.muted:
            return None
        self.inside, self._held_since = True, None
        piece = loop.piece if loop.forwards else loop.piece_of_optimizer()
        if apart := piece is not None and piece.round.apart:
            if loop.too_late() and self.probe is not None and _nonzero(self.probe.grad):
                late = "optimizer.step() came after controller.step(), when models may have been averaged already"
                do = "with meet='parameters' call optimizer.step() before controller.step() for every piece"
                loop.fail(f"{late}: {do}" + (f"; or {REPEATED}" if loop.epoch_over() else ""))
            if piece is not None and not piece.samples:
                return without_gradients(optimizer, args, kwargs)
        elif piece is not None and not piece.last:
            self._fail_early(piece)
        if self._adds and not apart and piece is not None:
            own = []  # a plain loop, because it runs in every step
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in loop.reduced and parameter.requires_grad:
                        own.append(parameter)
            if own:
                self._look_at(own)
        self._meets = self.reduces and not apart
        if self._meets and len(args) < 2 and kwargs.get("closure") is None:
            if self._held is Held.LOCAL or self.shards is not None:
                self.require_crossed("optimizer.step()")
            if self._held is Held.NOTHING and self.probe is not None:
                self._require_made(self.probe)
        return None

    def _fail_early(self, piece: Piece) -> None:
        loop, growth = self.loop, self.loop.growth()
        early, do = f"optimizer.step() came after {piece.number + 1} of the round's {piece.of} pieces", DUE
        if not loop.in_pieces:
            early = f"optimizer.step() came after {piece.number + 1} of accumulate={loop.accumulate} batches"
            do = f"call it after the last of them, `if (i + 1) % {loop.accumulate} == 0`; {ACCUMULATE}"
        loop.fail(f"{early}: {do}" if growth is None else growth)

    def _look_at(self, unreduced: list[nn.Parameter]) -> None:
        """The optimizer is about to step trainable parameters that no model is known to reduce."""
        if self.shards is not None:  # FSDP2 may have replaced its parameters since the first pass
            self.loop.reduced.update(map(id, self.shards.parameters()))
            unreduced = [p for p in unreduced if id(p) not in self.loop.reduced]
        known = bool(self.loop.reduced)  # unknown before the first backward pass, as inside a closure
        if known and unreduced and (why := self.unreduced.look(unreduced)) is not None:
            self.loop.fail(why)

    def _require_made(self, probe: nn.Parameter) -> None:
        """No backward pass was reduced since the optimizer's last step: raise if the gradients have changed since."""
        applied, version = self._applied or (lambda: None, 0)
        if probe.grad is not None and probe.grad is applied() and probe.grad._version == version:
            return
        if _nonzero(probe.grad):
            self.fail(f"optimizer.step() has a gradient, but no backward pass made it since the last step: {BY_HAND}")
        if probe.grad is None and (model := self.model()) is not None:
            held = any(_nonzero(p.grad) for group in self.optimizer.param_groups for p in group["params"])
            if held and (why := unreached(model)) is not None:
                self.fail(f"optimizer.step() with gradients that were not averaged over the ranks: {why}")

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.inside = False
        if self.loop.recorder.muted:
            return
        if self._meets and (len(args) > 1 or kwargs.get("closure") is not None):
            self.require_crossed("optimizer.step(closure)")  # its pass was the last of an accumulation
        self.updates += 1
        self._held, self._held_since = Held.NOTHING, None
        gradient = self.probe.grad if self._meets and self.probe is not None else None
        self._applied = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def require_crossed(self, where: str) -> None:
        """Raise if a gradient that is not reduced over ranks is left."""
        if not self.reduces or (self.shards is None and self._held is not Held.LOCAL):
            return
        held = [None if self.probe is None else self.probe.grad] if self.shards is None else self.shards.kept_back()
        if not any(map(_nonzero, held)):
            return
        if torch._C._current_graph_task_id() != -1:
            if self.shards is not None:
                return  # FSDP2 sets a parameter's gradient only after its reduction
            self.loop.fail(IN_BACKWARD)
        alone = f"{where} with gradients that were not averaged over the ranks, so models would differ by rank"
        model = self.model()
        if self.shards is None and model is not None and (reason := unreached(model)) is not None:
            self.loop.fail(f"{alone}: {reason}")
        why = "the last backward pass ran under no_sync(), or without the DDP module (model.module), or a second time"
        why += ", or it left out parameters that DDP waits for (write DDP(net, find_unused_parameters=True))"
        self.loop.fail(f"{alone}: {why}. Run the last batch of a step without no_sync(); {ACCUMULATE}")

    def piece_done(self, *, round_over: bool) -> None:
        """`controller.step()`: this batch is done, and with `round_over` its round, too."""
        if round_over and len(self.loop.models) == 1 and (self._held is Held.LOCAL or self.shards is not None):
            self.require_crossed("controller.step()")
        self.inside, self.updates = False, 0


def parameters_of(optimizer: Optimizer) -> set[int]:
    """`id` of the parameters that it updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _nonzero(gradient: Tensor | None) -> bool:
    """Whether there is a gradient that is not all zero. Reads from the device."""
    if gradient is None:
        return False
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.detach().count_nonzero())
