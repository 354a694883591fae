"""Collectives over ranks: maximum, union, sum and mean of buffers, and messages; over a process group or between
threads.

Anything that can add and OR buffers can implement a wire: a process group, an aggregator, or `LocalWire` in tests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dynamix.compression.link_speed import LinkSpeed
from dynamix.errors import DynamixError

SMALL_BYTES = 512  # a maximum up to this size goes from all to all, in one hop instead of a ring's 2 (W-1)


class WireLost(DynamixError):
    """A wire with a `reserve` failed. Ranks may notice at different points of a round, or some not at all."""


class Messages(Protocol):
    """Messages between `workers` ranks; `rank` is this one."""

    rank: int
    workers: int
    payload_bytes: int

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send `parts[j]`, uint8, to rank j; returns the messages of all ranks, `sizes[j]` bytes from rank j.

        The own part is not sent: pass an empty one, and 0 as its size.
        """

    def pass_on(self, part: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Send `part`, uint8, around a ring to all; returns the part of each rank, `sizes[j]` bytes from rank j."""

    @property
    def hop_bytes(self) -> int:
        """Bytes that this rank's link carries in the time of a hop, as measured; 0: not measured yet."""


class Wire(Protocol):
    """In-place collectives over `workers` ranks; every rank makes the same calls in the same order.

    `reserve` replaces a wire that can be lost, and carries the vote on each bucket. None: a loss ends the job.
    `messages` carries messages to single ranks.
    """

    workers: int

    @property
    def payload_bytes(self) -> int:
        """Bytes passed by this rank to all-reduces so far; messages count as the all-reduce that sends as much."""

    @property
    def reserve(self) -> Wire | None: ...

    @property
    def messages(self) -> Messages: ...

    def maximum(self, values: Tensor) -> None:
        """Maximum of uint8."""

    def union(self, bits: Tensor, beside: Tensor | None = None) -> None:
        """Bitwise OR of uint8; `beside`, int32, is summed in the same phase."""

    def total(self, values: Tensor) -> None:
        """Sum of int32, wrapping."""

    def mean(self, values: Tensor) -> None:
        """Mean in floating point, as DDP does it."""


class GroupWire:
    """A torch process group. `speed` is measured from calls on the CPU."""

    reserve: Wire | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.workers, self.payload_bytes = group.rank(), group.size(), 0
        self.speed = LinkSpeed()

    @property
    def messages(self) -> Messages:
        return self

    def maximum(self, values: Tensor) -> None:
        if self.workers > 1 and values.nbytes <= SMALL_BYTES:
            empty = values.new_empty(0)
            theirs = [other for other in range(self.workers) if other != self.rank]
            parts = [empty if other == self.rank else values for other in range(self.workers)]
            found = self.swap(parts, [part.numel() for part in parts])
            values.copy_(torch.stack([values, *(found[other] for other in theirs)]).amax(0))
            return
        self._all_reduce(values, lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group))

    def union(self, bits: Tensor, beside: Tensor | None = None) -> None:
        work = None
        if beside is not None:
            self.payload_bytes += beside.nbytes
            work = dist.all_reduce(beside, group=self.group, async_op=True)
        self.payload_bytes += bits.nbytes
        if bits.numel():
            bitwise_or(bits, self.group)
        if work is not None:
            work.wait()

    def total(self, values: Tensor) -> None:
        self._all_reduce(values, lambda: dist.all_reduce(values, group=self.group))

    def mean(self, values: Tensor) -> None:
        values.div_(self.workers)
        self._all_reduce(values, lambda: dist.all_reduce(values, group=self.group))

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        sent = [part.numel() for part in parts]
        found = parts[0].new_empty(sum(sizes))
        began = time.perf_counter()
        out = torch.cat(list(parts))
        dist.all_to_all_single(found, out, list(sizes), sent, group=self.group, async_op=True).wait()
        if not found.is_cuda:
            self.speed.note(max(sum(sent), sum(sizes)), 1, time.perf_counter() - began)
        self.payload_bytes += as_all_reduced(sum(sent), self.workers)
        return list(found.split(list(sizes)))

    def pass_on(self, part: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        longest, hops = max(sizes), self.workers - 1
        found = part.new_empty(longest * self.workers)
        began = time.perf_counter()
        out = torch.nn.functional.pad(part, (0, longest - part.numel()))
        dist.all_gather_into_tensor(found, out, group=self.group, async_op=True).wait()
        if not found.is_cuda:
            self.speed.note(longest * hops, hops, time.perf_counter() - began)
        self.payload_bytes += as_all_reduced(longest * hops, self.workers)
        return [row[:size] for row, size in zip(found.view(self.workers, -1), sizes, strict=True)]

    @property
    def hop_bytes(self) -> int:
        hop_s, byte_s = self.speed.hop_s, self.speed.byte_s
        return int(min(hop_s / byte_s, 1 << 40)) if math.isfinite(hop_s + byte_s) and byte_s else 0

    def _all_reduce(self, values: Tensor, call: Callable[[], Any]) -> None:
        self.payload_bytes += values.nbytes
        began = time.perf_counter()
        call()
        if not values.is_cuda:
            hops = 2 * (self.workers - 1)
            self.speed.note(values.nbytes * hops // self.workers, hops, time.perf_counter() - began)


def as_all_reduced(sent_bytes: int, workers: int) -> int:
    """The size of a buffer whose ring all-reduce makes a rank send this many bytes.

    >>> as_all_reduced(3000, workers=4)
    2000
    """
    return sent_bytes * workers // max(2 * (workers - 1), 1)


def bitwise_or(bits: Tensor, group: dist.ProcessGroup) -> None:
    """In place, on any back end (NCCL has no OR): each rank ORs one chunk of all ranks, then all gather the chunks."""
    workers = group.size()
    chunk = -(-bits.numel() // (8 * workers)) * 8
    mine = torch.nn.functional.pad(bits, (0, chunk * workers - bits.numel()))
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    reduced = reduce(torch.bitwise_or, theirs.view(torch.int64).view(workers, -1).clone())
    whole = torch.empty_like(mine)
    dist.all_gather_into_tensor(whole, reduced.view(torch.uint8), group=group)
    bits.copy_(whole[: bits.numel()])


class LocalWire:
    """W ranks as threads of one process: the shipped fake, also used by benchmarks for a single rank.

    measured   the value of `hop_bytes`
    """

    reserve: Wire | None = None
    measured = 0

    def __init__(self, shared: _Meeting, rank: int) -> None:
        self._shared, self.rank = shared, rank
        self.workers, self.payload_bytes = shared.workers, 0

    @classmethod
    def make(cls, workers: int, *, timeout_s: float = 30.0) -> list[LocalWire]:
        """One wire per rank; each is used by its own thread (a single one needs none)."""
        shared = _Meeting(workers, timeout_s)
        return [cls(shared, rank) for rank in range(workers)]

    @property
    def messages(self) -> Messages:
        return self

    def maximum(self, values: Tensor) -> None:
        self._meet(values, torch.maximum)

    def union(self, bits: Tensor, beside: Tensor | None = None) -> None:
        if beside is not None:
            self.total(beside)
        self._meet(bits, torch.bitwise_or)

    def total(self, values: Tensor) -> None:
        self._meet(values, torch.add)

    def mean(self, values: Tensor) -> None:
        self._meet(values.div_(self.workers), torch.add)

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        self.payload_bytes += as_all_reduced(sum(part.numel() for part in parts), self.workers)
        everybodys = self._shared.meet(self.rank, list(parts), lambda brought: [list(one) for one in brought])
        found = [one[self.rank].clone() for one in everybodys]
        if [one.numel() for one in found] != list(sizes):
            raise RuntimeError(f"expected messages of {list(sizes)} bytes, got {[one.numel() for one in found]}")
        return found

    def pass_on(self, part: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        parts = [part] * self.workers
        parts[self.rank] = part.new_empty(0)
        others = [size * (rank != self.rank) for rank, size in enumerate(sizes)]
        return [part if rank == self.rank else one for rank, one in enumerate(self.swap(parts, others))]

    @property
    def hop_bytes(self) -> int:
        return self.measured

    def _meet(self, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.payload_bytes += values.nbytes
        if self.workers > 1:
            values.copy_(self._shared.meet(self.rank, values, lambda brought: _combined(brought, combine)))


def _combined(brought: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if len({(v.shape, v.dtype) for v in brought}) > 1:
        raise RuntimeError(f"ranks brought different shapes: {[tuple(v.shape) for v in brought]}")
    return reduce(combine, brought[1:], brought[0].clone())


class _Meeting:
    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers = workers
        self._brought: list[Any] = [None] * workers
        self._combine: Callable[[list[Any]], Any] = list
        self._result: Any = None
        self._all_here = threading.Barrier(workers, self._reduce, timeout_s)
        self._all_read = threading.Barrier(workers, timeout=timeout_s)

    def meet(self, rank: int, brought: Any, combine: Callable[[list[Any]], Any]) -> Any:
        self._brought[rank], self._combine = brought, combine
        self._all_here.wait()
        result = self._result.clone() if isinstance(self._result, Tensor) else self._result
        self._all_read.wait()
        return result

    def _reduce(self) -> None:
        self._result = self._combine(self._brought)
