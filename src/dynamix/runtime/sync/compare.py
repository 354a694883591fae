"""Whether workers that meet over parameters still have the same to average, and went on from the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dynamix.errors import UsageError
from dynamix.runtime.sync.collectives import Workers

_ON_ALL = "freeze, unfreeze and add parameters, give optimizers and scalers, at the same step on every rank"
_CHANGED = (
    "load checkpoints on every rank, change a model alike on all of them, and call optimizer.step() before "
    "controller.step()"
)


def comparing(described: Sequence[str], changed: bool, beside: Workers) -> Iterator[bool]:
    """Before a meeting, in parts: whether on any rank something was changed since the last, its own being `changed`.

    At every `yield` what was begun has to arrive; the last one gives the answer, and begins nothing. Raises
    `UsageError` on every rank where `described`, what this rank is about to average, is not that of all: reductions of
    unlike lengths end in no error, but in the end of a process.
    """
    mark = float(zlib.crc32("\n".join(described).encode()))
    known = torch.tensor([mark, -mark, float(changed)], dtype=torch.float64)
    beside.add(known, dist.ReduceOp.MAX)
    yield False
    largest, smallest, any_changed = known.tolist()
    if largest != -smallest:
        require_alike(described, beside)
    yield bool(any_changed)


def require_alike(described: Sequence[str], beside: Workers) -> None:
    """Raise `UsageError` on every rank unless all describe what they average in the same words. A collective call."""
    every = beside.gather(list(described))
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            length = max(len(theirs), len(every[0]))
            first, other = (of + ["nothing"] * (length - len(of)) for of in (every[0], theirs))
            at = next(i for i in range(length) if first[i] != other[i])
            told = f"rank 0 has {first[at]} where rank {rank} has {other[at]}"
            raise UsageError(f"the ranks are about to average models that differ: {told}. {_ON_ALL}")


def prints(tensors: Sequence[Tensor]) -> Tensor:
    """One number of each, of its bytes; on CPU."""
    sums = []
    for tensor in tensors:
        content = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        sums.append(content.contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
    return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)


def unlike(tensors: Sequence[Tensor], beside: Workers) -> Iterator[list[int]]:
    """Which of these are not the same on all ranks; in parts, as `comparing`."""
    mine = prints(tensors)
    both = torch.cat([mine, -mine])
    beside.add(both, dist.ReduceOp.MAX)
    yield []
    largest, smallest = both.chunk(2)
    yield (largest != -smallest).nonzero().flatten().tolist()


def differ(name: str) -> UsageError:
    """Ranks began a round with unlike values of the parameter `name`."""
    return UsageError(f"{name} was not the same on all ranks when they began to step apart: {_CHANGED}")
