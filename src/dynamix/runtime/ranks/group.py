"""The controller's own groups: small messages between ranks, for which no training step waits.

Up to `FLAT_UP_TO` ranks it is one gloo group, in which every rank has a socket to every other. Beyond, the ranks sit in
rooms of about sqrt(W), and the first of each room, its head, meets the other heads: 62 sockets in place of 1,023 at W =
1,024. A message then takes two hops each way. All ranks get the same from an agreement.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dynamix.errors import ConfigError
from dynamix.runtime.ranks.process_groups import keep, new_gloo_group

FLAT_UP_TO = 256
SPARE = 64  # descriptors for the loader, files and whatever else the job opens later
Work = Future[Any]  # what is under way: done with a result of nobody's, or with an error
P = ParamSpec("P")


def chained(steps: Callable[P, Iterator[Work]]) -> Callable[P, Work]:
    """Work of several steps, each begun on the thread that ends the one before. An error of one ends it.

    >>> @chained
    ... def both(one: Work, other: Work) -> Iterator[Work]:
    ...     yield one
    ...     yield other
    >>> one, other = Future[None](), Future[None]()
    >>> work = both(one, other)
    >>> one.set_result(None), other.set_exception(ValueError("lost")), work.done()
    (None, None, True)
    """

    @functools.wraps(steps)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Work:
        coming, whole = steps(*args, **kwargs), Work()

        def go_on(before: Work | None = None) -> None:
            try:
                if before is not None:
                    before.wait()
                work = next(coming, None)
            except Exception as error:  # raised again from `wait`, on the thread that asks
                whole.set_exception(error)
                return
            if work is None:
                whole.set_result(None)
            else:
                work.add_done_callback(go_on)

        go_on()
        return whole

    return begin


def _begun(work: Any) -> Work:
    """A handle of an asynchronous collective. Its tensors live as long as it takes."""
    future: Work = work.get_future()
    return future


class ControlGroup:
    """Messages to the first rank and back, over a gloo group of the ranks with these global numbers, in order.

    After `send` or `collect` nothing else may begin until their answer has ended. All tensors are on the CPU. The
    handle that a method returns raises from `wait` when a rank is lost, at the latest after the group's timeout;
    `Ranks.wait` gives it up if another rank ends the job.
    """

    def __init__(self, ranks: list[int], timeout: Any = None) -> None:
        self.rank, self.workers, self._root = ranks.index(dist.get_rank()), len(ranks), ranks[0]
        self._group = new_gloo_group(ranks, timeout)
        self._keeps = weakref.finalize(self, keep, self._group)  # where nobody releases it, a message may be under way
        self._sending: tuple[Any, Tensor] | None = None

    def send(self, row: Tensor, answer: Tensor) -> Work:
        """Not on the first rank: give it `row`; done when its `answer` is here."""
        self._sending = dist.gather(row, dst=self._root, group=self._group, async_op=True), row
        return _begun(dist.broadcast(answer, src=self._root, group=self._group, async_op=True))

    def collect(self, row: Tensor, rows: Tensor) -> Work:
        """On the first rank: its own `row` (n,) and everyone's into `rows` (W, n)."""
        every = list(rows.unbind())
        return _begun(dist.gather(row, every, dst=self._root, group=self._group, async_op=True))

    def answer(self, answer: Tensor) -> Work:
        """On the first rank: to all, once what they sent was collected."""
        return _begun(dist.broadcast(answer, src=self._root, group=self._group, async_op=True))

    def all_gather(self, row: Tensor, rows: Tensor) -> Work:
        """Everyone's `row` (n,) into `rows` (W, n), on every rank."""
        return _begun(dist.all_gather(list(rows.unbind()), row, group=self._group, async_op=True))

    def all_sum(self, row: Tensor, total: Tensor) -> Work:
        """The sum of everyone's `row` (n,) into `total` (n,), on every rank."""
        total.copy_(row)
        return _begun(dist.all_reduce(total, group=self._group, async_op=True))

    @chained
    def broadcast(self, values: Tensor) -> Iterator[Work]:
        """The first rank's `values`, on every rank."""
        row = torch.zeros(1)
        if self.rank:
            yield self.send(row, values)
        else:
            yield self.collect(row, row.new_zeros(self.workers, 1))
            yield self.answer(values)

    def release(self) -> list[dist.ProcessGroup]:
        """The process groups behind it, which are the caller's now."""
        group = self._group
        del self._group
        self._keeps.detach()
        self._sending = None
        return [group]


class HierarchicalGroup(ControlGroup):
    """The same over two levels: a room of this rank and its neighbours, and the first of every room, its head."""

    def __init__(self, ranks: list[int], timeout: Any = None) -> None:
        self.rank, self.workers = ranks.index(dist.get_rank()), len(ranks)
        self._seats = seats = math.ceil(math.sqrt(self.workers))  # of a full room
        require_descriptors(2 * seats, self.workers)
        head = self.rank - self.rank % seats
        self._room = ControlGroup(ranks[head : head + seats], timeout)
        self._heads = ControlGroup(ranks[::seats], timeout) if self.rank == head else None

    @chained
    def send(self, row: Tensor, answer: Tensor) -> Iterator[Work]:
        if self._heads is None:
            yield self._room.send(row, answer)
            return
        neighbours = self._neighbours(row)
        yield self._room.collect(row, neighbours[: self._room.workers])
        yield self._heads.send(neighbours.reshape(-1), answer)
        yield self._room.answer(answer)

    @chained
    def collect(self, row: Tensor, rows: Tensor) -> Iterator[Work]:
        assert self._heads is not None
        neighbours = self._neighbours(row)
        every = row.new_zeros(self._heads.workers, neighbours.numel())
        yield self._room.collect(row, neighbours[: self._room.workers])
        yield self._heads.collect(neighbours.reshape(-1), every)
        rows.copy_(every.view(-1, len(row))[: self.workers])

    @chained
    def answer(self, answer: Tensor) -> Iterator[Work]:
        assert self._heads is not None
        yield from [self._heads.answer(answer), self._room.answer(answer)]  # both are begun at once

    @chained
    def all_gather(self, row: Tensor, rows: Tensor) -> Iterator[Work]:
        if self.rank:
            yield self.send(row, rows)
        else:
            yield self.collect(row, rows)
            yield self.answer(rows)

    @chained
    def all_sum(self, row: Tensor, total: Tensor) -> Iterator[Work]:
        if self.rank:
            yield self.send(row, total)
        else:
            rows = row.new_zeros(self.workers, len(row))
            yield self.collect(row, rows)
            torch.sum(rows, 0, out=total)
            yield self.answer(total)

    def release(self) -> list[dist.ProcessGroup]:
        return self._room.release() + (self._heads.release() if self._heads is not None else [])

    def _neighbours(self, row: Tensor) -> Tensor:
        """The slots of this room's rows, (seats, n); those of empty seats stay 0."""
        return row.new_zeros(self._seats, len(row))


def open_control(ranks: list[int], timeout: Any = None) -> ControlGroup:
    """For the ranks with these global numbers, this one among them. A collective call of those ranks alone.

    Raises `ConfigError` if this process may not open as many sockets as that takes.
    """
    if len(ranks) > FLAT_UP_TO:
        return HierarchicalGroup(ranks, timeout)
    require_descriptors(len(ranks) - 1, len(ranks))
    return ControlGroup(ranks, timeout)


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
