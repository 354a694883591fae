"""Process groups that a controller makes for itself, and how it lets go of them."""

import contextlib
import ctypes
import sys
import time
from typing import Any, cast

import torch
import torch.distributed as dist

MOST_PATIENCE_S = 2.0  # a backend's thread needs milliseconds
OURS = "dynamix"  # the description of a group that a controller made
_UNASKED = 0x64796E  # a tag of messages that nobody else has
_kept: list[dist.ProcessGroup] = []  # for ever: the last reference was somebody else's


def destroy_groups(groups: list[dist.ProcessGroup], *, patience_s: float) -> None:
    """Let go of groups that a controller made: sockets and threads. Empties the list. Not a collective.

    A group that its own thread lets go of last ends the whole process. So each is kept until nobody else has it, and
    for ever where somebody does after `patience_s` for all of them together, at most 2 s (the state of a hook may hold
    its groups for as long as the user holds it), or where an operation may be under way (a patience of 0).
    """
    deadline = time.monotonic() + min(patience_s, MOST_PATIENCE_S)
    while groups:
        group = groups.pop()
        if patience_s > 0 and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the job has destroyed all groups already
                dist.destroy_process_group(group)
        while sys.getrefcount(group) > 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        if patience_s <= 0 or sys.getrefcount(group) > 2:
            keep(group)


def keep(group: dist.ProcessGroup) -> None:
    """Never let go of `group`, also where the interpreter ends and lets go of everything that it knows."""
    _kept.append(group)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def on_gloo(group: dist.ProcessGroup, device: str = "cpu") -> bool:
    """Whether `group` reduces tensors of that type of device by gloo.

    A group that nobody named a back end for has one for each type of device ("cpu:gloo,cuda:nccl").
    """
    each = dict(one.split(":", 1) for one in str(dist.get_backend_config(group)).split(","))
    return each.get(device) == "gloo"


def has_ended(rank: int, group: dist.ProcessGroup) -> bool:
    """Whether the process of `rank` (of the job) has closed its connection in `group`, as far as gloo knows.

    Only a message shows it. Nobody asks for this one, so it never leaves, and is forgotten with its buffer.
    """
    if not on_gloo(group):
        return False
    try:
        dist.isend(torch.zeros(1), dst=rank, group=group, tag=_UNASKED)
    except RuntimeError:
        return True
    return False


def new_gloo_group(ranks: list[int], timeout: Any = None) -> dist.ProcessGroup:
    """A gloo group over `ranks`; a collective of those ranks alone."""
    subset = len(ranks) != dist.get_world_size()
    options = {} if timeout is None else {"timeout": timeout}
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=subset, group_desc=OURS, **options)
    return cast(dist.ProcessGroup, group)
