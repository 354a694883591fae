"""The process groups for buckets, by device type, whatever back end the process group was initialised with."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from dynamix.compression.wire import GroupWire


@dataclass(frozen=True)
class Path:
    """The groups for gradients on one type of device.

    chain   for exchanges of several collectives, one exchange at a time
    dense   for plain all-reduces
    gloo    whether calls block until they are done: then exchanges run on their own thread
    """

    chain: GroupWire
    dense: dist.ProcessGroup
    gloo: bool


def backend_on(group: dist.ProcessGroup, device: str) -> str | None:
    """The back end of `group` for a type of device; None if it has none.

    For groups with one back end per device, `torch.distributed.get_backend` returns "undefined" or "custom".
    """
    try:
        return str(group._get_backend(torch.device(device)).name()).lower()
    except RuntimeError:
        return None


def paths_of(home: dist.ProcessGroup, timeout: timedelta | None) -> dict[str, Path]:
    """The paths for `home`, by type of device. A collective call."""
    found = {}
    for device in ("cpu", "cuda"):
        backend = backend_on(home, device)
        if backend is None or (device == "cuda" and not torch.cuda.is_available()):
            continue
        gloo = backend == "gloo"
        chain, dense = (_gloo_like(home, timeout), _gloo_like(home, timeout)) if gloo else (home, home)
        found[device] = Path(GroupWire(chain), dense, gloo and device == "cpu")
    return found


def _gloo_like(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    subset = len(ranks) != dist.get_world_size()
    made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=subset)
    return cast(dist.ProcessGroup, made)
