"""Optimizers that `wrap` never saw, but that step in a loop of a controller: whose parameters do they have?"""

import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dynamix.runtime.check.advice import WRAP_ONCE
from dynamix.runtime.sync.optimizer_means import KNOWN
from dynamix.runtime.sync.shards import is_fully_sharded


class Loop(Protocol):
    """A training loop that is watched: `dynamix.runtime.check.loop.LoopCheck`."""

    @property
    def connected(self) -> Iterable[int]: ...
    @property
    def trained(self) -> set[int]: ...
    def stranger(self, optimizer: Optimizer, /) -> None: ...
    def reduced_by_nobody(self, optimizer: Optimizer, /) -> list[str]: ...
    def step_in_backward(self, optimizer: Optimizer, /) -> None: ...


_live: "weakref.WeakSet[Any]" = weakref.WeakSet()
_watching: list[Any] = []


class Strangers:
    """Optimizers that step in `loop` and were not given to `wrap`.

    `loop` is told of every step of one, and of any optimizer's inside of a backward pass.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = weakref.ref(loop)
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._harmless: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _live.add(loop)
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_any_optimizer))

    def close(self) -> None:
        """Tell the loop nothing any more."""
        _live.discard(self._loop())

    def look(self, optimizer: Optimizer, consumed: int, *, apart: bool, stepping: bool) -> str | None:
        """What is wrong with a step of `optimizer` after so many batches; None if nothing is. May warn.

        apart      workers step apart in this batch
        stepping   an optimizer of the loop's is in its step, which may be made of this one
        """
        before, loop = self._seen.get(optimizer), self._loop()
        self._seen[optimizer] = consumed
        if loop is None or optimizer in self._harmless or before is None or consumed != before + 1:
            return None
        self._harmless.add(optimizer)  # looked at once: that is slow
        if apart and stepping:
            return None
        kind = type(optimizer).__name__
        if apart and not parameters_of(optimizer) <= loop.trained:
            left = f"an optimizer ({kind}) in this loop was not given to controller.wrap()"
            own = "what it trains is not averaged, and stays every worker's own"
            warnings.warn(f"{left}: {own}. {WRAP_ONCE}", RuntimeWarning, stacklevel=7)
        if not apart and (alone := loop.reduced_by_nobody(optimizer)):
            left = f"an optimizer ({kind}) that was not given to controller.wrap() steps"
            own = "which DDP does not reduce: unless the loop does, every rank moves its own"
            warnings.warn(f"{left} {', '.join(alone[:3])}, {own}. {WRAP_ONCE}", RuntimeWarning, stacklevel=7)
        if (name := unconnected_of(optimizer)) is None:
            return None
        why = f"its {name} model is not connected, so unequal batches would weigh alike in its gradient"
        return f"an optimizer in this loop was not given to controller.wrap(): {why}. {WRAP_ONCE}"


def parameters_of(optimizer: Optimizer) -> set[int]:
    """`id` of what it updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def unconnected_of(optimizer: Optimizer) -> str | None:
    """The kind of the model under DDP or FSDP2, given to no `wrap`, that `optimizer` trains; None if there is none.

    Slow. An optimizer made of others, such as ZeroRedundancyOptimizer, has some that nobody gives to `wrap`.
    """
    given = parameters_of(optimizer)
    loops: list[Loop] = list(_live)
    connected = {model for loop in loops for model in loop.connected}
    trained = {p for loop in loops for p in loop.trained}
    for found in gc.get_objects():
        if not issubclass(type(found), nn.Module) or id(found) in connected:
            continue
        if isinstance(found, DistributedDataParallel):
            if any(id(p) in given for p in found.parameters()):
                return type(found.module).__name__
        elif is_fully_sharded(found):  # as is every part of a connected model to which `fully_shard` was applied
            own = {id(p) for p in found.parameters()}
            if own & given and not own & trained:
                return type(found).__name__
    return None


def _any_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch._C._current_graph_task_id() != -1:
        for loop in list(_live):
            loop.step_in_backward(optimizer)
    if optimizer not in KNOWN:
        for loop in list(_live):
            loop.stranger(optimizer)
