"""How the ranks of a controller find each other, and make sure that all were given the same."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dynamix.errors import UsageError
from dynamix.runtime.ranks.compare import VERSION, require_same
from dynamix.runtime.ranks.group import ControlGroup, open_control
from dynamix.runtime.ranks.rendezvous import meet, refuse


def open_control_group(group: dist.ProcessGroup, given: Mapping[str, Any] | None = None) -> ControlGroup:
    """For the controller's own messages between the ranks of `group`, with its timeout. A collective call.

    Raises `UsageError` on every rank when `given` (plain values by name) differs between ranks.
    """
    ranks, timeout = dist.get_process_group_ranks(group), _timeout_of(group)
    if given is not None:
        meet(ranks, timeout_s=1800.0 if timeout is None else timeout.total_seconds())
    control = open_control(ranks, timeout, name=str(group.group_name))
    if given is not None:
        fix = "Pass the same arguments to Controller(...) on every rank; what belongs to one rank is a list of one each"
        fixes = {"": fix, VERSION: "Install one and the same version of dynamix for every rank"}
        facts = {VERSION: sys.modules["dynamix"].__version__, **given}
        require_same(facts, control, "Controller(...) got other arguments on some ranks", fixes)
    return control


class Same(dict[str, Any]):
    """Plain values by name, and the group over which they were compared."""

    group: ControlGroup | None = None


@contextmanager
def one_for_all(group: dist.ProcessGroup | None) -> Iterator[Same]:
    """What is put in must be the same on all ranks of `group`, and an error inside is raised on all of them.

    A collective call; leaves a control group over those ranks in the answer's `group`. Raises `UsageError` on every
    rank when values differ or only some ranks failed, the error itself where all failed alike.
    """
    same, error = Same(error=None), None
    try:
        yield same
    except Exception as caught:
        error = caught
        same.clear()
        same["error"] = str(caught)
    if group is not None:
        same.group = open_control_group(group, same)
    if error is not None:
        raise error


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's number in `group`, 0 without one. Raises `UsageError` where it is not a member."""
    rank = 0 if group is None else dist.get_rank(group)
    if rank < 0:
        fix = "pass the group that this rank trains in, or make a Controller only on the ranks of that group"
        why = f"rank {dist.get_rank()} is not in process_group: {fix}"
        refuse(why)
        raise UsageError(why)
    return rank


def require_no_launcher() -> None:
    """Raise `UsageError` in one of several processes of a job whose process group does not exist yet.

    torchrun and its like say how many they started in WORLD_SIZE.
    """
    started = os.environ.get("WORLD_SIZE", "")
    if started.isdigit() and int(started) > 1:
        alone = f"this is one of {started} processes (WORLD_SIZE={started}), but there is no process group yet"
        why = "every process would train alone"
        fix = "move torch.distributed.init_process_group(...) above dynamix.Controller(...)"
        raise UsageError(f"{alone}, so {why}: {fix}")


def _timeout_of(group: dist.ProcessGroup) -> Any:
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None
