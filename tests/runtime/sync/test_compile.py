"""Compiled models: gradients stay exact, and a grid of batch sizes bounds how often they are compiled."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import dynamix
from tests.ranks import run_cases
from tests.runtime.jobs import Training, adaptive
from tests.union import Deep, Script

HOW = "inside", "around", "before"
SAMPLES = 192  # a multiple of every global batch below: no tails


def _compiled(how: str) -> dict[str, Any]:
    """Compiled "inside" of DDP, "around" it, or so and used once "before" `wrap`."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(1)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager" if how == "inside" else "eager")
    x, y = torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randn(SAMPLES, 6, dtype=torch.float64)
    net, sizes = Deep(depth=3).double(), set()
    controller = adaptive(Script([[4, 12], [12, 4], [8, 8]]), max_batch_size=16, quantum=4)

    def used_before(net: Any, **options: Any) -> Any:
        model = torch.compile(DDP(net, **options), backend=counter, dynamic=False)
        model(x[:8]).mean().backward()  # what was compiled then knows nothing of the controller
        net.zero_grad()
        return model

    inner = torch.compile(net, backend=counter, dynamic=False) if how == "inside" else net
    with mock.patch("tests.runtime.jobs.DDP", used_before if how == "before" else DDP):
        job = Training(controller, TensorDataset(x, y), inner, lr=0.01)
    if how == "around":
        job.model = torch.compile(job.model, backend=counter, dynamic=False)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        sizes.update([len(x)] if model is job.model else [])
        return F.mse_loss((net if model is job.net else model)(x), y)

    return {"error": job.worst_error(loss_of), "sizes": sizes, "compiled": counter.frame_count}


@pytest.mark.multiproc
def test_a_compiled_model_is_compiled_once_per_distinct_batch_size() -> None:
    for how, ranks in zip(HOW, run_cases(_compiled, 2, HOW, timeout_s=100), strict=True):
        for result in ranks:
            assert result["error"] < 1e-12, how
            assert result["sizes"] <= {4, 8, 12}
            assert len(result["sizes"]) > 1
            most = len(result["sizes"]) * (2 if how == "before" else 1)  # without and with a controller
            assert 1 <= result["compiled"] <= most


def _pieces(meet: str) -> tuple[list[int], int]:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(1)
    counter = CompileCounterWithBackend("eager")
    data = TensorDataset(torch.randn(200, 6))
    script = Script([[36, 4], [4, 36]])
    controller = dynamix.Controller(script, 20, max_batch_size=64, micro_batch=4, interval=2, meet=meet)
    job = Training(controller, data, torch.compile(Deep(depth=2), backend=counter, dynamic=False), lr=0.01)
    sizes = set[int]()
    for (bx,) in job.batches(2):
        sizes.add(len(bx))
        with controller.piece():
            job.model(bx).square().mean().backward()
        job.finish()
    controller.close()
    return sorted(sizes), counter.frame_count


@pytest.mark.multiproc
def test_pieces_of_unequal_shares_are_compiled_once() -> None:
    assert run_cases(_pieces, 2, ["gradients", "parameters"]) == [[([4], 1)] * 2] * 2
