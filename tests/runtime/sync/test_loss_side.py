"""What needs the loss side: SyncBatchNorm, FSDP, token counts; and GradScaler on either side."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import UsageError
from tests.ranks import refusal, run_ranks
from tests.runtime.jobs import Training, adaptive, furthest, order_of
from tests.union import Script, hook_of, larger

pytestmark = pytest.mark.multiproc
ANSWERS = [[2, 7, 3], [6, 2, 2]]
N = 120


class ReferenceSyncBatchNorm(nn.Module):
    """SyncBatchNorm from differentiable all-reduces: torch's own refuses CPU tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        count = all_reduce(torch.tensor(float(x.shape[0]), dtype=x.dtype))
        mean = all_reduce(x.sum(0)) / count
        variance = all_reduce(((x - mean) ** 2).sum(0)) / count
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randn(N, 5, dtype=torch.float64, generator=generator))


def _union(sampler: Any) -> tuple[Tensor, Tensor]:
    plan = sampler.plan()
    index = order_of(N, plan.epoch)[plan.start : plan.start + int(plan.counts.sum())]
    x, y = _data()[index]
    return x, y


def _controller() -> dynamix.Controller:
    return adaptive(Script(ANSWERS), 4, max_batch_size=32, lr_rule="none")


def _sync_batch_norm(rank: int, weighting: str) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), ReferenceSyncBatchNorm(5), nn.Tanh(), nn.Linear(5, 5)).double()
    whole = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5)).double()
    job = Training(_controller(), _data(), net, lr=0.01, weighting=weighting)
    worst = 0.0
    for x, y in job.loader:
        loss = F.mse_loss(job.model(x), y)
        job.controller.weight(loss).backward()
        ux, uy = _union(job.sampler)
        whole.load_state_dict(net.state_dict(), strict=False)
        whole.zero_grad()
        F.mse_loss(whole(ux), uy).backward()
        worst = larger(worst, furthest(net, [p.grad for p in whole.parameters()]))
        job.finish(loss=loss)
    return worst


def test_sync_batch_norm_on_the_loss_side_equals_one_big_batch() -> None:
    assert max(run_ranks(_sync_batch_norm, 3, "loss")) < 1e-10


def _refusal(rank: int, kind: str) -> str:
    controller = _controller()
    net: nn.Module = nn.Linear(5, 5)
    if kind == "syncbn":
        net = DDP(nn.Sequential(net))
        net.module.append(nn.SyncBatchNorm(5))  # afterwards: DDP refuses it on a CPU
    elif kind == "hooked":
        net = DDP(net)
        net.register_comm_hook(None, dynamix.weighted(lambda s, b: None, count=lambda: (1, 2)))
    return refusal(UsageError, controller.wrap, net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("syncbn", "SyncBatchNorm's backward mixes gradients"),
        ("plain", "not a DistributedDataParallel model"),
        ("hooked", "already has a communication hook"),
    ],
)
def test_wrap_names_the_reason_and_the_fix(kind: str, reason: str) -> None:
    for message in run_ranks(_refusal, 3, kind):
        assert reason in message
        assert "weighting='loss'" in message or "hook=hook" in message


def _fsdp(rank: int) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    whole = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (3,))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    job = Training(_controller(), _data(), net, lr=0.05, weighting="loss")
    other = torch.optim.SGD(whole.parameters(), lr=0.05)
    worst = 0.0
    for step, (x, y) in enumerate(job.loader):
        loss = F.mse_loss(job.model(x), y)
        # Every second step gives the count itself, so that N is known only after backward.
        count = int(job.sampler.plan().counts[rank]) if step % 2 else None
        job.controller.weight(loss, count=count).backward()
        ux, uy = _union(job.sampler)
        other.zero_grad()
        F.mse_loss(whole(ux), uy).backward()
        for got, want in zip(net.parameters(), whole.parameters(), strict=True):
            worst = larger(worst, float((got.grad.full_tensor() - want.grad).abs().max()))
        job.finish(loss=loss)
        other.step()
    return worst


def test_fsdp2_on_the_loss_side_equals_one_big_batch() -> None:
    assert max(run_ranks(_fsdp, 3)) < 1e-10


def _tokens(rank: int, accumulate: int, micro_batch: int | None) -> float:
    """Class-weighted and token-like counts: each sample carries its own weight."""
    torch.manual_seed(0)
    net = nn.Linear(5, 5).double()
    x, y = _data().tensors
    weights = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) * 9 + 1
    answers = [[16, 3, 0], [2, 7, 13]] if micro_batch else ANSWERS
    given = {"accumulate": accumulate, "micro_batch": micro_batch, "min_batch_size": int(micro_batch is None)}
    controller = adaptive(Script(answers, accumulate), 4, max_batch_size=32, **given)
    job = Training(controller, TensorDataset(x, y, weights), net, lr=0.01, weighting="loss")
    worst, begin, order = 0.0, 0, order_of(N)

    def loss_of(net: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return ((net(x) - y).square().mean(1) * weight).sum() / weight.sum()

    for batch in job.loader:
        plan, due = job.sampler.plan(), controller.optimizer_due
        begin = plan.start if plan.micro == 0 else begin
        with controller.piece() if micro_batch else contextlib.nullcontext() if due else job.model.no_sync():
            loss = loss_of(job.model, *batch)
            controller.weight(loss / accumulate, count=float(batch[2].sum())).backward()
        if due:
            index = order[begin : plan.start + int(plan.counts.sum())]
            union = loss_of(net, x[index], y[index], weights[index])
            worst = larger(worst, furthest(net, torch.autograd.grad(union, list(net.parameters()))))
        job.finish(loss=loss)
    controller.close()
    return worst


@pytest.mark.parametrize(("accumulate", "micro_batch"), [(1, None), (2, None), (1, 4)])
def test_given_counts_weight_the_gradient(accumulate: int, micro_batch: int | None) -> None:
    assert max(run_ranks(_tokens, 3, accumulate, micro_batch)) < 1e-10


def _nobodys(rank: int, micro_batch: int | None) -> float:
    """In the first batches, and in some later ones, no token of any worker counts."""
    torch.manual_seed(0)
    net, x = nn.Linear(5, 3).double(), torch.randn(96, 5, dtype=torch.float64)
    y = torch.arange(96) % 3
    y[:40] = y[60:72] = -100
    controller = dynamix.Controller("static", 4, micro_batch=micro_batch)
    job = Training(controller, TensorDataset(x, y), net, sampling={"shuffle": False}, weighting="loss")
    worst = 0.0
    for bx, by in job.loader:
        count, due = (by >= 0).sum(), controller.optimizer_due
        with controller.piece():
            loss = F.cross_entropy(job.model(bx), by, reduction="sum") / count.clamp(min=1)
            controller.weight(loss, count=count).backward()
        if due:
            union = slice(job.sampler.plan().start, job.sampler.plan().start + job.sampler.plan().samples)
            true = F.cross_entropy(net(x[union]), y[union], reduction="sum") / (y[union] >= 0).sum().clamp(min=1)
            worst = larger(worst, furthest(net, torch.autograd.grad(true, list(net.parameters()))))
        job.finish()
    controller.close()
    return worst


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_batches_in_which_nothing_counts_have_no_gradient(micro_batch: int | None) -> None:
    assert max(run_ranks(_nobodys, 2, micro_batch)) < 1e-12


def _scaler(rank: int, hook: str | None) -> dict[str, Any]:
    """A GradScaler job with one infinite step: the step is skipped, the scale halves, later gradients are finite."""
    torch.manual_seed(0)
    net, x = nn.Linear(5, 5), torch.randn(240, 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inner, state = hook_of(hook)
    controller = adaptive(Script(ANSWERS), 4, max_batch_size=32)
    job = Training(controller, TensorDataset(x, x.flip(1)), net, lr=0.05, scaler=scaler, hook=inner, hook_state=state)
    scales, skipped = [], 0
    for step, (bx, by) in enumerate(job.loader):
        loss = F.mse_loss(job.model(bx), by)
        if step == 8 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = net.weight.detach().clone()
        scaler.step(job.optimizer)
        skipped += int(torch.equal(before, net.weight))
        scaler.update()
        job.optimizer.zero_grad()
        scales.append(scaler.get_scale())
        controller.step(loss=loss if step != 8 else None)
    controller.close()
    dist.barrier()
    finite = all(bool(torch.isfinite(p).all()) for p in net.parameters())
    noise = controller.state_dict()["progress"]["shared"][-1][1]
    return {"scales": scales, "skipped": skipped, "finite": finite, "noise": noise}


@pytest.mark.parametrize("hook", [None, "powersgd"])
def test_grad_scaler_skips_the_infinite_step_and_nothing_else(hook: str | None) -> None:
    results = run_ranks(_scaler, 3, hook)
    for result in results:
        assert result["skipped"] == 1
        assert result["finite"]
        assert result["scales"][7:9] == [1024.0, 512.0]
        assert result["scales"] == results[0]["scales"]
        # Norms are measured without the loss scale: with it the noise would be a million times larger. PowerSGD leaves
        # no norms once it begins, so there the noise stays unknown.
        assert hook is not None or 0 < result["noise"] < 50


def _forgotten(rank: int) -> str:
    job = Training(_controller(), _data(), nn.Linear(5, 5).double(), weighting="loss")
    x, y = next(iter(job.loader))
    F.mse_loss(job.model(x), y).backward()
    return refusal(UsageError, job.controller.step)


def test_a_forgotten_weight_call_is_an_error() -> None:
    assert all("controller.weight(loss).backward()" in m for m in run_ranks(_forgotten, 2 + 1))
