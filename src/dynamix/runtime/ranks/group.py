"""The controller's own groups: small messages between ranks, for which no training step waits.

Up to `FLAT_UP_TO` ranks it is one gloo group, in which every rank has a socket to every other. Beyond, the ranks sit in
rooms of about sqrt(W), and the first of each room, its head, meets the other heads: 62 sockets in place of 1,023 at
W = 1,024. A message then takes two hops each way. What the ranks agree on is the same.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dynamix.errors import ConfigError
from dynamix.runtime.ranks.process_groups import new_gloo_group

FLAT_UP_TO = 256
SPARE = 64  # descriptors for the loader, files and whatever else the job opens later


class Work(Protocol):
    """What is under way; `dist.Work` is one."""

    def is_completed(self) -> bool: ...
    def get_future(self) -> Future[Any]: ...
    def wait(self) -> Any: ...


class Pending:
    """What ends once, with a result of nobody's or an error: on whichever thread."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def end(self, error: Exception | None = None) -> None:
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


class Chain(Pending):
    """Work of several `steps`, each begun on the thread that ends the one before. An error of one ends it."""

    def __init__(self, steps: Iterator[Work]) -> None:
        super().__init__()
        self._steps = steps
        self._go_on(None)

    def _go_on(self, before: Future[Any] | None) -> None:
        try:
            if before is not None:
                before.wait()  # not the work's: it counts as ended only after this
            work = next(self._steps, None)
        except Exception as error:  # raised again from `wait`, on the thread that asks
            self.end(error)
            return
        if work is None:
            self.end()
        else:
            work.get_future().add_done_callback(self._go_on)


def _wait(work: Work) -> None:
    work.wait()


class ControlGroup:
    """Messages to the first rank and back, over one gloo group.

    Between `send` or `collect` and the end of their answer nothing else may be begun. All tensors are on the CPU. What
    a method returns raises from `wait` when a rank is lost, at the latest after the group's timeout.

    settle   how to wait for what was begun: given up where another rank ends the job
    """

    def __init__(self, group: dist.ProcessGroup, settle: Callable[[Work], None] = _wait) -> None:
        self._group, self.settle = group, settle
        self.rank, self.workers = dist.get_rank(group), dist.get_world_size(group)
        self._root = dist.get_global_rank(group, 0)
        self._sending: tuple[Any, Tensor] | None = None

    def send(self, row: Tensor, answer: Tensor) -> Work:
        """Not on the first rank: give it `row`; done when its `answer` is here."""
        self._sending = dist.gather(row, dst=self._root, group=self._group, async_op=True), row
        return self._work(dist.broadcast(answer, src=self._root, group=self._group, async_op=True))

    def collect(self, row: Tensor, rows: Tensor) -> Work:
        """On the first rank: its own `row` (n,) and everyone's into `rows` (W, n)."""
        every = list(rows.unbind())
        return self._work(dist.gather(row, every, dst=self._root, group=self._group, async_op=True))

    def answer(self, answer: Tensor) -> Work:
        """On the first rank: to all, once what they sent was collected."""
        return self._work(dist.broadcast(answer, src=self._root, group=self._group, async_op=True))

    def all_gather(self, row: Tensor, rows: Tensor) -> Work:
        """Everyone's `row` (n,) into `rows` (W, n), on every rank."""
        return self._work(dist.all_gather(list(rows.unbind()), row, group=self._group, async_op=True))

    def all_sum(self, row: Tensor, total: Tensor) -> Work:
        """The sum of everyone's `row` (n,) into `total` (n,), on every rank."""
        total.copy_(row)
        return self._work(dist.all_reduce(total, group=self._group, async_op=True))

    def all_gather_object(self, mine: Any) -> list[Any]:
        """Every rank's object, on every rank."""
        packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        lengths = torch.zeros(self.workers, 1, dtype=torch.int64)
        self.settle(self.all_gather(torch.tensor([len(packed)]), lengths))
        rows = torch.zeros(self.workers, int(lengths.max()), dtype=torch.uint8)
        self.settle(self.all_gather(torch.nn.functional.pad(packed, (0, rows.shape[1] - len(packed))), rows))
        return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths[:, 0], strict=True)]

    def broadcast_object(self, first: Any) -> Any:
        """The first rank's object, on every rank."""
        packed = torch.frombuffer(bytearray(pickle.dumps(first)), dtype=torch.uint8)
        length = torch.tensor([len(packed)])
        self._broadcast(length)
        packed = packed if self.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
        self._broadcast(packed)
        return pickle.loads(packed.numpy().tobytes())

    def _broadcast(self, values: Tensor) -> None:
        row = torch.zeros(1)
        if self.rank:
            self.settle(self.send(row, values))
        else:
            self.settle(self.collect(row, row.new_zeros(self.workers, 1)))
            self.settle(self.answer(values))

    def release(self) -> list[dist.ProcessGroup]:
        """The process groups behind it, which are the caller's now."""
        group = self._group
        del self._group
        self._sending = None
        return [group]

    @staticmethod
    def _work(work: Any) -> Work:
        assert work is not None  # as for a rank that is no member
        return cast(Work, work)


class HierarchicalGroup(ControlGroup):
    """The same over two levels: `room` has this rank and its neighbours, `heads` the first of every room.

    heads   None on ranks that are no head
    seats   ranks of a full room
    """

    def __init__(
        self,
        room: dist.ProcessGroup,
        heads: dist.ProcessGroup | None,
        *,
        rank: int,
        workers: int,
        seats: int,
        settle: Callable[[Work], None] = _wait,
    ) -> None:
        self.rank, self.workers, self.settle, self._seats = rank, workers, settle, seats
        self._room, self._heads = ControlGroup(room), None if heads is None else ControlGroup(heads)

    def send(self, row: Tensor, answer: Tensor) -> Work:
        return self._room.send(row, answer) if self._heads is None else Chain(self._send(row, answer, self._heads))

    def _send(self, row: Tensor, answer: Tensor, heads: ControlGroup) -> Iterator[Work]:
        neighbours = self._neighbours(row)
        yield self._room.collect(row, neighbours[: self._room.workers])
        yield heads.send(neighbours.reshape(-1), answer)
        yield self._room.answer(answer)

    def collect(self, row: Tensor, rows: Tensor) -> Work:
        return Chain(self._collect(row, rows))

    def _collect(self, row: Tensor, rows: Tensor) -> Iterator[Work]:
        assert self._heads is not None
        neighbours = self._neighbours(row)
        every = row.new_zeros(self._heads.workers, neighbours.numel())
        yield self._room.collect(row, neighbours[: self._room.workers])
        yield self._heads.collect(neighbours.reshape(-1), every)
        rows.copy_(every.view(-1, len(row))[: self.workers])

    def answer(self, answer: Tensor) -> Work:
        return Chain(self._answer(answer))

    def _answer(self, answer: Tensor) -> Iterator[Work]:
        assert self._heads is not None
        yield from [self._heads.answer(answer), self._room.answer(answer)]  # both are begun at once

    def all_gather(self, row: Tensor, rows: Tensor) -> Work:
        return self.send(row, rows) if self.rank else Chain(self._all_gather(row, rows))

    def _all_gather(self, row: Tensor, rows: Tensor) -> Iterator[Work]:
        yield from self._collect(row, rows)
        yield from self._answer(rows)

    def all_sum(self, row: Tensor, total: Tensor) -> Work:
        return self.send(row, total) if self.rank else Chain(self._all_sum(row, total))

    def _all_sum(self, row: Tensor, total: Tensor) -> Iterator[Work]:
        rows = row.new_zeros(self.workers, len(row))
        yield from self._collect(row, rows)
        torch.sum(rows, 0, out=total)
        yield from self._answer(total)

    def release(self) -> list[dist.ProcessGroup]:
        return self._room.release() + (self._heads.release() if self._heads is not None else [])

    def _neighbours(self, row: Tensor) -> Tensor:
        """Where this room's rows go, (seats, n); those of seats that nobody has stay 0."""
        return row.new_zeros(self._seats, len(row))


def open_control(ranks: list[int], timeout: Any = None, settle: Callable[[Work], None] = _wait) -> ControlGroup:
    """For the ranks with these global numbers, this one among them. A collective call of those ranks alone.

    Raises `ConfigError` where this process may not open as many sockets as that takes.
    """
    workers, mine = len(ranks), ranks.index(dist.get_rank())
    if workers <= FLAT_UP_TO:
        require_descriptors(workers - 1, workers)
        return ControlGroup(new_gloo_group(ranks, timeout), settle)
    seats = math.ceil(math.sqrt(workers))
    first = mine - mine % seats
    require_descriptors(2 * seats, workers)
    room = new_gloo_group(ranks[first : first + seats], timeout)
    heads = new_gloo_group(ranks[::seats], timeout) if mine == first else None
    return HierarchicalGroup(room, heads, rank=mine, workers=workers, seats=seats, settle=settle)


def require_descriptors(sockets: int, workers: int) -> None:
    """Raise `ConfigError` unless this process may open `sockets` more; the soft limit is raised where it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _open_now() + sockets + SPARE
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    if hard == resource.RLIM_INFINITY or wanted <= hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
    allowed = f"{wanted} or more for a job of {workers} workers"
    raise ConfigError(
        "limit of open files", soft, allowed, f"run `ulimit -n {2 ** math.ceil(math.log2(wanted))}` first"
    )


def _open_now() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return len(list(Path("/dev/fd").iterdir())) if Path("/dev/fd").exists() else SPARE
