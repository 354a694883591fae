"""A small job and a world of constant speeds for tests of opponents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dynamix_lab.simulator import ClusterEnv, Clusters
from dynamix_lab.tasks import Arrays, Data, Workload, accuracy
from dynamix_lab.tasks.base import initial_weights

FIXED_S, SAMPLE_S, EXCHANGE_S = 0.005, 0.001, 0.01


def make_data(seed: int = 0, *, train: int = 600, test: int = 200, dtype: torch.dtype = torch.float32) -> Data:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(train + test, 6, generator=generator).to(dtype)
    noise = 0.3 * torch.randn(train + test, 3, generator=generator)
    targets = (inputs[:, :3] + noise).argmax(1)
    return Data(Arrays(inputs[:train], targets[:train]), Arrays(inputs[train:], targets[train:]))


def workload(
    *, norm: bool = False, adam: bool = False, momentum: float = 0.9, dtype: torch.dtype = torch.float32
) -> Workload:
    def make_model(seed: int) -> nn.Module:
        with initial_weights(seed):
            layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)]
            return nn.Sequential(layers[0], *([nn.BatchNorm1d(16)] if norm else []), *layers[1:]).to(dtype)

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if adam:
            return torch.optim.AdamW(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.05, momentum=momentum)

    return Workload("tiny", make_data, make_model, make_optimizer, F.cross_entropy, accuracy, 1, 256)


class ConstantWorld(ClusterEnv):
    """Devices of constant speeds: the times of a step and of single workers by the same formula."""

    def __init__(self, speeds: Sequence[float], *, batch_size: int = 16) -> None:
        self.speeds = np.asarray(speeds, dtype=np.float64)
        shape, one = (1, len(speeds)), np.ones(1)
        unit = np.ones(shape)
        known: dict[str, Any] = {"alpha": FIXED_S / self.speeds[None], "beta": SAMPLE_S / self.speeds[None]}
        known |= {"jitter_sd": 0 * unit, "slow_off_s": 1e12 * unit, "slow_on_s": unit, "slow_strongest": unit}
        known |= {"exchange_s": EXCHANGE_S * one, "overlap": one, "stall": 0 * one, "neighbour_factor": one}
        known |= {"neighbour_period_s": 60 * one, "noise_start": 100 * one, "noise_unit": 1e12 * one}
        known |= {"noise_growth": 0 * one, "noise_error": 0 * one, "base_batch": np.array([batch_size * len(speeds)])}
        missing = {name: np.zeros(1, bool) for name in ("missing_noise", "missing_training", "missing_host")}
        super().__init__(Clusters(**known, **missing), seed=0, interval=1, delay=1)

    def device_s(self, samples: int, cost: float = 0.0) -> float:
        return FIXED_S + SAMPLE_S * samples + cost

    def finish_s(self, worker: int, work_s: float, start_s: float) -> float:
        return start_s + work_s / float(self.speeds[worker])

    def meeting_s(self, payload_bytes: int, at_s: float) -> float:
        return EXCHANGE_S
