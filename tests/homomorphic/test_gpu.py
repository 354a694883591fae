"""Compressed gradients of tensors on a GPU equal the dense mean: two ranks on one device, and NCCL."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamix
from tests.ranks import run_ranks
from tests.union import Script, larger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
ROWS, WIDTH = 5000, 16


def _worst_error(rank: int, mode: str, device: str) -> tuple[float, int]:
    """Against the gradient of the union batch; and how many bucket exchanges were not dense."""
    from dynamix.compression import CompressionState, compression_hook

    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH).to(device)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    controller = dynamix.Controller(
        Script([[8, 24], [20, 12]]), batch_size=16, max_batch_size=64, interval=3, global_batch="adaptive"
    )
    rows = torch.arange(640) * 7 % ROWS
    sampler = controller.batch_sampler(rows, shuffle=False)
    state = CompressionState(mode, model=table)  # type: ignore[arg-type]
    model = controller.wrap(DDP(table), optimizer, hook=compression_hook, hook_state=state)
    worst = 0.0
    for indices in sampler:
        plan = sampler.plan()
        loss = model(rows[indices].to(device)).square().mean()
        loss.backward()
        union = rows[plan.start : plan.start + int(plan.counts.sum())].to(device)
        (want,) = torch.autograd.grad(F.embedding(union, table.weight).square().mean(), [table.weight])
        assert table.weight.grad is not None
        worst = larger(worst, float((table.weight.grad - want).norm() / want.norm()))
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
    controller.close()
    counted = state.statistics.as_dict()
    return worst, sum(int(n) for way, n in counted["buckets"].items() if way != "dense")


@pytest.mark.parametrize("mode", ["compaction", "lhc", "auto"])
def test_two_ranks_on_one_gpu_exchange_without_loss(mode: str) -> None:
    for worst, compressed in run_ranks(_worst_error, 2, mode, "cuda", timeout_s=100):
        assert worst < 1e-5
        assert compressed or mode == "auto"


def test_one_rank_on_nccl_exchanges_without_loss() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29534")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        from dynamix.compression import CompressionState, compression_hook

        torch.manual_seed(0)
        table = nn.Embedding(ROWS, WIDTH).cuda()
        state: Any = CompressionState("compaction", model=table)
        model = DDP(table)
        model.register_comm_hook(state, compression_hook)
        rows = torch.arange(64).cuda()
        model(rows).square().mean().backward()
        assert table.weight.grad is not None
        got = table.weight.grad.clone()
        (want,) = torch.autograd.grad(F.embedding(rows, table.weight).square().mean(), [table.weight])
        assert float((got - want).norm() / want.norm()) < 1e-5
    finally:
        dist.destroy_process_group()
