"""Connects the ranks of a job: rendezvous, a process group of their own, and a comparison of their arguments."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dynamix.errors import UsageError
from dynamix.runtime.ranks.compare import VERSION, require_same
from dynamix.runtime.ranks.group import open_control
from dynamix.runtime.ranks.ranks import Alone, Ranks
from dynamix.runtime.ranks.rendezvous import beside, meet, refuse
from dynamix.runtime.ranks.store import job_store
from dynamix.runtime.ranks.watch import AbortableWait, RankWatch

_opened: Counter[str] = Counter()  # controllers of this process, by name of their group


class Same(dict[str, Any]):
    """Plain values by name, and after the comparison the ranks that hold equal values."""

    ranks: Ranks

    def compare(self, group: dist.ProcessGroup | None) -> Ranks:
        """Connect the `ranks` of `group`, and check that values are equal. A collective call: see `open_ranks`."""
        self.ranks = Alone() if group is None else open_ranks(group, self)
        return self.ranks


@contextmanager
def one_for_all(group: dist.ProcessGroup | None) -> Iterator[Same]:
    """The values put into the object must be equal on all ranks of `group`; an error inside is raised on all ranks.

    A collective call; stores the ranks in the object's `ranks`. Raises `UsageError` on every rank if values differ or
    only some ranks failed, and the error itself if all failed alike.
    """
    same, error = Same(error=None), None
    try:
        yield same
    except Exception as caught:
        error = caught
        same.clear()
        same["error"] = str(caught)
    ranks = same.compare(group)
    if error is not None:
        ranks.leave()
        raise error


def open_ranks(group: dist.ProcessGroup, given: Mapping[str, Any]) -> Ranks:
    """Connect the ranks of `group`, which must all pass equal values `given`, plain values by name. A collective call.

    Raises `UsageError` on every rank if values differ, or if ranks wait for each other to make different groups, and
    `WorkerLostError` within seconds if a rank is lost meanwhile.
    """
    members, timeout, name = dist.get_process_group_ranks(group), timeout_of(group), str(group.group_name)
    meet(group, timeout_s=1800.0 if timeout is None else timeout.total_seconds())
    _opened[name] += 1  # one group may have several controllers
    prefix = f"dynamix/watch/{name}/{_opened[name]}"
    watch = RankWatch(job_store(), members.index(dist.get_rank()), len(members), prefix=prefix)
    try:
        ranks = Ranks(beside(functools.partial(open_control, members, timeout), AbortableWait(watch).look), watch)
        fix = "Pass the same arguments to Controller(...) on every rank; a bound for each rank goes in a list"
        fixes = {"": fix, VERSION: "Install one and the same version of dynamix for every rank"}
        facts = {VERSION: sys.modules["dynamix"].__version__, **given}
        require_same(facts, ranks.rows, "Controller(...) got different arguments on some ranks", fixes, {})
    except Exception as error:
        watch.leave_with(error)
        raise
    watch.all_have_come()
    weakref.finalize(ranks, watch.leave_unclosed)  # in case the calling constructor fails
    return ranks


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's number in `group`, 0 without a group. Raises `UsageError` if it is not a member."""
    rank = 0 if group is None else dist.get_rank(group)
    if rank < 0:
        fix = "pass the group that this rank trains in, or make a Controller only on the ranks of that group"
        why = f"rank {dist.get_rank()} is not in process_group: {fix}"
        refuse(why)
        raise UsageError(why)
    return rank


def require_no_launcher() -> None:
    """Raise `UsageError` if this is one of several processes of a job that has no process group yet.

    torchrun and similar launchers set WORLD_SIZE to the number of processes.
    """
    started = os.environ.get("WORLD_SIZE", "")
    if started.isdigit() and int(started) > 1:
        alone = f"this is one of {started} processes (WORLD_SIZE={started}), but there is no process group yet"
        fix = "move torch.distributed.init_process_group(...) above dynamix.Controller(...)"
        raise UsageError(f"{alone}, so every process would train alone: {fix}")


def timeout_of(group: dist.ProcessGroup) -> Any:
    """The timeout of `group`; None if it cannot be read."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None
