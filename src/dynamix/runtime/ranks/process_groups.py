"""Process groups that a controller makes for itself, and how it releases them."""

import contextlib
import ctypes
import sys
import time
from typing import Any, cast

import torch
import torch.distributed as dist

MOST_PATIENCE_S = 2.0  # a backend's thread needs milliseconds
OURS = "dynamix"  # the description of a group that a controller made
_UNASKED = 0x64796E  # a tag that no other message has
_kept: list[dist.ProcessGroup] = []  # never released, because other code held a reference


def destroy_groups(groups: list[dist.ProcessGroup], *, patience_s: float) -> None:
    """Release groups that a controller made: sockets and threads. Empties the list. Not a collective.

    If a group's own thread drops its last reference, the whole process ends. So each group is kept until no other code
    refers to it. It is kept for ever if other code still does after `patience_s` for all groups together, at most 2 s
    (a hook's state may hold its groups), or if an operation may be under way (a patience of 0).
    """
    deadline = time.monotonic() + min(patience_s, MOST_PATIENCE_S)
    while groups:
        group = groups.pop()
        if patience_s > 0 and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the job has already destroyed all groups
                dist.destroy_process_group(group)
        while sys.getrefcount(group) > 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        if patience_s <= 0 or sys.getrefcount(group) > 2:
            keep(group)


def keep(group: dist.ProcessGroup) -> None:
    """Never release `group`, not even when the interpreter ends and releases all objects."""
    _kept.append(group)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def on_gloo(group: dist.ProcessGroup, device: str = "cpu") -> bool:
    """Whether `group` uses gloo to reduce tensors on devices of this type.

    A group made without a named backend has one for each device type ("cpu:gloo,cuda:nccl").
    """
    each = dict(one.split(":", 1) for one in str(dist.get_backend_config(group)).split(","))
    return each.get(device) == "gloo"


def has_ended(rank: int, group: dist.ProcessGroup) -> bool:
    """Whether gloo knows that the process of `rank` (in the job) has closed its connection in `group`.

    Only sending a message shows it. No rank receives this one, so it is never sent, and is dropped with its buffer.
    """
    if not on_gloo(group):
        return False
    try:
        dist.isend(torch.zeros(1), dst=rank, group=group, tag=_UNASKED)
    except RuntimeError:
        return True
    return False


def new_gloo_group(ranks: list[int], timeout: Any = None) -> dist.ProcessGroup:
    """A gloo group over `ranks`; a collective call of those ranks only."""
    subset = len(ranks) != dist.get_world_size()
    options = {} if timeout is None else {"timeout": timeout}
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=subset, group_desc=OURS, **options)
    return cast(dist.ProcessGroup, group)
