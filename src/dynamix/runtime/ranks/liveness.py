"""Detects which ranks are alive, and why one is not.

The listener counts silence, and only while it was itself awake. So no clocks are compared, and a rank that was stopped
does not report others as silent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dynamix.errors import DynamixError, WorkerLostError

BEAT_S = 1.0
QUIET_S = 1.5  # of silence: what the rank said it waits for is outdated
SUSPECT_S = 3.5  # of silence: an error of a collective then names the rank
LATE_S = 6.0  # of silence, for a rank that has not begun
SILENT_S = 5.0  # of silence: logged now, and again after each doubling
STORE = -1  # stands for the store, in place of a rank
_COLLECTIVE = re.compile(
    r"gloo|NCCL|[Cc]onnection (was )?(closed|reset|refused)|[Tt]imed out|timeout|Broken pipe|recvValue|sendBytes"
)
_log = logging.getLogger("dynamix")


def failed_collective(error: BaseException) -> bool:
    """Whether `error` is one that torch raises if ranks could not reach each other.

    >>> failed_collective(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1"))
    True
    >>> failed_collective(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, DynamixError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or _COLLECTIVE.search(str(error)) is not None


class Silence:
    """Seconds since a value last changed, counted only while the listener was awake.

    >>> silence = Silence()
    >>> [silence.after(now, value, most=2.0) for now, value in ((0, "a"), (1, "a"), (2, "a"), (60, "a"), (61, "b"))]
    [0.0, 1.0, 2.0, 4.0, 0.0]
    """

    def __init__(self) -> None:
        self._value: Any = self
        self._seconds, self._then = 0.0, 0.0

    def after(self, now: float, value: Any, *, most: float) -> float:
        """The silence at `now`, when `value` was read. A gap counts as `most` seconds at most: the listener slept."""
        self._seconds = 0.0 if value != self._value else self._seconds + min(now - self._then, most)
        self._value, self._then = value, now
        return self._seconds


class Liveness:
    """Sends this rank's signs of life to other ranks, and keeps theirs.

    beats  number of this rank's signs of life
    word   this rank's last message
    left   last messages of other ranks
    news   number of the first rank's newest view
    """

    def __init__(self, rank: int, workers: int) -> None:
        self.rank, self.workers = rank, workers
        self.word, self.left, self.news = "", dict[int, str](), 0
        self.here = {rank}  # ranks from which the first rank hears
        self.quiet = set[int]()  # those of them that have missed a beat
        self.unaware = set(range(1, workers))  # those of them that have not read the first rank's last message
        self._others: dict[int, float] = {}  # seconds of silence by rank, counted by the first rank
        self._first: dict[int, float] = {}  # the same for the first rank, or the store
        self._hosts = dict[int, str]()
        self._said: dict[int, float] = {}  # silence at which the next line is logged
        self._heard: dict[int, Silence] = {}
        self._listened, self.beats = Silence(), 0

    def leave(self, word: str) -> None:
        """Set `word` as this rank's last message."""
        self.word = word

    @property
    def silent(self) -> dict[int, float]:
        """Ranks that have been silent for `SUSPECT_S` or longer, with their seconds of silence."""
        return self._others | self._first

    def lost(self, error: BaseException, what: str) -> WorkerLostError:
        """The error to raise if a collective for the purpose `what` has failed with `error`."""
        silent, left = self.silent, dict(self.left)
        # Ranks that ended because of another rank matter only if that one is unknown.
        left = {r: word for r, word in left.items() if not word.startswith("WorkerLostError")} or left
        said = [f"{self._name(rank)} has been silent for {s:.0f} s" for rank, s in sorted(silent.items())]
        if not silent:
            said = [f"{self._name(rank)} has ended ({word})" for rank, word in sorted(left.items())]
        who = "; ".join(said) or "a rank died or did not answer within the process group's timeout"
        ranks = tuple(sorted(rank for rank in silent or left if rank != STORE))
        return WorkerLostError(f"{what}: {who} ({first_line(error)})", ranks)

    # ------------------------------------------------------------ for the watch

    def beat(self) -> dict[str, Any]:
        """This rank's message to the first rank."""
        self.beats += 1
        if self.rank not in self._hosts:
            self._hosts[self.rank] = own_host()
        return {"n": self.beats, "host": self._hosts[self.rank], "left": self.word, "aware": 0 in self.left}

    def lead(self, beats: Mapping[int, Mapping[str, Any]], now: float) -> dict[str, Any]:
        """The first rank's message to all, from the `beats` of ranks that have begun."""
        numbers = {rank: beats[rank]["n"] if rank in beats else 0 for rank in range(self.workers)}
        heard = {
            rank: self._heard.setdefault(rank, Silence()).after(now, n, most=2 * BEAT_S) for rank, n in numbers.items()
        }
        left = {rank: beat["left"] for rank, beat in beats.items() if beat["left"]}
        silent = {rank: s for rank, s in heard.items() if s >= SUSPECT_S and rank not in left and rank != self.rank}
        self.here = set(numbers) - silent.keys() - left.keys()
        self.quiet = {rank for rank, s in heard.items() if s >= QUIET_S}
        self.unaware = {rank for rank in self.here if rank and not (rank in beats and beats[rank]["aware"])}
        self.unaware |= {rank for rank, s in heard.items() if rank not in beats and s < LATE_S}
        hosts = {rank: beats[rank]["host"] for rank in {0, *silent, *left} & beats.keys()}
        return {"n": self.beats, "silent": silent, "left": left, "hosts": hosts}

    def follow(self, told: Mapping[str, Any]) -> None:
        """Process the first rank's message."""
        self.news = told["n"]
        self._hosts |= {int(rank): host for rank, host in told["hosts"].items()}
        self.left |= {int(rank): word for rank, word in told["left"].items() if int(rank) != self.rank}
        self._others = {int(rank): s for rank, s in told["silent"].items() if int(rank) != self.rank}
        self._say(self._others)

    def listen(self, now: float) -> None:
        """Count the silence of the first rank; on the first rank, of the store."""
        about = 0 if self.rank else STORE
        seconds = self._listened.after(now, self.news, most=BEAT_S)
        self._first = {about: seconds} if seconds >= SUSPECT_S and about not in self.left else {}
        self._say(self._first, about)

    def _say(self, silent: Mapping[int, float], *about: int) -> None:
        """Log ranks that are silent, and ranks that answer again (of the ranks `about`, if given)."""
        for rank, seconds in silent.items():
            if seconds >= self._said.get(rank, SILENT_S):
                self._said[rank] = 2 * seconds
                _log.warning("dynamix: %s has been silent for %.0f s", self._name(rank), seconds)
        own = 0 if self.rank else STORE  # counted by the other thread
        for rank in about or [rank for rank in list(self._said) if rank != own]:
            if rank in self._said and rank not in silent:
                del self._said[rank]
                _log.warning("dynamix: %s answers again", self._name(rank))

    def _name(self, rank: int) -> str:
        if rank == STORE:
            return "the job's store"
        host = self._hosts.get(rank)
        return f"rank {rank} ({host})" if host else f"rank {rank}"


def first_line(error: BaseException) -> str:
    """The first line, without the position in torch's sources."""
    line = re.sub(r"^.*?\[/\S+\] ", "", (str(error).strip() or type(error).__name__).splitlines()[0])
    return line.split(". This is typically")[0][:200]


def own_host() -> str:
    """This host's name, and the address with which it reaches the job's first rank."""
    name, master = socket.gethostname(), os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        if not (address := probe.getsockname()[0]).startswith("127."):
            return f"{name}, {address}"
    return name
