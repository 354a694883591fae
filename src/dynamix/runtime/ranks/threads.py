"""W ranks as threads of one process: a job whose decisions, windows and states are followed without processes.

They meet over a wire in memory, which also knows at once who has ended. All else is what ranks in processes run.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dynamix.errors import DynamixError, UsageError, WorkerLostError
from dynamix.runtime.ranks.errors import ALIKE, ended_by
from dynamix.runtime.ranks.group import ControlGroup, Work
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.ranks.waits import SETUP_ERROR_S, Arrivals

STACK_BYTES = 512 * 1024  # of a rank's thread, of which there may be 1,024
T = TypeVar("T")


class ThreadWork:
    """What is under way for one rank; as `dist.Work`.

    take   called with the call that it is a part of, once all has come; None: it waits for nothing
    """

    def __init__(self, rank: int, take: Callable[[Call], None] | None) -> None:
        self.rank, self._take = rank, take
        self._future: Future[Any] = Future()

    def end(self, call: Call, error: Exception | None = None) -> None:
        """On the thread of whoever came last."""
        try:
            if error is None and self._take is not None:
                self._take(call)
        except Exception as wrong:  # such as rows of unlike lengths: raised where this rank waits
            error = wrong
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future[Any]:
        return self._future

    def wait(self) -> None:
        self._future.wait()


@dataclass
class Call:
    """A call of all ranks, as far as they came: what they gave, and who waits. `sources`: how many of them give."""

    kind: str
    sources: int
    came: int = 0
    given: dict[int, Any] = field(default_factory=dict)
    waiting: list[ThreadWork] = field(default_factory=list)

    @cached_property
    def parts(self) -> list[Any]:
        """What was given, by rank."""
        return [self.given[rank] for rank in range(self.sources)]

    @cached_property
    def rows(self) -> Tensor:
        """Rows (n,) of one length, (W, n)."""
        return torch.stack(self.parts)


class ThreadWire:
    """What the ranks of one process share in place of sockets and a store.

    Calls are matched by order, as gloo's are. One that needs a rank which has left fails, also where it comes later;
    so does any, once a rank has ended the job, or two made calls of unlike kinds where one belongs to the other.

    left    what ranks that have left said, by rank
    ended   the error with which a rank ended the job: its number, kind and message
    failed  the same of ranks that raised an error before training and did not go on, by rank
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.left: dict[int, str] = {}
        self.ended: dict[str, Any] | None = None
        self.failed: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._open: dict[int, Call] = {}
        self._agreements: dict[int, str] = {}
        self._steps: dict[int, int] = {}
        self._stop_at: int | None = None
        self._unlike = ""

    def join(
        self, number: int, kind: str, sources: int, rank: int, value: Any, take: Callable[[Call], None] | None
    ) -> ThreadWork:
        """The part of `rank` in the call with this `number`; a `value` of None gives nothing."""
        work = ThreadWork(rank, take)
        with self._lock:
            call = self._open.setdefault(number, Call(kind, sources))
            call.came += 1
            if call.kind != kind:
                self._unlike = f"rank {rank} is in {kind}, another one in {call.kind}: {ALIKE}"
            if value is not None:
                call.given[rank] = value
            if take is not None:
                call.waiting.append(work)
            if call.came == self.workers:
                del self._open[number]
            over = self._over(call)
        if take is None:
            work.end(call)
        for other, error in over:
            other.end(call, error)
        if self._unlike:
            self._fail()
        return work

    def leave(self, rank: int, word: str) -> None:
        """The thread of `rank` gives nothing more, and takes nothing."""
        with self._lock:
            self.left.setdefault(rank, word)
        self._fail()

    def last_words(self) -> dict[int, str]:
        """Of ranks that have left."""
        with self._lock:
            return dict(self.left)

    def end(self, told: dict[str, Any]) -> None:
        """A rank ends the job with an error."""
        with self._lock:
            self.ended = self.ended or told
        self._fail()

    def agreeing(self, number: int, what: str) -> str:
        """What ranks wait for in their agreement with this `number`, by who came first."""
        with self._lock:
            return self._agreements.setdefault(number, what)

    def stop_soon(self) -> None:
        """All stop after the same step: the first that nobody has done."""
        with self._lock:
            self._stop_at = self._stop_at or max(self._steps.values(), default=0) + 1

    def step_done(self, rank: int, steps: int) -> bool:
        with self._lock:
            self._steps[rank] = steps
            return self._stop_at is not None and steps >= self._stop_at

    def _fail(self) -> None:
        with self._lock:
            over = [(call, self._over(call)) for call in self._open.values()]
        for call, of_call in over:
            for work, error in of_call:
                work.end(call, error)

    def _over(self, call: Call) -> list[tuple[ThreadWork, Exception | None]]:
        """Those that wait in `call` no longer, with what they failed with. It forgets them."""
        complete = len(call.given) == call.sources and not self._unlike
        if not (complete or self._unlike or self.left or self.ended):
            return []
        every = [(work, None if complete else self._failure(call, work.rank)) for work in call.waiting]
        call.waiting = [work for work, error in every if not complete and error is None]
        return [(work, error) for work, error in every if complete or error is not None]

    def _failure(self, call: Call, rank: int) -> Exception | None:
        """Why `rank` waits in vain; None if the rest may still come."""
        if self.ended is not None and self.ended["rank"] != rank:
            return ended_by(self.ended)
        if self._unlike:
            return UsageError(self._unlike)
        missing = [r for r in self.left if r == rank or (r < call.sources and r not in call.given)]
        if not missing:
            return None
        told = self.failed.get(missing[0])
        return RuntimeError(f"Connection closed by rank {missing[0]}") if told is None else ended_by(told)


class ThreadGroup(ControlGroup):
    """The control group of one of those ranks."""

    def __init__(self, wire: ThreadWire, rank: int, settle: Callable[[Work], None]) -> None:
        self.rank, self.workers, self.name, self.settle = rank, wire.workers, "threads", settle
        self._wire, self._calls, self._lock = wire, 0, threading.Lock()

    def send(self, row: Tensor, answer: Tensor) -> Work:
        self._join("a gather", row.clone(), None)
        return self._join("an answer", None, lambda call: _copy(answer, call.parts[0]))

    def collect(self, row: Tensor, rows: Tensor) -> Work:
        return self._join("a gather", row.clone(), lambda call: _copy(rows, call.rows))

    def answer(self, answer: Tensor) -> Work:
        return self._join("an answer", answer.clone(), None)

    def all_gather(self, row: Tensor, rows: Tensor) -> Work:
        return self._join("an exchange of rows", row.clone(), lambda call: _copy(rows, call.rows))

    def all_sum(self, row: Tensor, total: Tensor) -> Work:
        return self._join("a sum", row.clone(), lambda call: _copy(total, call.rows.sum(0)))

    def all_gather_object(self, mine: Any) -> list[Any]:
        packed: list[bytes] = []
        self.settle(self._join("an exchange of objects", pickle.dumps(mine), lambda call: packed.extend(call.parts)))
        return [pickle.loads(one) for one in packed]

    def release(self) -> list[dist.ProcessGroup]:
        """There is no process group behind it."""
        return []

    def _join(self, kind: str, value: Any, take: Callable[[Call], None] | None) -> ThreadWork:
        with self._lock:
            number, self._calls = self._calls, self._calls + 1
        return self._wire.join(number, kind, 1 if kind == "an answer" else self.workers, self.rank, value, take)


def _copy(to: Tensor, value: Tensor) -> None:
    """Shapes must be alike: nothing is broadcast."""
    if to.shape != value.shape:
        raise RuntimeError(f"ranks gave {tuple(value.shape)} numbers, and this one waits for {tuple(to.shape)}")
    to.copy_(value)


class ThreadRanks(Ranks):
    """The ranks of one process, as one of their threads knows them: what `Ranks` is in a process.

    >>> def main(ranks: ThreadRanks) -> list[int]:
    ...     return ranks.gather(ranks.rank**2, "squares")
    >>> in_threads(main, 3)
    [[0, 1, 4], [0, 1, 4], [0, 1, 4]]
    """

    def __init__(self, wire: ThreadWire, rank: int) -> None:
        self.rank, self.workers, self.agreed = rank, wire.workers, False
        self.group = self._control = ThreadGroup(wire, rank, self.wait)
        self._wire, self._agreements = wire, 0
        self._lost: WorkerLostError | None = None

    @classmethod
    def of(cls, workers: int) -> list[ThreadRanks]:
        """So many ranks, each to be handed to a thread, which calls `leave` or `leave_with` at its end."""
        wire = ThreadWire(workers)
        return [cls(wire, rank) for rank in range(workers)]

    @property
    def lost(self) -> WorkerLostError | None:
        return self._lost

    def wait(self, work: Any, what: str = "") -> None:
        over = threading.Event()
        work.get_future().add_done_callback(lambda _: over.set())
        self.wait_until(over)
        try:
            work.wait()
        except RuntimeError as error:
            self._raise(error, what)

    def wait_here(self, work: Any, what: str = "") -> None:
        self.wait(work, what)

    def wait_until(self, event: threading.Event) -> None:
        """The wire gives up at once what it carries; this looks for a rank that failed before training, and stays."""
        while not event.wait(SETUP_ERROR_S):
            others = (told for rank, told in list(self._wire.failed.items()) if rank != self.rank)
            if (told := next(others, None)) is not None:
                raise self.end(ended_by(told))

    def arrivals(self) -> Arrivals:
        return Arrivals(None)

    def explain(self, error: BaseException, what: str) -> WorkerLostError:
        """It names those that have ended."""
        left = {rank: word for rank, word in self._wire.last_words().items() if rank != self.rank}
        # Who ended because of another is no news, where that one is known.
        left = {rank: word for rank, word in left.items() if not word.startswith("WorkerLostError")} or left
        if self._lost is None:
            said = "; ".join(f"rank {rank} has ended ({word})" for rank, word in sorted(left.items())) or str(error)
            self._lost = WorkerLostError(f"{what}: {said}", tuple(sorted(left)))
        return self._lost

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        self._wire.failed.pop(self.rank, None)
        try:
            yield
        except Exception as error:
            self._wire.failed[self.rank] = self._words(error)
            raise

    def end(self, error: DynamixError) -> DynamixError:
        """End the job with `error`, on all ranks, and return it, to be raised."""
        self._wire.end(self._words(error))
        return error

    def request_stop(self) -> None:
        self._wire.stop_soon()

    def stop_after(self, steps: int) -> bool:
        return self._wire.step_done(self.rank, steps)

    def leave(self, word: str = "its controller was closed") -> None:
        """Say goodbye with `word`: what others wait for from this rank fails. Safe to call twice."""
        self._wire.leave(self.rank, word)

    def leave_with(self, error: BaseException) -> None:
        self.leave(f"{type(error).__name__}: {error}")

    def leave_unclosed(self) -> None:
        self.leave("its thread has ended")

    def close(self) -> None:
        self.leave()

    def _agreeing(self, what: str) -> None:
        self._wire.failed.pop(self.rank, None)
        theirs = self._wire.agreeing(self._agreements, what)
        self._agreements += 1
        if theirs != what:
            raise self.end(UsageError(f"this rank waits in {what}, another one in {theirs}: {ALIKE}"))

    def _words(self, error: Exception) -> dict[str, Any]:
        return {"rank": self.rank, "kind": type(error).__name__, "message": str(error)}


def in_threads(main: Callable[[ThreadRanks], T], workers: int) -> list[T]:
    """What `main(ranks)` returns on each of so many ranks, by rank; every rank has a thread of its own.

    Raises what was raised first, once all threads have ended: the others then wait for nothing.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(ranks: ThreadRanks) -> None:
        try:
            results[ranks.rank] = main(ranks)
        except BaseException as error:
            errors.append(error)
            ranks.leave_with(error)
        else:
            ranks.leave()

    before = threading.stack_size(STACK_BYTES)
    try:
        threads = [threading.Thread(target=run, args=(ranks,), daemon=True) for ranks in ThreadRanks.of(workers)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(workers)]
