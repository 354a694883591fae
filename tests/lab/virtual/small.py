"""A small job for tests of the virtual clock, and what its windows must have in common with a live job's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

SAME = ("loss", "loss_std", "loss_change", "accuracy", "accuracy_std", "accuracy_change", "noise", "signal")
SAME += ("step", "age", "steps", "base_batch", "micro_batches", "batch_size", "global_norm_sq")


def dataset(samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator, dtype=dtype)
    return TensorDataset(x, (x[:, :3] + 0.5 * torch.randn(samples, 3, generator=generator, dtype=dtype)).argmax(1))


def network(*extra: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), *extra, nn.ReLU(), nn.Linear(16, 3)).to(dtype)


def weights(net: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in net.state_dict().values()])


def trained(net: nn.Module) -> Tensor:
    """Parameters alone, without buffers."""
    return torch.cat([p.detach().flatten().double() for p in net.parameters()])


def nesterov(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def made(*, norm: bool = False, adam: bool = False, momentum: float = 0.9) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = network(*([nn.BatchNorm1d(16)] if norm else []))
    if adam:
        return net, torch.optim.AdamW(net.parameters(), lr=0.01)
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)


class Watched(Dataset[tuple[Tensor, Tensor]]):
    """Remembers what was asked for, and how much at once."""

    def __init__(self, samples: int) -> None:
        self.data, self.asked, self.sizes = dataset(samples), list[int](), list[int]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        self.asked += indices
        self.sizes.append(len(indices))
        return [self.data[i] for i in indices]


def assert_same_windows(
    live: list[dict[str, Any]], virtual: list[dict[str, Any]], names: Sequence[str] = SAME, rtol: float = 1e-6
) -> None:
    for one, other in zip(live, virtual, strict=True):
        for key in ("window_index", "allocation", "from_step", "samples_seen"):
            assert one[key] == other[key], key
        for name in names:
            have, want = (np.array(e["window"][name], dtype=np.float64) for e in (other, one))
            np.testing.assert_allclose(have, want, rtol=rtol, err_msg=name)
