"""Model averaging over workers with unequal numbers of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynamix.errors import ConfigError, UsageError
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
    first = dist.get_global_rank(pg, 0)
    for tensor in tensors:
        if tensor.is_floating_point():
            scale_(tensor, count, float(total.item()), 1)
            dist.all_reduce(tensor, group=pg)
        else:
            dist.broadcast(tensor, src=first, group=pg)


def average_buffers_hook(
    share: Callable[[], float], group: dist.ProcessGroup
) -> Callable[[Any, dict[str, Tensor]], None]:
    """A DDP buffer hook: floating buffers become their mean weighted by n_i/N instead of the first rank's.

    With unequal shares the first rank may hold the smallest batch and so the noisiest BatchNorm statistics.
    """
    first = dist.get_global_rank(group, 0)

    def hook(state: Any, buffers: dict[str, Tensor]) -> None:
        for tensor in buffers.values():
            if tensor.is_floating_point():
                dist.all_reduce(scale_(tensor, share(), 1.0, 1), group=group)
            else:
                dist.broadcast(tensor, src=first, group=group)

    return hook
