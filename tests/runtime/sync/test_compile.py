"""Compiled models: gradients stay exact, and a grid of batch sizes bounds how often they are compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dynamix
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, furthest, order_of
from tests.union import Deep, Script, larger

SAMPLES = 192  # a multiple of every global batch below: no tails


def _compiled(rank: int, backend: str, outside: bool) -> dict[str, Any]:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(1)
    counter = CompileCounterWithBackend(backend)
    x, y = torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randn(SAMPLES, 6, dtype=torch.float64)
    net = Deep(depth=3).double()
    whole = copy.deepcopy(net)
    controller = adaptive(Script([[4, 12], [12, 4], [8, 8]]), max_batch_size=16, quantum=4)
    inner = net if outside else torch.compile(net, backend=counter, dynamic=False)
    job = Training(controller, TensorDataset(x, y), inner, lr=0.01)
    model: Any = torch.compile(job.model, backend=counter, dynamic=False) if outside else job.model
    sizes, worst = set(), 0.0
    for epoch in range(2):
        job.sampler.set_epoch(epoch)
        order = order_of(SAMPLES, epoch)
        for bx, by in job.loader:
            plan = job.sampler.plan()
            union = order[plan.start : plan.start + int(plan.counts.sum())]
            loss = F.mse_loss(model(bx), by)
            loss.backward()
            want = torch.autograd.grad(F.mse_loss(whole(x[union]), y[union]), list(whole.parameters()))
            worst = larger(worst, furthest(net, want))
            job.finish(loss=loss)
            whole.load_state_dict(net.state_dict())
            sizes.add(len(bx))
    controller.close()
    return {"error": worst, "sizes": sizes, "compiled": counter.frame_count}


@pytest.mark.multiproc
@pytest.mark.parametrize(("backend", "outside"), [("eager", False), ("aot_eager", False), ("eager", True)])
def test_a_compiled_model_is_compiled_once_per_distinct_batch_size(backend: str, outside: bool) -> None:
    for result in run_ranks(_compiled, 2, backend, outside, timeout_s=100):
        assert result["error"] < 1e-12
        assert result["sizes"] <= {4, 8, 12}
        assert len(result["sizes"]) > 1
        assert 1 <= result["compiled"] <= len(result["sizes"])


def _pieces(rank: int, meet: str) -> tuple[list[int], int]:
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


@pytest.mark.parametrize("meet", ["gradients", "parameters"])
def test_pieces_of_unequal_shares_are_compiled_once(meet: str) -> None:
    for sizes, compiled in run_ranks(_pieces, 2, meet):
        assert sizes == [4]
        assert compiled == 1
