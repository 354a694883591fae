"""The controller's own groups: small messages between ranks; no training step waits for them.

Up to `FLAT_UP_TO` ranks use one gloo group, in which every rank has a socket to every other. With more, ranks form
subgroups ("rooms") of about sqrt(W), and the first rank of each, its head, also joins a group of heads: 62 sockets
instead of 1,023 at W = 1,024. A message then takes two hops each way. All ranks get the same result.
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
SPARE = 64  # descriptors for the loader, files and anything else the job opens later
Work = Future[Any]  # a running operation: completes without a result, or with an error
P = ParamSpec("P")


def chained(steps: Callable[P, Iterator[Work]]) -> Callable[P, Work]:
    """Several operations as one; each starts on the thread that completes the one before. Any error ends it.

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
            except Exception as error:  # `wait` raises it on the thread that waits
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
    """The future of an asynchronous collective. Its tensors live until it completes."""
    future: Work = work.get_future()
    return future


class ControlGroup:
    """Messages to the first rank and back, over a gloo group of the ranks with these global numbers, in order.

    After `send` or `collect`, start nothing else until the answer is complete. All tensors are on the CPU. If a rank is
    lost, `wait` of the returned future raises, at the latest after the group's timeout. `Ranks.wait` stops waiting if
    another rank ends the job.
    """

    def __init__(self, ranks: list[int], timeout: Any = None) -> None:
        self.rank, self.workers, self._root = ranks.index(dist.get_rank()), len(ranks), ranks[0]
        self._group = new_gloo_group(ranks, timeout)
        self._keeps = weakref.finalize(self, keep, self._group)  # if never released, a message may be under way
        self._sending: tuple[Any, Tensor] | None = None

    def send(self, row: Tensor, answer: Tensor) -> Work:
        """Not on the first rank: send it `row`; complete when its `answer` has arrived."""
        self._sending = dist.gather(row, dst=self._root, group=self._group, async_op=True), row
        return _begun(dist.broadcast(answer, src=self._root, group=self._group, async_op=True))

    def collect(self, row: Tensor, rows: Tensor) -> Work:
        """On the first rank: gather its own `row` (n,) and all others into `rows` (W, n)."""
        return _begun(dist.gather(row, list(rows.unbind()), dst=self._root, group=self._group, async_op=True))

    def answer(self, answer: Tensor) -> Work:
        """On the first rank: send `answer` to all, after their rows were collected."""
        return _begun(dist.broadcast(answer, src=self._root, group=self._group, async_op=True))

    def all_gather(self, row: Tensor, rows: Tensor) -> Work:
        """Gather every rank's `row` (n,) into `rows` (W, n), on every rank."""
        return _begun(dist.all_gather(list(rows.unbind()), row, group=self._group, async_op=True))

    def all_sum(self, row: Tensor, total: Tensor) -> Work:
        """Sum every rank's `row` (n,) into `total` (n,), on every rank."""
        total.copy_(row)
        return _begun(dist.all_reduce(total, group=self._group, async_op=True))

    def release(self) -> list[dist.ProcessGroup]:
        """The process groups behind it; the caller owns them from now on."""
        group = self._group
        del self._group
        self._keeps.detach()
        self._sending = None
        return [group]


class HierarchicalGroup(ControlGroup):
    """The same on two levels: a subgroup ("room") of neighbouring ranks, and a group of their first ranks ("heads")."""

    def __init__(self, ranks: list[int], timeout: Any = None) -> None:
        self.rank, self.workers = ranks.index(dist.get_rank()), len(ranks)
        self._seats = seats = math.ceil(math.sqrt(self.workers))  # ranks of a full room
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
        yield from [self._heads.answer(answer), self._room.answer(answer)]  # both start at once

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
        """Memory for this room's rows, (seats, n); empty seats stay 0."""
        return row.new_zeros(self._seats, len(row))


def open_control(ranks: list[int], timeout: Any = None) -> ControlGroup:
    """The control group of the ranks with these global numbers, this one included. A collective call of only those.

    Raises `ConfigError` if this process may not open enough sockets.
    """
    if len(ranks) > FLAT_UP_TO:
        return HierarchicalGroup(ranks, timeout)
    require_descriptors(len(ranks) - 1, len(ranks))
    return ControlGroup(ranks, timeout)


def require_descriptors(sockets: int, workers: int) -> None:
    """Raise `ConfigError` unless this process may open `sockets` more; raises the soft limit if allowed."""
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
        "limit of open files", soft, allowed, f"run `ulimit -n {2 ** math.ceil(math.log2(wanted))}` as root"
    )


def _open_now() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return len(list(Path("/dev/fd").iterdir())) if Path("/dev/fd").exists() else SPARE
