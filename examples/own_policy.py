"""Your own policy: any object with decide, state_dict and load_state_dict.

torchrun --nproc-per-node 2 examples/own_policy.py
dynamix policy evaluate examples/own_policy.py:FollowNoise     # the same class in the simulator, with the rules
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix


class FollowNoise:
    """Every worker gets the same size, and the global batch is as large as the gradient noise scale."""

    def decide(self, window: dynamix.Window, bounds: dynamix.Bounds) -> np.ndarray:
        # A job's window has shape (W,), the simulator's (C, W). Code for the last axis serves both.
        scale = np.where(np.isnan(window.noise_scale), window.global_batch, window.noise_scale)
        total = np.minimum(scale, bounds.total_high)
        return dynamix.project(np.ones(window.batch_size.shape), bounds, total=total, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(8192, 10)
    dataset = TensorDataset(x, (x.sum(1, keepdim=True) + torch.randn(8192, 1)))
    net = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    controller = dynamix.Controller(
        FollowNoise(), batch_size=8, max_batch_size=256, interval=5, global_batch="adaptive", lr_rule="adascale"
    )
    loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset))
    model = controller.wrap(DDP(net), optimizer)
    for inputs, target in loader:
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}, global batch grew from 16 to {controller.batch_sizes.sum()}")
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
