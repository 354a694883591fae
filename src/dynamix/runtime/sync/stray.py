"""Collectives that a loop calls between two meetings over parameters: ranks would call unlike numbers of them.

A rank may be stuck in one while another waits at the meeting. So the counters of collectives are looked at after every
batch, and meanwhile by the thread that watches the ranks. If all are stuck, in calls that do not fit each other, the
collective ends by itself after a few seconds.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dynamix.errors import UsageError
from dynamix.runtime.ranks.process_groups import OURS

STUCK_S = 5.0  # longest that a collective may take that is none of ours, between two meetings


class StrayCollectives:
    """Of the groups that have several of the ranks of `group`; None: nothing crosses ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._ranks = set() if group is None else set(dist.get_process_group_ranks(group))
        self._known = -1
        self._groups: list[tuple[Any, Any, timedelta]] = []
        self._marks: list[int] | None = None  # collectives that each had begun; None: ranks are at a meeting

    def begin(self) -> None:
        """This rank steps apart from the others; safe to call for every step."""
        if self._marks is not None or not self._ranks:
            return
        if self._known != len(_all_groups()):
            self._find()
        for _, backend, _ in self._groups:
            backend._set_default_timeout(timedelta(seconds=STUCK_S))
        self._marks = self._begun()

    def end(self) -> None:
        """This rank has come to a meeting."""
        if self._marks is not None:
            self._marks = None
            for _, backend, usual in self._groups:
                backend._set_default_timeout(usual)

    def look(self) -> UsageError | None:
        """What is wrong if the loop has begun a collective since `begin`. Any thread may ask."""
        begun, marks = self._begun(), self._marks  # in this order: the loop's thread may be at a meeting by now
        if marks is None or len(begun) != len(marks) or not any(n > mark for n, mark in zip(begun, marks, strict=True)):
            return None
        called = "the loop called a collective of its own (all_reduce, barrier, ...) while workers stepped apart"
        fix = "call it at a meeting: `if controller.met:`, or every N steps, `if controller.checkpoint_due(every=N):`"
        return UsageError(f"{called}, of which ranks call unlike numbers: {fix}")

    def _begun(self) -> list[int]:
        return [group._get_sequence_number_for_group() for group, _, _ in self._groups]

    def _find(self) -> None:
        """The groups in which this rank could wait for others."""
        self._known, found = len(_all_groups()), []
        for group in _all_groups():
            shared = self._ranks.intersection(dist.get_process_group_ranks(group))
            if len(shared) > 1 and group.group_desc != OURS:
                # Some backends count nothing, and some have no timeout: of those nothing is known.
                with contextlib.suppress(RuntimeError, AttributeError):
                    group._get_sequence_number_for_group()
                    for device in group._device_types:
                        backend = group._get_backend(device)
                        found.append((group, backend, backend.options._timeout))
        self._groups = found


def _all_groups() -> dict[Any, Any]:
    return dist.distributed_c10d._world.pg_map
