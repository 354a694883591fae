"""Models of workers that trained apart: averaged by samples, and what is not averaged taken from the first rank."""

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.ending import Ending, wait_for
from dynamix.runtime.gradients import scale_


@torch.no_grad()
def weighted_average(model: nn.Module, count: float, *, group: dist.ProcessGroup | None = None) -> None:
    """Replace parameters and floating buffers by their mean over workers, weighted by `count`: model averaging.

    A collective call. `count` is the number of samples this worker has trained on since the last averaging (H steps);
    a worker with 0 contributes nothing and receives the average. With H = 1 and plain SGD this equals the weighted
    gradient (DBS, arXiv 2007.11831). Integer buffers are taken from the group's first rank. Raises `ConfigError`
    for a negative count, `UsageError` when no worker has a sample.
    """
    if not count >= 0:
        raise ConfigError("count", count, "0 or more", "pass the samples trained on since the last averaging")
    pg = group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD)
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.tensor(float(count), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=pg)
    if total.item() <= 0:
        raise UsageError("weighted_average: no worker has trained on a sample since the last averaging")
    average_(tensors, count / float(total.item()), pg)


def average_(tensors: Iterable[Tensor], weight: float, group: dist.ProcessGroup, ending: Ending | None = None) -> None:
    """Floating tensors become their sum over workers times each worker's `weight`, others the first rank's."""
    first = dist.get_global_rank(group, 0)
    for tensor in tensors:
        if tensor.is_floating_point():
            wait_for(dist.all_reduce(scale_(tensor, weight, 1.0, 1), group=group, async_op=True), ending)
        else:
            wait_for(dist.broadcast(tensor, src=first, group=group, async_op=True), ending)


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor], group: dist.ProcessGroup, ending: Ending | None) -> None:
    """Tensors become the first rank's."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_type.values():
        flat = _flatten_dense_tensors(alike)
        wait_for(dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group, async_op=True), ending)
        for tensor, told in zip(alike, _unflatten_dense_tensors(flat, alike), strict=True):
            tensor.copy_(told)
