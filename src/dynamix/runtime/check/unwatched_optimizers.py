"""Detects steps of optimizers that were not passed to `wrap`, and of any optimizer inside a backward pass."""

import gc
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dynamix.runtime.check.advice import WRAP_ONCE
from dynamix.runtime.check.model import Loop, ModelCheck, parameters_of
from dynamix.runtime.check.unreached import IN_BACKWARD
from dynamix.runtime.sync.optimizer_means import KNOWN
from dynamix.runtime.sync.shards import is_fully_sharded

_live: "weakref.WeakSet[Strangers]" = weakref.WeakSet()
_watching: list[Any] = []


class GradientPasses:
    """Records in which backward pass the gradients of connected models were last computed, if that matters.

    An optimizer that steps inside a backward pass, in a hook of a parameter or module, may apply gradients that DDP has
    not reduced yet. Not every such step is wrong: its gradients may be from an earlier pass. So hooks of dynamix note
    in which pass each gradient was computed. A model has them from the start if its parameters have hooks that may
    step, otherwise after the first such step.
    """

    def __init__(self) -> None:
        self._parameters = dict[int, nn.Parameter]()  # those that DDP reduces, by `id`
        self._made = dict[int, int]()  # number of the last pass, by `id` of each watched parameter

    def connect(self, model: Any) -> None:
        """Add a model under DDP whose communication hook steps no optimizer."""
        reduced = {id(p): p for p in model._module_parameters if p.requires_grad}
        self._parameters |= reduced
        if any(p._post_accumulate_grad_hooks for p in reduced.values()):
            for parameter in reduced.values():
                self._watch(parameter)

    def unreduced(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` has gradients of this thread's current pass, which DDP has not reduced."""
        now: int = torch._C._current_graph_task_id()
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._parameters]
        found = any(self._made.get(id(p)) == now for p in own)
        for parameter in own:
            self._watch(parameter)
        return found

    def _watch(self, parameter: nn.Parameter) -> None:
        made, of = self._made, id(parameter)
        if of not in made:
            made[of] = -1

            def note(gradient: Tensor) -> None:
                made[of] = torch._C._current_graph_task_id()

            parameter.register_hook(note)


class Strangers:
    """Optimizers that step in `loop` but were not passed to `wrap`, and any that step inside a backward pass.

    checks   one for each model and optimizer of the loop
    """

    def __init__(self, loop: Loop, checks: Sequence[ModelCheck]) -> None:
        self._loop, self.checks, self.passes = loop, checks, GradientPasses()
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._harmless: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _live.add(self)
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_any_optimizer))

    def close(self) -> None:
        """Stop checking."""
        _live.discard(self)

    def in_backward(self, optimizer: Optimizer) -> None:
        """Some optimizer, in `wrap` or not, steps inside a backward pass: raise if its gradients are not reduced."""
        loop = self._loop
        if not loop.recorder.muted and not loop.steps_apart() and self.passes.unreduced(optimizer):
            loop.fail(IN_BACKWARD)

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer that was not passed to `wrap` steps: raise if it trains an unconnected DDP or FSDP2 model."""
        loop = self._loop
        if loop.source is None or not self.checks or loop.recorder.muted:
            return
        piece, consumed = loop.piece_of_optimizer(), loop.source.batches_consumed
        before, self._seen[optimizer] = self._seen.get(optimizer), consumed
        if optimizer in self._harmless or before is None or consumed != before + 1:
            return
        self._harmless.add(optimizer)  # check it only once, because this is slow
        apart = piece is not None and piece.round.apart
        if apart and any(check.inside for check in self.checks):
            return  # one of the loop's optimizers may contain this one
        kind = type(optimizer).__name__
        if apart and not parameters_of(optimizer) <= _trained(self.checks):
            left = f"an optimizer ({kind}) in this loop was not given to controller.wrap()"
            own = "the parameters that it trains are not averaged, so they differ by worker"
            warnings.warn(f"{left}: {own}; {WRAP_ONCE}", RuntimeWarning, stacklevel=6)
        if not apart and (alone := self._reduced_by_nobody(optimizer)):
            left = f"an optimizer ({kind}) that was not given to controller.wrap() trains"
            own = "and DDP does not average their gradients: average them, or unfreeze and add layers before DDP(net)"
            warnings.warn(f"{left} {', '.join(alone[:3])}, {own}", RuntimeWarning, stacklevel=6)
        if (name := unconnected_of(optimizer)) is not None:
            why = f"its {name} model was not given either, so large and small batches would get equal weights"
            loop.fail(f"an optimizer in this loop was not given to controller.wrap(): {why}; {WRAP_ONCE}")

    def _reduced_by_nobody(self, optimizer: Optimizer) -> list[str]:
        """Names of its parameters that belong to connected models, but that those models do not reduce."""
        own = parameters_of(optimizer) - self._loop.reduced if self._loop.reduced else set[int]()
        reducing = {id(check.model()): check for check in self.checks if check.reduces}
        return [name for check in reducing.values() for name in check.unreduced.names(own)]


def _trained(checks: Iterable[ModelCheck]) -> set[int]:
    """`id` of the parameters that the loop's optimizers train."""
    return {p for check in checks for p in parameters_of(check.optimizer)}


def unconnected_of(optimizer: Optimizer) -> str | None:
    """The class of a DDP or FSDP2 model that `optimizer` trains and no `wrap` call was given; None if there is none.

    Slow. An optimizer such as ZeroRedundancyOptimizer contains others that are never passed to `wrap`.
    """
    given = parameters_of(optimizer)
    checks = [check for strangers in list(_live) for check in strangers.checks]
    connected, trained = {id(check.model()) for check in checks}, _trained(checks)
    for found in gc.get_objects():
        if not issubclass(type(found), nn.Module) or id(found) in connected:
            continue
        ddp = isinstance(found, DistributedDataParallel)
        if ddp or is_fully_sharded(found):  # true of every fully sharded part of a connected model, too
            own = {id(p) for p in found.parameters()}
            if own & given and (ddp or not own & trained):
                return type(found.module if ddp else found).__name__
    return None


def _any_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch._C._current_graph_task_id() != -1:
        for strangers in list(_live):
            strangers.in_backward(optimizer)
    if optimizer not in KNOWN:
        for strangers in list(_live):
            strangers.stepped(optimizer)
