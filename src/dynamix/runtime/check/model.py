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
    """The state of a training loop: the batch in hand, and what each of its models has done with it.

    recorder     is muted while passes are discarded (warm-up, the search for limits)
    fail_with    gets the error, tells others, and returns it to be raised
    gather       what every rank tells in a collective call, which is named
    tell         takes what the window's row is to say of samples that the rank was not dealt
    reduced      `id` of the parameters whose gradients some connected model reduces
    piece        of the passes since the last `step()`; `stepped` is the batch that was consumed last
    forwards     passes of the batch in hand
    models       that train, by now
    group        optimizer steps
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
        """The samples of the batch in hand, if there is one."""
        return None if self.source is None or self.source.current is None else self.source.current.samples

    def fail(self, message: str) -> NoReturn:
        """Raise `UsageError`, on every rank."""
        raise self.fail_with(UsageError(message))

    @property
    def in_pieces(self) -> bool:
        """Whether shares are cut by size, so that ranks have unlike numbers of batches."""
        return self.source is not None and self.source.micro_batch is not None

    def piece_of_optimizer(self) -> Piece | None:
        """The batch that an optimizer's step without a forward pass belongs to; None before the first.

        It may be for a batch that was passed over, or come after `step()`.
        """
        source = self.source
        now = None if source is None else source.current
        if source is None or now is None:
            return self.stepped
        belongs = self.forwards or ((now.last or now.round.apart) and source.received()[0] > source.batches_consumed)
        return now if belongs else self.stepped

    def steps_apart(self) -> bool:
        """Whether the batch in hand is an optimizer step of this rank's own."""
        piece = None if self.source is None else self.source.current
        return piece is not None and piece.round.apart

    def too_late(self) -> bool:
        """Whether every batch that the loop has is over."""
        source = self.source
        return source is not None and 0 < source.received()[0] <= source.batches_consumed

    def epoch_over(self) -> bool:
        """Whether the loop has stepped all batches of an epoch."""
        return self.source is not None and self.source.exhausted and self.too_late()

    def backwards(self) -> int:
        """Backward passes so far, as far as they are counted."""
        return 0

    def growth(self) -> str | None:
        """The likely reason why more batches wait than at the epoch's beginning; None if no more do."""
        return None


class Held(Enum):
    """The gradients that backward passes have left in `.grad` since the optimizer's last step."""

    NOTHING = auto()
    LOCAL = auto()  # some of it has not crossed ranks
    CROSSED = auto()


class ModelCheck:
    """One connected model and one optimizer of it, whose step ends an update. A batch may have any number of updates.

    Nor are the passes of an update counted. A further reduction takes a mean over like values of what has crossed ranks
    already, so several passes give the sum of their unions' gradients.

    reduces    whether its gradients cross ranks in DDP's hook, or in FSDP2's reduce-scatter
    shards     what FSDP2 holds of it, which then says where gradients are
    """

    def __init__(
        self, loop: Loop, model: nn.Module, optimizer: Optimizer, *, reduces: bool, shards: Shards | None
    ) -> None:
        self.loop, self.optimizer, self.reduces, self.shards = loop, optimizer, reduces, shards
        self._adds = reduces or (shards is not None and loop.workers > 1)
        self.unreduced = Unreduced(model, loop.gather, shards)
        self.partners: list[ModelCheck] = []  # of the same model, with its other optimizers
        self.model = weakref.ref(model)  # DDP keeps this object, in C++
        KNOWN.add(optimizer)
        self._held = Held.NOTHING
        self._held_since: int | None = None  # round in which that was made
        self._applied: tuple[weakref.ref[Tensor], int] | None = None  # the probe's gradient, and its version
        self.inside = self._meets = False  # `optimizer.step()` runs; and its gradients meet others
        self.updates = self.backwards = 0  # optimizer steps of the batch in hand; backward passes so far
        self.probe = None if is_fully_sharded(model) else self._one_of(model, parameters_of(optimizer))
        self._stale = False
        self._hooks: list[Any] = [] if self.probe is None else self._watch(self.probe)
        self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer))
        self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer))

    def close(self) -> None:
        """Look at nothing any more: the model and its optimizer may be trained on by others."""
        for hook in self._hooks:
            hook.remove()

    def _one_of(self, model: nn.Module, owned: set[int]) -> nn.Parameter | None:
        """The first parameter of `owned`, by `id`, whose gradients `model` reduces as far as that is known yet."""
        ignored, reduced = getattr(model, "parameters_to_ignore", ()), self.loop.reduced
        known = any(id(p) in reduced for p in model.parameters())
        for name, p in getattr(model, "module", model).named_parameters():
            if p.requires_grad and id(p) in owned and name not in ignored and (id(p) in reduced or not known):
                return p
        return None

    def _watch(self, probe: nn.Parameter) -> list[Any]:
        """Hooks of `probe`, which must not keep this object: no collector of garbage sees what torch holds in C++."""
        alive = weakref.ref(self)

        def before_adding(gradient: Tensor) -> None:
            if (check := alive()) is not None:
                check._before_adding()

        def added(probe: Tensor) -> None:  # which `torch.autograd.grad` does not
            if (check := alive()) is not None:
                check._added()

        return [probe.register_hook(before_adding), probe.register_post_accumulate_grad_hook(added)]

    def _before_adding(self) -> None:
        """The probe's gradient is known: whether it would be added to that of an earlier batch."""
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
        """The gradients of these are reduced."""
        self.loop.reduced.update(map(id, parameters))

    def reducing(self, piece: Piece | None) -> None:
        """A synchronised backward pass of `piece` has its first gradients."""
        loop = self.loop
        self.backwards += 1
        if not loop.forwards and not self.inside:
            if loop.source is None or not loop.source.batches_issued:
                loop.fail(FOREIGN)
            after = "backward() came after controller.step(), so its gradient would get another batch's weight"
            loop.fail(f"{after}: {REPEATED if loop.epoch_over() else ONCE}; {STEP}")
        if piece is not None and (piece.round.apart or (piece.by_size and not piece.last and not self.inside)):
            crossed = "backward() exchanged gradients of a local batch, of which ranks run different numbers"
            loop.fail(f"{crossed}: {LOCAL}")
        if self.shards is not None:
            older = self._held_since is not None and self._held_since < loop.group
            stale = older and any(map(_nonzero, self.shards.reduced()))
            self._held_since = loop.group
            if stale:
                self._fail_stale()

    def reduced(self) -> None:
        """All gradients of a synchronised backward pass are on their way: nothing is local any more."""
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
            own = []  # a plain loop, as it is run in every step
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
        """The optimizer is about to step trainable parameters that are not known to be reduced."""
        if self.shards is not None:  # its parameters may be others since its first pass
            self.loop.reduced.update(map(id, self.shards.parameters()))
            unreduced = [p for p in unreduced if id(p) not in self.loop.reduced]
        known = bool(self.loop.reduced)  # not before the first backward pass, as inside of a closure
        if known and unreduced and (why := self.unreduced.look(unreduced)) is not None:
            self.loop.fail(why)

    def _require_made(self, probe: nn.Parameter) -> None:
        """No backward pass was reduced since the optimizer's last step: raise if it has other gradients than then."""
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
            self.require_crossed("optimizer.step(closure)")  # its pass was the last of those that accumulate
        self.updates += 1
        self._held, self._held_since = Held.NOTHING, None
        gradient = self.probe.grad if self._meets and self.probe is not None else None
        self._applied = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def require_crossed(self, where: str) -> None:
        """Raise if a gradient of this rank alone is left."""
        if not self.reduces or (self.shards is None and self._held is not Held.LOCAL):
            return
        held = [None if self.probe is None else self.probe.grad] if self.shards is None else self.shards.kept_back()
        if not any(map(_nonzero, held)):
            return
        if torch._C._current_graph_task_id() != -1:
            if self.shards is not None:
                return  # FSDP2 gives a parameter no gradient that has not crossed ranks
            self.loop.fail(IN_BACKWARD)
        alone = f"{where} with gradients that were not averaged over the ranks, so models would differ by rank"
        model = self.model()
        if self.shards is None and model is not None and (reason := unreached(model)) is not None:
            self.loop.fail(f"{alone}: {reason}")
        why = "the last backward pass ran under no_sync(), or without the DDP module (model.module), or a second time"
        why += ", or it left out parameters that DDP waits for (write DDP(net, find_unused_parameters=True))"
        self.loop.fail(f"{alone}: {why}. Run the last batch of a step without no_sync(); {ACCUMULATE}")

    def piece_done(self, *, round_over: bool) -> None:
        """`controller.step()`: this batch is over, and its round perhaps."""
        if round_over and len(self.loop.models) == 1 and (self._held is Held.LOCAL or self.shards is not None):
            self.require_crossed("controller.step()")
        self.inside, self.updates = False, 0


def parameters_of(optimizer: Optimizer) -> set[int]:
    """`id` of what it updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _nonzero(gradient: Tensor | None) -> bool:
    """Whether there is a gradient; one set to zeros is none. Asks the device."""
    if gradient is None:
        return False
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.detach().count_nonzero())
