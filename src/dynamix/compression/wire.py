"""What crosses ranks: maximum, union, sum and mean of buffers, over a process group or between threads.

Whoever adds and ORs buffers can stand here: a process group, an aggregator in the network, or `LocalWire` in tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dynamix.errors import DynamixError

OrMethod = Literal["bor", "gather"]


class WireLost(DynamixError):
    """A wire with a `reserve` cannot go on. Ranks may learn it at different points of a round, or some not at all."""


class Wire(Protocol):
    """In-place collectives over `workers` ranks; every rank makes the same calls in the same order.

    `reserve` stands behind a wire that can be lost, and carries the vote on each bucket. None: a loss ends the job.
    """

    workers: int

    @property
    def payload_bytes(self) -> int:
        """Handed over by this rank so far."""

    @property
    def reserve(self) -> Wire | None: ...

    def maximum(self, values: Tensor) -> None:
        """uint8."""

    def union(self, bits: Tensor, beside: Tensor | None = None) -> None:
        """Bitwise OR of uint8; `beside`, int32, is summed in the same phase."""

    def total(self, values: Tensor) -> None:
        """int32, wrapping around."""

    def mean(self, values: Tensor) -> None:
        """Floating point, as DDP does it."""


class GroupWire:
    """A torch process group. `or_method` comes from `find_or_method`."""

    reserve: Wire | None = None

    def __init__(self, group: dist.ProcessGroup, or_method: OrMethod) -> None:
        self.group, self.or_method = group, or_method
        self.workers, self.payload_bytes = group.size(), 0

    def maximum(self, values: Tensor) -> None:
        self.payload_bytes += values.nbytes
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)

    def union(self, bits: Tensor, beside: Tensor | None = None) -> None:
        work = None
        if beside is not None:
            self.payload_bytes += beside.nbytes
            work = dist.all_reduce(beside, group=self.group, async_op=True)
        self.payload_bytes += bits.nbytes
        if bits.numel():
            (or_by_bor if self.or_method == "bor" else or_by_gather)(bits, self.group)
        if work is not None:
            work.wait()

    def total(self, values: Tensor) -> None:
        self.payload_bytes += values.nbytes
        dist.all_reduce(values, group=self.group)

    def mean(self, values: Tensor) -> None:
        self.payload_bytes += values.nbytes
        dist.all_reduce(values.div_(self.workers), group=self.group)


def or_by_bor(bits: Tensor, group: dist.ProcessGroup) -> None:
    """Bitwise OR by the back end's own operator (gloo has one)."""
    wide = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
    dist.all_reduce(wide, op=dist.ReduceOp.BOR, group=group)
    bits.copy_(wide.view(torch.uint8)[: bits.numel()])


def or_by_gather(bits: Tensor, group: dist.ProcessGroup) -> None:
    """Bitwise OR for back ends without it (NCCL): each rank ORs one chunk of all ranks, then all gather the chunks."""
    workers = group.size()
    chunk = -(-bits.numel() // (8 * workers)) * 8
    mine = torch.nn.functional.pad(bits, (0, chunk * workers - bits.numel()))
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    reduced = reduce(torch.bitwise_or, theirs.view(torch.int64).view(workers, -1).clone())
    whole = torch.empty_like(mine)
    dist.all_gather_into_tensor(whole, reduced.view(torch.uint8), group=group)
    bits.copy_(whole[: bits.numel()])


def find_or_method(group: dist.ProcessGroup, device: torch.device) -> OrMethod:
    """Test the group's OR operator on known bits: some builds raise, some sum in silence. A collective call."""
    rank, workers = group.rank(), group.size()
    bits = torch.tensor([0x01, 1 << rank % 8, 0xFF, 0x00, rank % 256], dtype=torch.uint8, device=device)
    ranks = range(workers)
    want = [0x01, reduce(or_, (1 << r % 8 for r in ranks)), 0xFF, 0x00, reduce(or_, (r % 256 for r in ranks))]
    try:
        or_by_bor(bits, group)
        right = bits.tolist() == want
    except (RuntimeError, ValueError):  # torch refuses the operator before anything is sent
        right = False
    agreed = torch.tensor([right], dtype=torch.uint8, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return "bor" if bool(agreed.item()) else "gather"


class LocalWire:
    """W ranks as threads of one process: the shipped fake, and what benchmarks use for one rank."""

    reserve: Wire | None = None

    def __init__(self, shared: _Meeting, rank: int) -> None:
        self._shared, self.rank = shared, rank
        self.workers, self.payload_bytes = shared.workers, 0

    @classmethod
    def make(cls, workers: int, *, timeout_s: float = 30.0) -> list[LocalWire]:
        """One wire per rank; each is used by its own thread (a single one needs none)."""
        shared = _Meeting(workers, timeout_s)
        return [cls(shared, rank) for rank in range(workers)]

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

    def _meet(self, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.payload_bytes += values.nbytes
        if self.workers > 1:
            values.copy_(self._shared.meet(self.rank, values, combine))


class _Meeting:
    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers = workers
        self._brought: list[Tensor] = [torch.empty(0)] * workers
        self._combine: Callable[[Tensor, Tensor], Tensor] = torch.add
        self._result = torch.empty(0)
        self._all_here = threading.Barrier(workers, self._reduce, timeout_s)
        self._all_read = threading.Barrier(workers, timeout=timeout_s)

    def meet(self, rank: int, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        self._brought[rank], self._combine = values, combine
        self._all_here.wait()
        result = self._result.clone()
        self._all_read.wait()
        return result

    def _reduce(self) -> None:
        if len({(v.shape, v.dtype) for v in self._brought}) > 1:
            raise RuntimeError(f"ranks brought different shapes: {[tuple(v.shape) for v in self._brought]}")
        self._result = reduce(self._combine, self._brought[1:], self._brought[0].clone())
