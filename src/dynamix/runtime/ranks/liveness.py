"""Which ranks are alive, and why one is not: a beat a second through the job's store, never on the step path.

Every rank writes its own beat. Rank 0 reads them all and writes one view, which the others read: three requests a
second and rank, whatever the world size. Silence is counted by who listens, only as far as that one was awake itself:
no clocks are compared, and a rank that was stopped accuses nobody.

One thread talks to the store. Another counts what it hears, because a store on a host that hangs never answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dynamix.errors import DynamixError, WorkerLostError
from dynamix.runtime.ranks.group import ControlGroup
from dynamix.runtime.ranks.stopping import Stopping
from dynamix.runtime.ranks.store import LINGER_S, job_store, own_connection
from dynamix.runtime.ranks.uncaught import tell_of_uncaught

BEAT_S = 1.0
HASTE_S = 0.2  # between beats while ranks wait for a word
SUSPECT_S = 3.5  # of silence: a failed collective then names the rank
SILENT_S = 5.0  # of silence: the log says it then, and again after twice as long
GONE_S = 15.0  # of silence: nobody waits any longer for the rank's word on when to stop
VERDICT_S = 7.0  # longest time that a failed collective waits to learn which rank it was
ANSWER_S = 1.2  # rank 0, which hears all, stays so long for the others to read which rank was lost
LEAVE_S = 2.0  # for the last word
CONNECT_S = 1.0  # for another connection to a store that did not answer
GIVE_UP_S = 60.0  # without an answer: the store is gone
_STORE = -1  # in place of a rank
_COLLECTIVE = re.compile(
    r"gloo|NCCL|[Cc]onnection (was )?(closed|reset|refused)|[Tt]imed out|timeout|Broken pipe|recvValue|sendBytes"
)
_log = logging.getLogger("dynamix")
_opened: Counter[str] = Counter()


def failed_collective(error: BaseException) -> bool:
    """Whether `error` is what torch raises where ranks could not reach each other.

    >>> failed_collective(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1"))
    True
    >>> failed_collective(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, DynamixError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or _COLLECTIVE.search(str(error)) is not None


class Silence:
    """Seconds since a value last changed, as far as the listener itself was awake.

    >>> silence = Silence()
    >>> [silence.after(now, value, most=2.0) for now, value in ((0, "a"), (1, "a"), (2, "a"), (60, "a"), (61, "b"))]
    [0.0, 1.0, 2.0, 4.0, 0.0]
    """

    def __init__(self) -> None:
        self._value: Any = None
        self._seconds, self._then = 0.0, 0.0

    def after(self, now: float, value: Any, *, most: float) -> float:
        """The silence at `now`, where `value` was read; a gap of more than `most` seconds was the listener's own."""
        self._seconds = 0.0 if value != self._value else self._seconds + min(now - self._then, most)
        self._value, self._then = value, now
        return self._seconds


class Liveness:
    """One rank's part, of `workers` that meet in `store`. It begins at once; `leave` ends it.

    stopping   how the ranks agree on the step after which they stop
    """

    def __init__(self, store: Any, rank: int, workers: int, *, prefix: str = "dynamix/alive") -> None:
        self.rank, self.workers, self._prefix = rank, workers, prefix
        self.stopping = Stopping()
        self.lost: WorkerLostError | None = None
        self._store = own_connection(store)
        self._many = bool(getattr(self._store, "has_extended_api", lambda: False)())
        self._hosts: dict[int, str] = {}
        self._others: dict[int, float] = {}  # seconds of silence, of ranks that rank 0 hears
        self._first: dict[int, float] = {}  # the same of rank 0, or of the store
        self._left: dict[int, str] = {}  # last words
        self._said: dict[int, float] = {}  # silence at which the log says it next
        self._heard = [Silence() for _ in range(workers if rank == 0 else 0)]
        self._beats, self._news, self._word, self._hurry = 0, 0, "", False
        self._unaware = set(range(1, workers))  # of ranks that live, those that have not read rank 0's last word
        self._end = threading.Event()
        self._store.set(f"{self._prefix}/host/{rank}", _own_host())
        self._tell()
        tell_of_uncaught(self)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._listen)]
        for thread, name in zip(self._threads, ("dynamix-beat", "dynamix-listen"), strict=True):
            thread.name = name
            thread.start()

    @classmethod
    def open(cls, group: ControlGroup) -> Liveness:
        """For the ranks of a controller's own `group`, in the job's store. Every rank of it calls this."""
        name = group.name
        _opened[name] += 1  # torch uses names again
        prefix = f"dynamix/alive/{name}/{_opened[name]}"
        return cls(job_store(), group.rank, group.workers, prefix=prefix)

    @property
    def silent(self) -> dict[int, float]:
        """Ranks of which nothing was heard for `SUSPECT_S`, and for how many seconds."""
        return self._others | self._first

    # ------------------------------------------------------------ in the loop

    def step_done(self, steps: int) -> bool:
        """An optimizer step is over, `steps` in all: whether the job stops after it."""
        return self.stopping.reached(steps, self._still_there)

    def _still_there(self) -> None:
        if self._left or max(self.silent.values(), default=0.0) > GONE_S:
            raise self.explain(RuntimeError("no answer"), "the ranks could not agree on the step to stop after")

    # ------------------------------------------------------------ failures

    def explain(self, error: BaseException, what: str) -> WorkerLostError:
        """What to raise where a collective has failed with `error`: as soon as it is known which rank it was.

        Waits for that `VERDICT_S` at most; what cannot be known is not said.
        """
        if self.lost is None:
            self._hurry = True
            deadline = time.monotonic() + VERDICT_S
            while not (self.silent or self._left or self._end.is_set()) and time.monotonic() < deadline:
                time.sleep(0.05)
            silent, left = self.silent, dict(self._left)
            # Who ended because of another is no news, where that one is known.
            left = {r: word for r, word in left.items() if not word.startswith("WorkerLostError")} or left
            said = [f"{self._name(rank)} has been silent for {s:.0f} s" for rank, s in sorted(silent.items())]
            if not silent:
                said = [f"{self._name(rank)} has ended ({word})" for rank, word in sorted(left.items())]
            who = "; ".join(said) or "a rank died or did not answer within the process group's timeout"
            ranks = tuple(sorted(rank for rank in silent or left if rank != _STORE))
            self.lost = WorkerLostError(f"{what}: {who} ({_first_line(error)})", ranks)
            if self.rank == 0 and self.workers > 1:
                time.sleep(ANSWER_S)
        return self.lost

    def uncaught(self, error: BaseException) -> None:
        """This process ends with `error`: say which rank it was, if another, and tell the others."""
        if failed_collective(error):
            error.add_note(f"dynamix: {self.explain(error, 'a collective failed')}")
        self.leave_with(error)

    # ------------------------------------------------------------ the end

    def leave_with(self, error: BaseException) -> None:
        """Tell the other ranks of `error`, with which this process is about to end."""
        self.leave(f"{type(error).__name__}: {_first_line(error)}", linger=True)

    def leave(self, word: str = "its controller was closed", *, linger: bool = False) -> None:
        """Say goodbye with `word`, end the threads and let go of the store; safe to call twice."""
        if self._end.is_set():
            return
        self._word = word
        if linger and self.rank == 0:
            self._linger()
        self._end.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LEAVE_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._store = None

    def leave_unclosed(self) -> None:
        """Nobody has closed the controller, and it is collected or its process ends: perhaps with an error."""
        word = "its process ended"
        if self.rank == 0 and threading.main_thread().is_alive():
            # Who collects it does not wait, but a process that ends does, for this thread.
            threading.Thread(target=self.leave, args=(word,), kwargs={"linger": True}, name="dynamix-leave").start()
        else:
            self.leave(word, linger=True)

    def _linger(self) -> None:
        """Rank 0, whose process may hold the store, stays until the others have read its last word, or live no more."""
        self._hurry = True
        deadline = time.monotonic() + LINGER_S
        while self._unaware and self._threads[0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)

    # ------------------------------------------------------------ the two threads

    def _talk(self) -> None:
        failed_since: float | None = None
        while not self._end.wait(self._pause_s(failed_since)):
            try:
                if failed_since is not None:
                    self._connect_again()
                self._beat()
                failed_since = None
            except Exception as error:  # a store's client raises many things; its silence is what counts
                _log.debug("the job's store did not answer: %s", error)
                failed_since = failed_since or time.monotonic()
                if time.monotonic() - failed_since > GIVE_UP_S:
                    return
        if failed_since is None:
            with contextlib.suppress(Exception):  # the last word; the store may have ended with its host
                self._beat()

    def _pause_s(self, failed_since: float | None) -> float:
        """Until the next beat: from one failure to the next twice as long."""
        if failed_since is not None:
            return max(BEAT_S, time.monotonic() - failed_since)
        hurry = self._hurry or 0 in self._left
        return HASTE_S if hurry or self.stopping.under_way or not self._hosts else BEAT_S

    def _connect_again(self) -> None:
        """After a failed call: a store's client does not mend a connection that broke."""
        if hasattr(self._store, "clone"):
            self._store.set_timeout(timedelta(seconds=CONNECT_S))  # the clone's too, so that `leave` need not wait long
            self._store = own_connection(self._store, CONNECT_S)

    def _tell(self) -> None:
        self._beats += 1
        beat = {"n": self._beats, "left": self._word, "aware": 0 in self._left, **self.stopping.beat()}
        self._store.set(f"{self._prefix}/{self.rank}", json.dumps(beat))

    def _beat(self) -> None:
        self._tell()
        key = f"{self._prefix}/view"
        if self.rank == 0:
            self._hear_all()
            view = {
                "n": self._beats,
                "silent": self._others,
                "left": self._left | ({0: self._word} if self._word else {}),
            }
            self._store.set(key, json.dumps({**view, "stop": self.stopping.proposal()}))
            self._news += 1
        elif self._store.check([key]):
            self._see(json.loads(self._store.get(key)))

    def _hear_all(self) -> None:
        keys = [f"{self._prefix}/{rank}" for rank in range(self.workers)]
        if not self._hosts:
            if not self._store.check(keys):
                return  # not everybody has begun
            self._hosts = dict(enumerate(self._get([f"{self._prefix}/host/{rank}" for rank in range(self.workers)])))
        now, beats = time.monotonic(), [json.loads(text) for text in self._get(keys)]
        self._left |= {rank: beat["left"] for rank, beat in enumerate(beats) if beat["left"] and rank != self.rank}
        heard = [h.after(now, beat["n"], most=2 * BEAT_S) for h, beat in zip(self._heard, beats, strict=True)]
        self._others = {
            rank: s for rank, s in enumerate(heard) if s >= SUSPECT_S and rank not in self._left and rank != self.rank
        }
        aware = {rank for rank, beat in enumerate(beats) if beat["aware"] or beat["left"]}
        self._unaware = set(range(1, self.workers)) - aware - self._others.keys()
        self._say(self._others)
        self.stopping.lead(beats, now)

    def _see(self, view: Mapping[str, Any]) -> None:
        self._news = view["n"]
        if not self._hosts:
            self._hosts = {0: self._get([f"{self._prefix}/host/0"])[0]}
        self._left |= {int(rank): word for rank, word in view["left"].items() if int(rank) != self.rank}
        self._others = {int(rank): s for rank, s in view["silent"].items() if int(rank) != self.rank}
        missing = [rank for rank in (*self._others, *self._left) if rank not in self._hosts]
        self._hosts |= dict(zip(missing, self._get([f"{self._prefix}/host/{rank}" for rank in missing]), strict=True))
        self._say(self._others)
        self.stopping.follow(view["stop"])

    def _listen(self) -> None:
        heard, about = Silence(), _STORE if self.rank == 0 else 0
        while not self._end.wait(BEAT_S / 2):
            seconds = heard.after(time.monotonic(), self._news, most=BEAT_S)
            self._first = {about: seconds} if seconds >= SUSPECT_S else {}
            self._say(self._first, about)

    # ------------------------------------------------------------ words

    def _say(self, silent: Mapping[int, float], *about: int) -> None:
        """The log's lines, for those in `silent` and those that were and answer again (`about`: of these ranks)."""
        for rank, seconds in silent.items():
            if seconds >= self._said.get(rank, SILENT_S):
                self._said[rank] = 2 * seconds
                _log.warning("%s has been silent for %.0f s", self._name(rank), seconds)
        own = 0 if self.rank else _STORE  # counted by the other thread
        for rank in about or [rank for rank in list(self._said) if rank != own]:
            if rank in self._said and rank not in silent:
                del self._said[rank]
                _log.warning("%s answers again", self._name(rank))

    def _name(self, rank: int) -> str:
        if rank == _STORE:
            return "the job's store"
        host = self._hosts.get(rank)
        return f"rank {rank} ({host})" if host else f"rank {rank}"

    def _get(self, keys: list[str]) -> list[str]:
        values = self._store.multi_get(keys) if self._many and keys else [self._store.get(key) for key in keys]
        return [bytes(value).decode() for value in values]


def _first_line(error: BaseException) -> str:
    """Without where in torch's sources it was raised."""
    line = re.sub(r"^.*?\[/\S+\] ", "", (str(error).strip() or type(error).__name__).splitlines()[0])
    return line.split(". This is typically")[0][:200]


def _own_host() -> str:
    """Name, and the address by which it reaches the job's first rank."""
    name, master = socket.gethostname(), os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        if not (address := probe.getsockname()[0]).startswith("127."):
            return f"{name}, {address}"
    return name
