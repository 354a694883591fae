"""Helpers for policies with a network: their inputs as rows, and the pooled state of all workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@contextmanager
def apart() -> Iterator[None]:
    """Context manager: networks are made on the CPU, and torch's global random generators do not change."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        yield


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean and maximum over the active workers (N, W) of values (N, W, H) in [-1, 1]: (N, 2 H)."""
    if bool(mask.all()):
        return torch.cat([hidden.sum(1) / hidden.shape[1], hidden.amax(1)], -1)
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
    return torch.cat([mean, (hidden * weight - 2 * (1 - weight)).amax(1)], -1)


def flat(observed: NDArray[np.float32], active: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Observations (..., W, F) and active workers (..., W) in a network's shapes: (N, W, F), (N, W)."""
    rows = np.ascontiguousarray(observed).reshape(-1, *observed.shape[-2:])
    return torch.from_numpy(rows), torch.from_numpy(np.ascontiguousarray(active).reshape(-1, active.shape[-1]))
