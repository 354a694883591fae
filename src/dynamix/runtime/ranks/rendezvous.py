"""Rendezvous before creating a process group: ranks compare, in the job's store, which group each is about to create.

Creating a group blocks until all of its ranks create the same one. Without a rendezvous, if one rank created another
group, all would wait for the timeout, half an hour, without any message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from dynamix.errors import DynamixError, UsageError, WorkerLostError
from dynamix.runtime.ranks.liveness import BEAT_S, LATE_S, Silence
from dynamix.runtime.ranks.process_groups import has_ended
from dynamix.runtime.ranks.store import LINGER_S, held_here, job_store, own_connection

Result = TypeVar("Result")

LOOK_AFTER_S = 2.0  # of waiting, and between checks of where others are
ELSEWHERE_S = 5.0  # since another rank said that it waits for another group, or cannot create its own
WITHOUT_US_S = 20.0  # since another rank created a group without this one and has not come: logged then
LOOKED_AT = 32  # ranks per check
_KNOW = "dynamix/place/know"  # counts ranks that were refused, or have read that another was
_meetings: Counter[tuple[int, ...]] = Counter()  # of this process, by their ranks
_FIX = "pass the same process_group to Controller(...) on all of its ranks"
_log = logging.getLogger("dynamix")


def meet(group: dist.ProcessGroup, *, timeout_s: float) -> None:
    """Wait until all ranks of `group` are about to create another group of them. A collective call of these ranks.

    Raises `UsageError` if ranks wait for each other to create different groups, or if one could not create any. Raises
    `WorkerLostError`, which names the ranks, if some have ended or did not come within `timeout_s`, and if the store
    does not answer. A rank that works with others may come later; the log says which rank is missing.
    """
    meeting, silence = Rendezvous(group), Silence()

    def look() -> None:
        if (silent_s := silence.after(time.monotonic(), meeting.answers, most=BEAT_S)) > LATE_S:
            told = f"the job's store has been silent for {silent_s:.0f} s"
            raise WorkerLostError(f"not all ranks have made a Controller: {told}")

    beside(lambda: meeting.wait(timeout_s), look)


def beside(call: Callable[[], Result], look: Callable[[], None]) -> Result:
    """`call()` in its own thread. `look` is called now and then; if it raises, the thread is abandoned.

    `call` needs its own connection to the store, because torch's calls wait without a timeout that could be set.
    """
    result = Future[Result]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # raised again in the waiting thread
            result.set_exception(error)

    threading.Thread(target=run, name="dynamix-open", daemon=True).start()
    while not wait([result], 0.25).done:
        look()
    return result.result()


def refuse(why: str, *, store: Any = None, lost: int = 0) -> None:
    """Inform ranks that wait for this one that it will not come.

    If the store ends with this process, wait until they have read that, except for `lost` ranks, `LINGER_S` at most.
    """
    store = store if store is not None else job_store()
    deadline = time.monotonic() + (LINGER_S if held_here(store) else 0.0)
    with contextlib.suppress(RuntimeError):  # the store is gone
        store.set(_place(dist.get_rank()), json.dumps({"error": why}))
        store.add(_KNOW, 1)
        while time.monotonic() < deadline and store.add(_KNOW, 0) < dist.get_world_size() - lost:
            time.sleep(0.05)


def require_alone() -> None:
    """Raise `UsageError` if a process group now exists, although this process's controller was made without one.

    Launchers that set no WORLD_SIZE allow no earlier check.
    """
    if dist.is_available() and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        late = f"this controller was made before the process group of {ranks} ranks, so every rank would train alone"
        fix = "move torch.distributed.init_process_group(...) above dynamix.Controller(...)"
        alone = "or, if they are to train alone, pass process_group=, a group of this rank only"
        refuse(f"{late}: {fix}")
        raise UsageError(f"{late}: {fix}, {alone}")


def _place(rank: int) -> str:
    return f"dynamix/place/{rank}"


class Rendezvous:
    """One rank's part in one rendezvous.

    answers   number of the store's answers
    """

    store: Any

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.me, self.ranks = group, dist.get_rank(), sorted(dist.get_process_group_ranks(group))
        self.answers = 0
        _meetings[tuple(self.ranks)] += 1
        whom = f"{self.ranks} {_meetings[tuple(self.ranks)]}"
        self.key = f"dynamix/meeting/{hashlib.sha256(whom.encode()).hexdigest()[:16]}"
        self.seen: dict[int, tuple[dict[str, Any], float]] = {}  # where other ranks said they are, and since when
        self.told = set[int]()  # ranks that were logged as elsewhere

    def wait(self, timeout_s: float) -> None:
        """Wait until all are here."""
        self.store = own_connection(job_store())
        try:
            self._wait(timeout_s)
        except DynamixError as error:
            with contextlib.suppress(RuntimeError):  # the store may be gone by now
                self.store.add(self.key, -1)
            _meetings[tuple(self.ranks)] -= 1
            refuse(str(error), store=self.store, lost=len(error.ranks) if isinstance(error, WorkerLostError) else 0)
            raise
        except RuntimeError:  # the store is gone, perhaps with a rank that has said why
            for rank, (said, _) in self.seen.items():
                if "error" in said:
                    self._judge(rank, said, math.inf)
            raise

    def _wait(self, timeout_s: float) -> None:
        began, pause_s = time.monotonic(), 1e-3
        looked = began
        self._say(over=False)
        self.store.add(self.key, 1)
        while self.store.add(self.key, 0) < len(self.ranks):
            self.answers += 1
            if (now := time.monotonic()) - began > timeout_s:
                raise self._lost(timeout_s)
            if now - looked > LOOK_AFTER_S:
                looked = now
                self._look(now)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.1)
        self._say(over=True)

    def _say(self, *, over: bool) -> None:
        self.store.set(_place(self.me), json.dumps({"ranks": self.ranks, "over": over}))

    def _look(self, now: float) -> None:
        """Raise `UsageError` if a rank has been elsewhere so long that it will not come."""
        others = [rank for rank in self.ranks if rank != self.me]
        if len(others) > LOOKED_AT:
            others = random.Random(now).sample(others, LOOKED_AT)  # not the job's generator
        for rank in others:
            said = self._said(rank)
            if said != self.seen.get(rank, ({}, now))[0]:
                self.seen[rank] = said, now
                if "error" in said:
                    self.store.add(_KNOW, 1)
            if said:  # it has begun to create a group
                self._judge(rank, said, now - self.seen[rank][1])
            elif has_ended(rank, self.group):
                told = f"rank {rank} has ended before it made a Controller. Its error is in its own log"
                raise WorkerLostError(told, (rank,))

    def _lost(self, timeout_s: float) -> WorkerLostError:
        places = {rank: self._said(rank).get("ranks") for rank in self.ranks}
        lost = tuple(rank for rank in self.ranks if places[rank] != self.ranks)
        text = f"ranks {list(lost)} made no such Controller within {timeout_s:.0f} s"
        if elsewhere := [rank for rank in lost if places[rank]]:
            text += f", but rank {elsewhere[0]} made one over ranks {places[elsewhere[0]]}: {_FIX}"
        return WorkerLostError(text, lost)

    def _said(self, rank: int) -> dict[str, Any]:
        said = self.store.check([_place(rank)]) and json.loads(bytes(self.store.get(_place(rank))))
        return dict(said or {})

    def _judge(self, rank: int, place: dict[str, Any], since_s: float) -> None:
        if "error" in place and since_s > ELSEWHERE_S:
            raise UsageError(f"rank {rank} could not make its Controller: {place['error']}")
        if "error" in place or place["ranks"] == self.ranks:
            return
        theirs = f"rank {rank} makes its Controller over ranks {place['ranks']}"
        if since_s > ELSEWHERE_S and self._waits_for_me(rank) and self._waits_for_me(rank):  # check all of it twice
            raise UsageError(f"{theirs}, rank {self.me} over ranks {self.ranks}: {_FIX}")
        if since_s > WITHOUT_US_S and rank not in self.told:
            self.told.add(rank)
            waits = f"rank {self.me} waits for it to make one over ranks {self.ranks}"
            _log.warning("dynamix: %s, and %s. If it never does, %s", theirs, waits, _FIX)

    def _waits_for_me(self, rank: int) -> bool:
        """Whether `rank` cannot continue before this rank does: its group needs this rank, or another rank that cannot
        continue before this one."""
        asked, known = [rank], {rank}
        while asked:
            said = self._said(asked.pop())
            if "error" in said or said.get("over", True):
                continue
            ranks = said["ranks"]
            missing = [other for other in ranks if other == self.me or self._said(other).get("ranks") != ranks]
            if self.me in missing:
                return True
            fresh = [other for other in missing[:LOOKED_AT] if other not in known]
            known.update(fresh)
            asked += fresh
        return False
