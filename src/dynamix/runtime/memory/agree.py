"""Small blocking agreements between ranks, on a group of their own: none may be between a failure and a collective."""

from typing import Any

import numpy as np
import torch

from dynamix.errors import DynamixError, WorkerLostError
from dynamix.runtime.ranks.group import ControlGroup
from dynamix.window import Ints


def all_of(value: int, group: ControlGroup | None) -> Ints:
    """Every rank's value, int64 (W,).

    Raises `WorkerLostError` when one does not answer, and what another one ends the job with.
    """
    if group is None:
        return np.array([value], dtype=np.int64)
    values = torch.zeros(group.workers, 1, dtype=torch.int64)
    try:
        group.settle(group.all_gather(torch.tensor([int(value)]), values))
    except DynamixError:
        raise
    except RuntimeError as error:
        told = f"a rank died, or did not answer within the process group's timeout ({error})"
        raise WorkerLostError(f"{told}; if it ran out of memory, its own output says so") from error
    return np.asarray(values[:, 0].numpy(), dtype=np.int64)


def raise_for(failed: Any, error: Exception | None, what: str) -> None:
    """If any rank failed (flags (W,)): its own error on that rank, on the others one that names it."""
    if error is not None:
        raise error
    if failed.any():
        rank = int(np.argmax(failed))
        raise DynamixError(f"{what} on rank {rank}; its own error is in that rank's output")
