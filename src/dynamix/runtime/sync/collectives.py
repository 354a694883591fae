"""Means over workers that trained apart: of tensors by samples, and of what cannot be averaged the largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.ranks.ranks import ALONE, Ranks

_TOP = torch.iinfo(torch.int64).min
BUCKET = 2**23  # elements of a payload: what is packed next travels while the one before does


@torch.no_grad()
def weighted_average(model: nn.Module, count: float, *, group: dist.ProcessGroup | None = None) -> None:
    """Replace parameters and floating buffers by their mean over workers, weighted by `count`: model averaging.

    A collective call, for loops of your own; `Controller(meet="parameters")` does it at every meeting, and more.
    `count` is the number of samples this worker has trained on since the last averaging (H steps); a worker with 0
    contributes nothing and receives the average. With H = 1 and plain SGD this equals the weighted gradient (DBS,
    arXiv 2007.11831). Integer buffers become the largest. Raises `ConfigError` for a negative count, `UsageError` when
    no worker has a sample, or as `require_sums`.
    """
    if not count >= 0:
        raise ConfigError("count", count, "0 or more", "pass the samples trained on since the last averaging")
    workers = Workers(group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD))
    require_sums(named := (*model.named_parameters(), *model.named_buffers()))
    tensors = list({id(t): t for _, t in named}.values())
    floating = [t.detach() for t in tensors if t.is_floating_point() or t.is_complex()]
    payloads = [Bucket(bucket, count) for bucket in buckets(floating)] or [Bucket([torch.zeros(1)], count)]
    for payload in payloads:
        workers.add(payload.flat)
    workers.wait()
    if not payloads[0].weight > 0:
        raise UsageError("weighted_average: no worker has trained on a sample since the last averaging")
    for payload in payloads:
        for tensor, mean in payload.means():
            tensor.copy_(mean)
    if counters := [t for t in tensors if not (t.is_floating_point() or t.is_complex())]:
        largest = MaxReduce(counters)
        workers.add(largest.flat, dist.ReduceOp.MAX)
        workers.wait()
        largest.take()


class Workers:
    """Those that meet, over `group`; None: one alone. What is begun is waited for together.

    ranks   how to wait for them
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Ranks = ALONE) -> None:
        self.group, self.ranks = group, ranks
        self._under_way: list[Any] = []

    @property
    def count(self) -> int:
        return 1 if self.group is None else self.group.size()

    def add(self, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Begin to reduce `flat` in place over the workers."""
        if self.count > 1:
            self._under_way.append(dist.all_reduce(flat, op, group=self.group, async_op=True))

    def gather(self, mine: Any) -> list[Any]:
        """What every worker has, in the order of ranks: plain objects. For CPUs, and not for every meeting."""
        if self.group is None:
            return [mine]
        found = [None] * self.count
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def close(self) -> None:
        """Let go of the group."""
        self.group = None

    def wait(self) -> None:
        """Until all that was begun has arrived."""
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            self.ranks.wait(work)


class MaxReduce:
    """Integer and boolean tensors on their way to the largest over workers, entry by entry (`ReduceOp.MAX`)."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.flat = torch.cat([_ordered(t.detach()).reshape(-1) for t in tensors])

    def take(self) -> None:
        """It has arrived: the tensors become it."""
        for tensor, found in zip(self.tensors, self.flat.split([t.numel() for t in self.tensors]), strict=True):
            most = torch.maximum(found.view(tensor.shape), _ordered(tensor))  # it may have grown meanwhile
            tensor.copy_((most ^ _TOP).view(tensor.dtype) if tensor.dtype == torch.uint64 else most)


def _ordered(tensor: Tensor) -> Tensor:
    """As int64, in the same order: of uint64, whose upper half int64 has not, the first bit is turned."""
    return tensor.view(torch.int64) ^ _TOP if tensor.dtype == torch.uint64 else tensor.to(torch.int64)


def require_sums(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `UsageError` naming a floating tensor of a type that torch has no sums of: float8 and smaller."""
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
            fix = "keep it as float32 or, if it is to be the same everywhere, as tensor.view(torch.uint8)"
            raise UsageError(f"{name} is {tensor.dtype}, of which workers cannot take the mean: {fix}")


class Bucket:
    """Tensors on their way to their mean over workers: each times this worker's weight, and at the end the weights.

    A worker of weight 0 sends zeros, whatever its tensors hold.

    wire   type in which they travel; None: float32, or float64 if they are
    """

    def __init__(self, tensors: Sequence[Tensor], weight: float, *, wire: torch.dtype | None = None) -> None:
        self.tensors = tensors
        self._real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
        dtype = wire or torch.promote_types(self._real[0].dtype, torch.float32)
        self.sizes = [t.numel() for t in self._real]
        self.flat = torch.zeros(sum(self.sizes) + 1, dtype=dtype, device=tensors[0].device)
        if weight:
            own = self.flat[:-1].split(self.sizes)
            for part, tensor in zip(own, self._real, strict=True):
                part.copy_(tensor.reshape(-1) * weight)
            self.flat[-1] = weight

    @property
    def weight(self) -> float:
        """The sum of the weights, once it has arrived. Waits for the device."""
        return float(self.flat[-1].item())

    def sums(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Each tensor with its sum over workers, times their weights; in float32 at least. Used up."""
        total = self.flat[:-1].to(torch.promote_types(self.flat.dtype, torch.float32))
        for tensor, real, part in zip(self.tensors, self._real, total.split(self.sizes), strict=True):
            shaped = part.view(real.shape)
            yield tensor, torch.view_as_complex(shaped) if tensor.is_complex() else shaped

    def means(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Each tensor with its mean; used up."""
        self.flat[:-1].div_(self.flat[-1].clone())
        return self.sums()


def buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one type and device together, in order, up to `BUCKET` elements; a larger one by itself."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        kind = (torch.promote_types(tensor.dtype, torch.float32), tensor.device)
        of_kind = by_kind.setdefault(kind, [[]])
        if of_kind[-1] and sum(t.numel() for t in of_kind[-1]) + tensor.numel() > BUCKET:
            of_kind.append([])
        of_kind[-1].append(tensor)
    return [bucket for of_kind in by_kind.values() for bucket in of_kind]


@torch.no_grad()
def average_(tensors: Iterable[Tensor], weight: float, group: dist.ProcessGroup, ranks: Ranks = ALONE) -> None:
    """Floating tensors become their sum over workers times each worker's `weight`, others the first rank's."""
    floating, others = list[Tensor](), list[Tensor]()
    for tensor in tensors:
        (floating if tensor.is_floating_point() else others).append(tensor)
    # Packed: a backend may reduce the wrong entries of a tensor whose entries do not follow each other in memory.
    workers, payloads = Workers(group, ranks), [Bucket(bucket, weight) for bucket in buckets(floating)]
    for payload in payloads:
        workers.add(payload.flat)
    workers.wait()
    for payload in payloads:
        for tensor, total in payload.sums():
            tensor.copy_(total)
    broadcast_(others, group, ranks)


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor], group: dist.ProcessGroup, ranks: Ranks = ALONE) -> None:
    """Tensors become the first rank's."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_type.values():
        flat = _flatten_dense_tensors(alike)
        sent = flat.view(torch.uint8)  # as bytes: gloo knows not all types
        ranks.wait(dist.broadcast(sent, src=dist.get_global_rank(group, 0), group=group, async_op=True))
        for tensor, told in zip(alike, _unflatten_dense_tensors(flat, alike), strict=True):
            tensor.copy_(told)
