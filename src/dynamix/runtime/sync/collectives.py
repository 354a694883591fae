"""Collectives of workers after local steps: comparison of states, means by samples, and maxima where no mean exists."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.ranks.ranks import ALONE, Ranks

_TOP = torch.iinfo(torch.int64).min
_ON_ALL = "freeze, unfreeze and add parameters, give optimizers and scalers, at the same step on every rank"
BUCKET = 2**23  # elements per payload: one is packed while the previous one is sent


@torch.no_grad()
def weighted_average(model: nn.Module, count: float, *, group: dist.ProcessGroup | None = None) -> None:
    """Replace parameters and floating buffers by their mean over workers, weighted by `count`: model averaging.

    A collective call, for loops of your own; `Controller(meet="parameters")` does this and more at the end of every
    round. `count` is the number of samples that this worker has trained on since the last averaging (H steps). A worker
    with 0 contributes nothing and receives the average. With H = 1 and plain SGD this equals the weighted gradient
    (DBS, arXiv 2007.11831). Integer buffers become the maximum. Raises `ConfigError` for a negative count, and
    `UsageError` if no worker has a sample, or like `require_sums`.
    """
    if not count >= 0:
        raise ConfigError("count", count, "0 or more", "pass the samples trained on since the last averaging")
    workers = Workers(group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD))
    require_sums(named := (*model.named_parameters(), *model.named_buffers()))
    tensors = list({id(t): t.detach() for _, t in named}.values())
    floating = [t for t in tensors if has_mean(t)] or [torch.zeros(1)]
    sums, largest = Sums(floating, count, workers), Maxima([t for t in tensors if not has_mean(t)], workers)
    workers.wait()
    if not sums.weight > 0:
        raise UsageError("weighted_average: no worker has trained on a sample since the last averaging")
    for tensor, mean in zip(floating, sums.means(), strict=True):
        tensor.copy_(mean)
    largest.take()


class Workers:
    """The workers in `group`; None: a single one. `wait` waits for all collectives that were started.

    ranks    waits for collectives, and can abort a wait
    on_cpus  a separate group for tensors on CPUs; None: `group` handles them, too
    """

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: Ranks = ALONE, on_cpus: dist.ProcessGroup | None = None
    ) -> None:
        self.group, self.ranks, self._on_cpus = group, ranks, on_cpus
        self._under_way: list[Any] = []

    @property
    def count(self) -> int:
        return 1 if self.group is None else self.group.size()

    def add(self, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Start to reduce `flat` in place over the workers."""
        if self.count > 1:
            group = (self._on_cpus if flat.is_cpu else None) or self.group
            self._under_way.append(dist.all_reduce(flat, op, group=group, async_op=True))

    def gather(self, mine: Any) -> list[Any]:
        """Every worker's object, in the order of ranks; plain objects. Too slow for every averaging."""
        if self.group is None:
            return [mine]
        found = [None] * self.count
        dist.all_gather_object(found, mine, group=self._on_cpus or self.group)
        return found

    def require_alike(self, described: Sequence[str]) -> None:
        """Raise `UsageError` on every rank unless all have the same tensors `described` to average. Collective.

        Reductions of different lengths would not raise an error, but end a process.
        """
        every = self.gather(list(described))
        for rank, theirs in enumerate(every):
            for first, other in itertools.zip_longest(every[0], theirs, fillvalue="nothing"):
                if first != other:
                    told = f"rank 0 has {first} where rank {rank} has {other}"
                    raise UsageError(f"the ranks are about to average models that differ: {told}. {_ON_ALL}")

    def any_changed(self, described: Sequence[str], changed: bool) -> bool:
        """Before averaging: whether any rank has `changed` anything since the last. Raises like `require_alike`."""
        mark = float(zlib.crc32("\n".join(described).encode()))
        known = torch.tensor([mark, -mark, float(changed)], dtype=torch.float64)
        self.add(known, dist.ReduceOp.MAX)
        self.wait()
        largest, smallest, any_changed = known.tolist()
        if largest != -smallest:
            self.require_alike(described)
        return bool(any_changed)

    def unlike(self, tensors: Sequence[Tensor]) -> list[int]:
        """The indices of tensors that differ between ranks, by the sums of their bytes."""
        sums = [_real(t).contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64) for t in tensors]
        mine = torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)
        both = torch.cat([mine, -mine])
        self.add(both, dist.ReduceOp.MAX)
        self.wait()
        largest, smallest = both.chunk(2)
        return (largest != -smallest).nonzero().flatten().tolist()

    def close(self) -> list[dist.ProcessGroup]:
        """Release the groups, and return the separate one."""
        made, self.group, self._on_cpus = self._on_cpus, None, None
        return [] if made is None else [made]

    def wait(self) -> None:
        """Wait for all collectives that were started."""
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            self.ranks.wait(work)


def has_mean(tensor: Tensor) -> bool:
    """Whether its entries can be averaged; for other tensors workers take the maximum."""
    return tensor.is_floating_point() or tensor.is_complex()


class Maxima:
    """Integer and boolean tensors, reduced to their maximum over workers, entry by entry (`ReduceOp.MAX`)."""

    def __init__(self, tensors: Sequence[Tensor], workers: Workers) -> None:
        self.tensors = tensors
        self.flat = torch.cat([_ordered(t).reshape(-1) for t in tensors]) if tensors else torch.zeros(0)
        if tensors:
            workers.add(self.flat, dist.ReduceOp.MAX)

    def take(self) -> None:
        """Once the maximum has arrived, copy it into the tensors."""
        for tensor, found in zip(self.tensors, self.flat.split([t.numel() for t in self.tensors]), strict=True):
            most = found.view(tensor.shape)
            tensor.copy_((most ^ _TOP).view(tensor.dtype) if tensor.dtype == torch.uint64 else most)


def _ordered(tensor: Tensor) -> Tensor:
    """As int64, in the same order. For uint64, whose upper half int64 cannot represent, the first bit is flipped."""
    return tensor.view(torch.int64) ^ _TOP if tensor.dtype == torch.uint64 else tensor.to(torch.int64)


def require_sums(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `UsageError`, which names the tensor, for a floating type that torch cannot sum: float8 and smaller."""
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
            fix = "keep it as float32 or, if it is to be the same everywhere, as tensor.view(torch.uint8)"
            raise UsageError(f"{name} is {tensor.dtype}, of which workers cannot take the mean: {fix}")


class Sums:
    """Tensors summed over workers, each multiplied by the worker's weight, together with the sum of the weights.

    A worker of weight 0 sends zeros, whatever its tensors hold. Tensors are packed: this needs fewer collectives, and a
    backend may reduce the wrong entries of a tensor that is not contiguous.

    wire   type in which they are sent; None: float32, or float64 for float64 tensors
    """

    def __init__(
        self, tensors: Iterable[Tensor], weight: float, workers: Workers, *, wire: torch.dtype | None = None
    ) -> None:
        self.tensors = list(tensors)
        self._packed = [(bucket, _packed(bucket, weight, wire)) for bucket in buckets(self.tensors)]
        for _, flat in self._packed:
            workers.add(flat)
        # In a narrow type the packed sum of the weights is rounded.
        self._exact = None if wire is None else torch.tensor([weight], dtype=torch.float64)
        if self._exact is not None:
            workers.add(self._exact)

    @property
    def weight(self) -> float:
        """The sum of the weights, once it has arrived. Waits for the device."""
        return float(self._packed[0][1][-1].item())

    def sums(self) -> list[Tensor]:
        """The sum of each tensor, once they have arrived; at least float32."""
        found: dict[int, Tensor] = {}
        for bucket, flat in self._packed:
            total = flat[:-1].to(torch.promote_types(flat.dtype, torch.float32))
            for tensor, part in zip(bucket, total.split([_real(t).numel() for t in bucket]), strict=True):
                shaped = part.view(_real(tensor).shape)
                found[id(tensor)] = torch.view_as_complex(shaped) if tensor.is_complex() else shaped
        return [found[id(tensor)] for tensor in self.tensors]

    def means(self) -> list[Tensor]:
        """`sums` divided by the sum of the weights; call it once."""
        if self._exact is not None:
            return [total.mul_(1 / self._exact.item()) for total in self.sums()]
        for _, flat in self._packed:
            flat[:-1].div_(flat[-1].clone())
        return self.sums()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _packed(tensors: Sequence[Tensor], weight: float, wire: torch.dtype | None) -> Tensor:
    real = [_real(t) for t in tensors]
    sizes = [t.numel() for t in real]
    dtype = wire or torch.promote_types(real[0].dtype, torch.float32)
    flat = torch.zeros(sum(sizes) + 1, dtype=dtype, device=tensors[0].device)
    if weight:
        for part, tensor in zip(flat[:-1].split(sizes), real, strict=True):
            part.copy_(tensor.reshape(-1) * weight)
        flat[-1] = weight
    return flat


def buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors of one type and device, in order, up to `BUCKET` elements; a larger tensor is alone."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        of_kind = by_kind.setdefault((torch.promote_types(tensor.dtype, torch.float32), tensor.device), [[]])
        if of_kind[-1] and sum(t.numel() for t in of_kind[-1]) + tensor.numel() > BUCKET:
            of_kind.append([])
        of_kind[-1].append(tensor)
    return [bucket for of_kind in by_kind.values() for bucket in of_kind]


@torch.no_grad()
def average_(tensors: Iterable[Tensor], weight: float, group: dist.ProcessGroup, ranks: Ranks = ALONE) -> None:
    """Replace floating tensors by their sum over workers times each worker's `weight`, others by the first rank's."""
    kept = list(tensors)
    floating = [t for t in kept if t.is_floating_point()]
    workers = Workers(group, ranks)
    sums = Sums(floating, weight, workers)
    workers.wait()
    for tensor, total in zip(floating, sums.sums(), strict=True):
        tensor.copy_(total)
    broadcast_([t for t in kept if not t.is_floating_point()], group, ranks)


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor], group: dist.ProcessGroup, ranks: Ranks = ALONE) -> None:
    """Replace tensors by the first rank's."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_type.values():
        flat = _flatten_dense_tensors(alike)
        sent = flat.view(torch.uint8)  # as bytes, because gloo does not support all types
        ranks.wait(dist.broadcast(sent, src=dist.get_global_rank(group, 0), group=group, async_op=True))
        for tensor, told in zip(alike, _unflatten_dense_tensors(flat, alike), strict=True):
            tensor.copy_(told)
