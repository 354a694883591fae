"""What policies with a network share: their inputs as rows, the pooled state of all workers, inputs left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamix.errors import ConfigError

# The three families of the paper's state. Sizes and times belong to none: without them no policy could act, so an
# ablation of them would say nothing.
STATE_FAMILIES: dict[str, tuple[str, ...]] = {
    "network": ("log_bytes", "retransmits", "log_rtt", "missing_network"),
    "system": ("cpu", "memory", "device", "missing_host", "missing_device"),
    "statistics": (
        *("loss_change", "accuracy_change", "log_norm_ratio", "log_noise_ratio", "log_sigma"),
        *("missing_training", "missing_noise"),
    ),
}


@contextmanager
def apart() -> Iterator[None]:
    """Inside, networks are made on the CPU; what they draw leaves torch's global generators as they were."""
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
    """Observations (..., W, F) and active workers (..., W) as a network takes them: (N, W, F), (N, W)."""
    rows = np.ascontiguousarray(observed).reshape(-1, *observed.shape[-2:])
    return torch.from_numpy(rows), torch.from_numpy(np.ascontiguousarray(active).reshape(-1, active.shape[-1]))


def kept(names: Sequence[str], groups: Mapping[str, Sequence[str]], without: Sequence[str]) -> NDArray[np.float32]:
    """1 for inputs (F,) that remain, 0 for those of the groups `without`. Raises `ConfigError` for unknown groups."""
    unknown = sorted(set(without) - set(groups))
    if unknown:
        raise ConfigError("without", unknown[0], ", ".join(groups), "name groups of features")
    left_out = {name for group in without for name in groups[group]}
    return np.array([name not in left_out for name in names], dtype=np.float32)
