"""Optimizers that `wrap` never saw, but that step in a loop of a controller: whose parameters do they have?"""

import gc
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dynamix.runtime.sync.optimizer_means import KNOWN
from dynamix.runtime.sync.shards import is_fully_sharded


class Loop(Protocol):
    """A training loop that is watched: `dynamix.runtime.check.loop.LoopCheck`."""

    @property
    def connected(self) -> Iterable[int]: ...
    @property
    def trained(self) -> set[int]: ...
    def stranger(self, optimizer: Optimizer, /) -> None: ...
    def step_in_backward(self, optimizer: Optimizer, /) -> None: ...


_live: "weakref.WeakSet[Any]" = weakref.WeakSet()
_watching: list[Any] = []


def watch(loop: Loop) -> None:
    """Tell `loop` of every step of an optimizer that was not given to `wrap`, or that is inside of a backward pass."""
    _live.add(loop)
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_any_optimizer))


def forget(loop: Loop) -> None:
    """Tell it nothing any more."""
    _live.discard(loop)


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
