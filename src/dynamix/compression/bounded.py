"""LOSSY: gradients as small integers, each within a bound of what it was.

    state = BoundedState(0.01)  # a hundredth of the largest magnitude in the bucket
    model.register_comm_hook(state, bounded_hook)

A value becomes the nearest multiple of a step, and the step is a power of two of at most twice the bound. Integers are
summed exactly, in one byte or two each. So for every element, whatever the number of ranks,

    |mean that is applied - mean of the gradients| <= bound

up to one rounding to the gradient's own type. This is linear-scaling quantisation, as error-bounded compressors for
scientific data have it (SZ: Di and Cappello 2016), without their prediction and entropy coding. Nothing is remembered
from step to step: what was rounded away is lost.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dynamix.compression.shares import add_shares
from dynamix.compression.wire import GroupWire, Messages
from dynamix.errors import ConfigError

_TYPES = ((127, torch.int8), (32_767, torch.int16), (2**31 - 1, torch.int32))


class BoundedState:
    """What `bounded_hook` holds. LOSSY.

    bound           how far an element of the mean may be from the mean of the gradients; the same on every rank
    relative        of the largest magnitude in the bucket, over ranks and at this step; False: as it is
    process_group   that of DDP; the default group when None

    Below about 1/32,000 of the largest magnitude integers of two bytes do not reach: such a bucket goes dense, and
    `dense` counts it, as it does buckets that are not finite. Raises `ConfigError` for a bound that is not above 0, and
    for a relative one of 1 or more.
    """

    def __init__(self, bound: float, *, relative: bool = True, process_group: dist.ProcessGroup | None = None) -> None:
        if not 0 < bound < (1 if relative else math.inf):
            allowed = "above 0, below 1" if relative else "above 0 and finite"
            raise ConfigError("bound", bound, allowed, "0.01 keeps every element within 1 % of the largest magnitude")
        self.bound, self.relative, self.dense = float(bound), relative, 0
        self.process_group = process_group or cast(dist.ProcessGroup, dist.group.WORLD)


def bounded_hook(state: BoundedState, bucket: Bucket) -> Future[Tensor]:
    """A DDP communication hook, LOSSY: the mean over ranks within `state.bound`. Waited for in the hook."""
    flat, group = bucket.buffer(), state.process_group
    if flat.is_sparse:
        return default_hooks.allreduce_hook(group, bucket)
    if not bounded_mean_(flat, GroupWire(group, "gather"), state.bound, relative=state.relative):
        state.dense += 1
        return default_hooks.allreduce_hook(group, bucket)
    done: Future[Tensor] = Future(devices=[flat.device]) if flat.is_cuda else Future()
    done.set_result(flat)
    return done


@torch.no_grad()
def bounded_mean_(flat: Tensor, wire: Messages, bound: float, *, relative: bool = True) -> bool:
    """Replace `flat`, (n,), by its mean over ranks to within the bound; False, on every rank, where that saves nothing
    or something is not finite. `flat` is untouched then.
    """
    values = flat.detach().double()
    largest = _largest_of_all(values, wire)
    if not math.isfinite(largest):
        return False
    limit = bound * largest if relative else bound
    if largest == 0:
        flat.zero_()
        return True
    if largest > 3e4 * 2 * limit:  # more than two bytes hold, whatever the power of two
        return False
    step = math.ldexp(1.0, math.frexp(2 * limit)[1] - 1)
    most = math.floor(largest / step + 0.5)
    if most > _TYPES[1][0]:
        return False
    integers = (values / step).round_().to(_holding(most))
    (total,) = add_shares([integers], [_holding(most * wire.workers)], wire)
    flat.copy_(total.double().mul_(step).div_(wire.workers))
    return True


def _largest_of_all(values: Tensor, wire: Messages) -> float:
    """The largest magnitude over ranks; infinite where something is not finite."""
    own = float(values.abs().amax()) if values.numel() else 0.0
    message = torch.tensor([own if math.isfinite(own) else math.inf], dtype=torch.float64, device=values.device)
    mine = message.view(torch.uint8)
    others = [rank for rank in range(wire.workers) if rank != wire.rank]
    empty = mine.new_empty(0)
    parts: list[Tensor] = [empty if rank == wire.rank else mine for rank in range(wire.workers)]
    came = wire.swap(parts, [part.numel() for part in parts])
    found: list[Any] = [message, *(came[rank].view(torch.float64) for rank in others)]
    return float(torch.cat(found).amax())


def _holding(most: int) -> torch.dtype:
    """The smallest type with integers of this magnitude."""
    return next(dtype for limit, dtype in _TYPES if most <= limit)


bounded_hook.__annotations__.clear()  # DDP checks them, and takes strings for wrong types
