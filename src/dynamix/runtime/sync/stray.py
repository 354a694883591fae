"""Detects collectives that a loop calls within a round of local steps: ranks would call different numbers of them.

A rank may hang in one while another waits to average. So the counters of collectives are checked after every batch, and
meanwhile by the thread that watches the ranks. If all ranks hang, in calls that do not match, the collective fails by
itself after a few seconds.

A loop may call any collectives at the end of a round, but all ranks must call the same. If a loop counts its own
batches, only some ranks may call one there. These hang in it, and the others wait for them in the next averaging.

Another thread may communicate meanwhile, such as that of a checkpoint saved in the background.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dynamix.errors import UsageError
from dynamix.runtime.ranks.process_groups import OURS
from dynamix.runtime.ranks.watch import RUNS, WAITS

STUCK_S = 5.0  # longest that the loop's own collective may take within a round
BESIDE_S = 4.0  # longest that this rank may be in one while all its other ranks wait elsewhere
_FIX = "call it at a meeting: `if controller.met:`, or every N steps, `if controller.checkpoint_due(every=N):`"
_ASKS = threading.Lock()  # for the frames of all threads
_ALL_CALL = frozenset(dist.distributed_c10d.__all__) - {"send", "recv", "isend", "irecv"}


class StrayCollectives:
    """Watches the groups with several ranks of `group`; None: this rank does not communicate."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._ranks = [] if group is None else dist.get_process_group_ranks(group)
        self._thread = threading.get_ident()  # the loop's
        self._inside: tuple[int, float] | None = None  # a collective that other ranks do not join, and since when
        self._known = -1
        self._groups: list[tuple[Any, Any, timedelta]] = []
        self._marks: list[int] | None = None  # collectives started in each group; None: not within a round
        self._others = False  # at the last check, another thread was in torch.distributed

    def begin(self) -> None:
        """This rank takes a local step; safe to call for every step."""
        if self._marks is not None or not self._ranks:
            return
        if self._known != len(_all_groups()):
            self._find()
        self._others = _others_talk(self._thread)
        for _, backend, _ in self._groups if not self._others else ():
            backend._set_default_timeout(timedelta(seconds=STUCK_S))
        self._marks = self._begun()

    def end(self) -> None:
        """This rank has come to the end of a round, or its job ends."""
        if self._marks is not None:
            self._marks = None
            for _, backend, usual in self._groups:
                backend._set_default_timeout(usual)

    def look(self) -> UsageError | None:
        """The message if the loop has started a collective since `begin`. Any thread may call it."""
        begun, marks = self._begun(), self._marks  # in this order: the loop's thread may end the round meanwhile
        if marks is None or len(begun) != len(marks) or not any(map(int.__gt__, begun, marks)):
            return None
        before, self._others = self._others, _others_talk(self._thread)
        if before or self._others:
            marks[:] = begun
            return None
        called = "the loop called a collective of its own (all_reduce, barrier, ...) between two meetings"
        return UsageError(f"{called}, which ranks call different numbers of times: {_FIX}")

    def look_beside(self, places: str) -> tuple[bool, UsageError | None]:
        """A `Look` of the watch: `look`, and whether the loop is in a collective that some other ranks have skipped."""
        name, group, number = _collective(self._thread) if self._ranks else ("", None, 0)
        if not name or not places:
            return False, self.look()
        members = set(dist.get_process_group_ranks(group))
        others = [places[n] for n, rank in enumerate(self._ranks) if rank in members and rank != dist.get_rank()]
        if WAITS not in others or RUNS in others:  # running ranks may still come
            self._inside = None
        elif self._inside is None or self._inside[0] != number:
            self._inside = number, time.monotonic()
        elif time.monotonic() - self._inside[1] > BESIDE_S:
            return True, UsageError(f"the loop called {name}() on some ranks, and others went on without it: {_FIX}")
        return True, self.look()

    def _begun(self) -> list[int]:
        return [group._get_sequence_number_for_group() for group, _, _ in self._groups]

    def _find(self) -> None:
        """Find the groups in which this rank could wait for others."""
        self._known, self._groups = len(_all_groups()), []
        for group in _all_groups():
            if len(set(self._ranks).intersection(dist.get_process_group_ranks(group))) > 1 and group.group_desc != OURS:
                # Some backends have no counter or no timeout, so their collectives cannot be detected.
                with contextlib.suppress(RuntimeError, AttributeError):
                    group._get_sequence_number_for_group()
                    for backend in map(group._get_backend, group._device_types):
                        self._groups.append((group, backend, backend.options._timeout))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """For looking at the frames of other threads, with no garbage collection meanwhile.

    Python 3.11 may collect garbage while it makes the object of a frame. If a destructor then lets that frame's thread
    run, Python may wait for itself for ever (cpython issue 106883), or read freed memory.
    """
    with _ASKS:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


@_uncollected()
def _others_talk(thread: int) -> bool:
    """Whether a thread other than `thread` and dynamix's own is in torch.distributed."""
    others = {other.ident for other in threading.enumerate() if not other.name.startswith("dynamix")} - {thread}
    stacks = [traceback.walk_stack(frame) for other, frame in sys._current_frames().items() if other in others]
    names = (" ".join(at.f_globals.get("__name__", "") for at, _ in stack) for stack in stacks)
    return any(" torch.distributed." in f" {of}" and " dynamix." not in f" {of}" for of in names)


@_uncollected()
def _collective(thread: int) -> tuple[str, Any, int]:
    """The collective that the loop runs in `thread`: its name, its group, and an identifier of this call.

    The name is empty if the loop runs none, or one that dynamix or torch has called.
    """
    found = None
    for frame, _ in traceback.walk_stack(sys._current_frames().get(thread)):  # None: this thread's, which is dynamix's
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("torch.distributed."):
            if found is None or name.startswith(("dynamix.", "torch.")):
                break
            return found.f_code.co_name, found.f_locals.get("group") or dist.group.WORLD, id(found)
        if name == "torch.distributed.distributed_c10d" and frame.f_code.co_name in _ALL_CALL:
            found = frame
    return "", None, 0


def _all_groups() -> dict[Any, Any]:
    return dist.distributed_c10d._world.pg_map
