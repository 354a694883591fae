"""W ranks as threads of one process, to test a job's decisions, windows and states without processes.

They communicate in memory, and a waiting rank beats for all. Everything else is what ranks in processes run.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dynamix.errors import DynamixError
from dynamix.runtime.ranks.group import ControlGroup, Work, chained
from dynamix.runtime.ranks.liveness import BEAT_S
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.ranks.watch import CLOSED, RankWatch

STACK_BYTES = 512 * 1024  # of a rank's thread; there may be 1,024
T = TypeVar("T")


class Call:
    """A call of all ranks; `over` completes once the first `sources` of them have given their parts.

    parts    by rank
    missing  ranks that have not given their part
    came     number of ranks that have come, with or without a part
    """

    def __init__(self, sources: int) -> None:
        self.parts: list[Any] = [None] * sources
        self.missing, self.came, self.over = set(range(sources)), 0, Work()

    def come(self, rank: int, part: Any) -> None:
        self.came += 1
        if part is not None:
            self.parts[rank] = part
            self.missing.remove(rank)

    def settle(self, left: set[int]) -> None:
        """Complete it if nothing is missing; fail it if a missing part is one of the ranks that have `left`."""
        if self.over.done():
            return
        if lost := self.missing & left:
            self.over.set_exception(RuntimeError(f"Connection closed by rank {min(lost)}"))
        elif not self.missing:
            self.over.set_result(None)

    @cached_property
    def rows(self) -> Tensor:
        """The parts as one tensor (W, n), if they are rows (n,) of one length."""
        return torch.stack(self.parts)


class ThreadWire:
    """The memory that the ranks of one process share, instead of sockets and a store.

    Calls of a kind are matched by order, as in gloo. A call that needs a rank which has left fails, even if it comes
    later.
    """

    def __init__(self, workers: int) -> None:
        self.workers, self.store = workers, dist.HashStore()  # type: ignore[attr-defined]
        self.beating = threading.RLock()
        self._watches = [ThreadWatch(self, rank) for rank in range(workers)]
        self._beaten = -math.inf
        self._lock = threading.RLock()  # reentrant: callbacks run inside, and may make the next call
        self._open: dict[tuple[str, int], Call] = {}
        self._left = set[int]()

    def ranks(self) -> list[Ranks]:
        """One object per rank; its thread calls `leave` or `leave_with` at the end."""
        return [Ranks(ThreadGroup(self, watch), watch) for watch in self._watches]

    # ------------------------------------------------------------ in place of sockets

    def join(self, kind: str, number: int, sources: int, rank: int, part: Any) -> Call:
        """Add the part of `rank` (None: nothing) to the call of this kind with this `number`."""
        with self._lock:
            call = self._open.setdefault((kind, number), Call(sources))
            call.come(rank, part)
            if call.came == self.workers:
                del self._open[kind, number]
            call.settle(self._left)
        return call

    def leave(self, rank: int) -> None:
        """`rank` gives nothing more."""
        with self._lock:
            self._left.add(rank)
            for call in list(self._open.values()):
                call.settle(self._left)

    # ------------------------------------------------------------ in place of a thread for each rank's watch

    def beat(self, every_s: float = 0.0) -> None:
        """Send every rank's messages to all others; not again within `every_s`."""
        with self.beating:
            if time.monotonic() < self._beaten + every_s:
                return
            first, *others = self._watches
            for watch in (*others, first, *others):
                if not watch.ended:
                    watch.beat()
            self._beaten = time.monotonic()

    def beat_until(self, known: Callable[[], bool]) -> None:
        """Beat until `known()`, at most until all ranks have received the messages and answered."""
        for _ in range(3):
            with self.beating:
                if known():
                    return
                self.beat()


class ThreadWatch(RankWatch):
    """The watch of one of those ranks. It has no beating thread: a waiting rank beats for all."""

    def __init__(self, wire: ThreadWire, rank: int) -> None:
        super().__init__(wire.store, rank, wire.workers, threads=False)
        self.wire = wire

    @property
    def ended(self) -> bool:
        return self._end.is_set()

    def hurry(self, seconds: float = BEAT_S) -> None:
        self.wire.beat(every_s=BEAT_S)

    def request_stop(self) -> None:
        super().request_stop()
        self._until(lambda: not self.stopping.under_way)

    def told(self) -> DynamixError | None:
        """No wait as elsewhere: a rank that ends the job, or fails before training, continues only once all know."""
        return self.errors.ended or self.errors.setup_error

    def leave(self, word: str = CLOSED, *, linger: bool = False) -> None:
        if self.ended:
            return
        with self.wire.beating:
            self.alive.leave(word)
            self.beat()
            super().leave(word)
        self.wire.leave(self.rank)

    def _until(self, known: Callable[[], bool], most_s: float = 0.0) -> None:
        if not self.ended:
            self.wire.beat_until(known)


class ThreadGroup(ControlGroup):
    """The control group of one of those ranks."""

    def __init__(self, wire: ThreadWire, watch: RankWatch) -> None:
        self.rank, self.workers = watch.rank, watch.workers
        self._wire, self._calls, self._lock = wire, 0, threading.Lock()

    def send(self, row: Tensor, answer: Tensor) -> Work:
        self._join("gather", row.clone())
        return self._join("answer", None, lambda call: _copy(answer, call.parts[0]), sources=1)

    def collect(self, row: Tensor, rows: Tensor) -> Work:
        return self._join("gather", row.clone(), lambda call: _copy(rows, call.rows))

    def answer(self, answer: Tensor) -> Work:
        return self._join("answer", answer.clone(), sources=1)

    def all_gather(self, row: Tensor, rows: Tensor) -> Work:
        return self._join("rows", row.clone(), lambda call: _copy(rows, call.rows))

    def all_sum(self, row: Tensor, total: Tensor) -> Work:
        return self._join("sum", row.clone(), lambda call: _copy(total, call.rows.sum(0)))

    def release(self) -> list[dist.ProcessGroup]:
        """It has no process groups."""
        return []

    @chained
    def _join(
        self, kind: str, part: Any, take: Callable[[Call], None] | None = None, *, sources: int | None = None
    ) -> Iterator[Work]:
        """`take` gets the call once it is complete; without it, this rank does not wait."""
        with self._lock:
            number, self._calls = self._calls, self._calls + 1
        call = self._wire.join(kind, number, sources or self.workers, self.rank, part)
        if take is not None:
            yield call.over
            take(call)


def _copy(to: Tensor, value: Tensor) -> None:
    """Copy a tensor of the same shape; nothing is broadcast."""
    if to.shape != value.shape:
        raise RuntimeError(f"ranks gave {tuple(value.shape)} numbers, and this one waits for {tuple(to.shape)}")
    to.copy_(value)


def in_threads(main: Callable[[Ranks], T], workers: int) -> list[T]:
    """What `main(ranks)` returns on each rank, by rank; every rank has its own thread.

    Raises the first error once all threads have ended; after an error the others no longer wait.

    >>> def main(ranks: Ranks) -> list[int]:
    ...     return ranks.gather(ranks.rank**2, "squares")
    >>> in_threads(main, 3)
    [[0, 1, 4], [0, 1, 4], [0, 1, 4]]
    """
    errors: list[BaseException] = []

    def run(ranks: Ranks) -> T:
        try:
            result = main(ranks)
        except BaseException as error:
            errors.append(error)
            ranks.leave_with(error)
            raise
        ranks.leave()
        return result

    before = threading.stack_size(STACK_BYTES)
    try:
        with ThreadPoolExecutor(workers) as threads:
            results = [threads.submit(run, one) for one in ThreadWire(workers).ranks()]
    finally:
        threading.stack_size(before)
    if errors:
        raise errors[0]
    return [result.result() for result in results]
