"""Limits with a CUDA allocator that really runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dynamix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
WIDE = 65536  # activations of about 0.75 MiB a sample


def test_limits_on_a_device_with_little_memory() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 600 * 2**20) / total)
    try:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(4000, 16), torch.randn(4000, 1))
        net = nn.Sequential(nn.Linear(16, WIDE), nn.Tanh(), nn.Linear(WIDE, 1)).cuda()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
        controller = dynamix.Controller(
            "static", batch_size=64, max_batch_size=4000, guard=False, global_batch="adaptive"
        )
        controller.batch_sampler(data, shuffle=False)
        model = controller.wrap(net, optimizer)

        def loss_fn(batch: Any) -> Tensor:
            return F.mse_loss(model(batch[0].cuda()), batch[1].cuda())

        caps = controller.find_limits(lambda batch: loss_fn(batch).backward(), data[:4])
        assert 64 < caps[0] < 4000
        loss_fn(data[: caps[0]]).backward()
        optimizer.step()
        with pytest.raises(torch.OutOfMemoryError):
            loss_fn(data[:4000])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
