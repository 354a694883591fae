"""Small blocking agreements between ranks, on a group of their own: none may be between a failure and a collective."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dynamix.errors import DynamixError, WorkerLostError
from dynamix.window import Ints


def all_of(value: int, group: dist.ProcessGroup | None, rank: int) -> Ints:
    """Every rank's value, int64 (W,). Raises `WorkerLostError` when one does not answer."""
    if group is None:
        return np.array([value], dtype=np.int64)
    values = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    values[rank] = value
    try:
        dist.all_reduce(values, group=group)
    except RuntimeError as error:
        told = f"a rank died, or did not answer within the process group's timeout ({error})"
        raise WorkerLostError(f"{told}; if it ran out of memory, its own output says so") from error
    return np.asarray(values.numpy(), dtype=np.int64)


def raise_for(failed: Any, error: Exception | None, what: str) -> None:
    """If any rank failed (flags (W,)): its own error on that rank, on the others one that names it."""
    if error is not None:
        raise error
    if failed.any():
        rank = int(np.argmax(failed))
        raise DynamixError(f"{what} on rank {rank}; its own error is in that rank's output")
