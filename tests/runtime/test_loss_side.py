"""What needs the loss side: SyncBatchNorm, FSDP, token counts; and GradScaler on either side."""

from __future__ import annotations

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
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.union import Script, larger

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
    plan, data = sampler.plan(), _data()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(sampler.plan().epoch))
    index = order[plan.start : plan.start + int(plan.counts.sum())]
    return data.tensors[0][index], data.tensors[1][index]


def _controller() -> tuple[dynamix.Controller, Any, DataLoader[Any]]:
    controller = dynamix.Controller(
        Script(ANSWERS), batch_size=4, max_batch_size=32, interval=2, global_batch="adaptive", lr_rule="none"
    )
    sampler = controller.batch_sampler(_data())
    return controller, sampler, DataLoader(_data(), batch_sampler=sampler)


def _sync_batch_norm(rank: int, weighting: str) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), ReferenceSyncBatchNorm(5), nn.Tanh(), nn.Linear(5, 5)).double()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5)).double()
    controller, sampler, loader = _controller()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = controller.wrap(DDP(net), optimizer, weighting=weighting)
    worst = 0.0
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        controller.weight(loss).backward()
        ux, uy = _union(sampler)
        whole.load_state_dict(net.state_dict(), strict=False)
        whole.zero_grad()
        F.mse_loss(whole(ux), uy).backward()
        for got, want in zip(net.parameters(), whole.parameters(), strict=True):
            worst = larger(worst, float((got.grad - want.grad).abs().max()))
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
    return worst


def test_sync_batch_norm_on_the_loss_side_equals_one_big_batch() -> None:
    assert max(run_ranks(_sync_batch_norm, 3, "loss")) < 1e-10


def _refusal(rank: int, kind: str) -> str:
    controller, _, _ = _controller()
    net: nn.Module = nn.Linear(5, 5)
    if kind == "syncbn":
        net = DDP(nn.Sequential(net))
        net.module.append(nn.SyncBatchNorm(5))  # afterwards: DDP refuses it on a CPU
    elif kind == "hooked":
        net = DDP(net)
        net.register_comm_hook(None, dynamix.weighted(lambda s, b: None, count=lambda: (1, 2)))
    try:
        controller.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    except UsageError as error:
        return str(error)
    return "accepted"


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
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    mesh = init_device_mesh("cpu", (3,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    controller, sampler, loader = _controller()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    other = torch.optim.SGD(whole.parameters(), lr=0.05)
    model = controller.wrap(net, optimizer, weighting="loss")
    worst = 0.0
    for step, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y)
        # Every second step gives the count itself, so that N is known only after backward.
        count = int(sampler.plan().counts[rank]) if step % 2 else None
        controller.weight(loss, count=count).backward()
        ux, uy = _union(sampler)
        other.zero_grad()
        F.mse_loss(whole(ux), uy).backward()
        for got, want in zip(net.parameters(), whole.parameters(), strict=True):
            worst = larger(worst, float((got.grad.full_tensor() - want.grad).abs().max()))
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        controller.step(loss=loss)
    return worst


def test_fsdp2_on_the_loss_side_equals_one_big_batch() -> None:
    assert max(run_ranks(_fsdp, 3)) < 1e-10


def _tokens(rank: int, accumulate: int) -> float:
    """Class-weighted and token-like counts: each sample carries its own weight."""
    torch.manual_seed(0)
    net = nn.Linear(5, 5).double()
    weights = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) * 9 + 1
    x, y = _data().tensors
    data = TensorDataset(x, y, weights)
    script = Script(ANSWERS, accumulate)
    controller = dynamix.Controller(
        script, batch_size=4, max_batch_size=32, interval=2, accumulate=accumulate, global_batch="adaptive"
    )
    sampler = controller.batch_sampler(data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = controller.wrap(DDP(net), optimizer, weighting="loss")
    worst = 0.0
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    begin = 0
    for bx, by, bw in DataLoader(data, batch_sampler=sampler):
        plan = sampler.plan()
        last = plan.micro == accumulate - 1
        begin = plan.start if plan.micro == 0 else begin

        def backward(bx: Tensor = bx, by: Tensor = by, bw: Tensor = bw) -> Tensor:
            loss = ((model(bx) - by).square().mean(1) * bw).sum() / bw.sum()
            controller.weight(loss / accumulate, count=float(bw.sum())).backward()
            return loss

        if not last:
            with model.no_sync():
                loss = backward()
        else:
            loss = backward()
            index = order[begin : plan.start + int(plan.counts.sum())]
            want = torch.autograd.grad(
                ((net(x[index]) - y[index]).square().mean(1) * weights[index]).sum() / weights[index].sum(),
                list(net.parameters()),
            )
            for got, true in zip(net.parameters(), want, strict=True):
                worst = larger(worst, float((got.grad - true).abs().max()))
            optimizer.step()
            optimizer.zero_grad()
        controller.step(loss=loss)
    return worst


@pytest.mark.parametrize("accumulate", [1, 2])
def test_given_counts_weight_the_gradient(accumulate: int) -> None:
    assert max(run_ranks(_tokens, 3, accumulate)) < 1e-10


def _nobodys(rank: int, micro_batch: int | None) -> float:
    """In the first batches, and in some later ones, no token of any worker counts."""
    torch.manual_seed(0)
    net, x = nn.Linear(5, 3).double(), torch.randn(96, 5, dtype=torch.float64)
    y = torch.arange(96) % 3
    y[:40] = y[60:72] = -100
    controller = dynamix.Controller("static", 4, micro_batch=micro_batch)
    sampler = controller.batch_sampler(data := TensorDataset(x, y), shuffle=False)
    model = controller.wrap(DDP(net), optimizer := torch.optim.SGD(net.parameters(), lr=0.1), weighting="loss")
    worst = 0.0
    for bx, by in DataLoader(data, batch_sampler=sampler):
        count = (by >= 0).sum()
        with controller.piece():
            loss = F.cross_entropy(model(bx), by, reduction="sum") / count.clamp(min=1)
            controller.weight(loss, count=count).backward()
        if controller.optimizer_due:
            union = slice(sampler.plan().start, sampler.plan().start + sampler.plan().samples)
            true = F.cross_entropy(net(x[union]), y[union], reduction="sum") / (y[union] >= 0).sum().clamp(min=1)
            for got, want in zip(net.parameters(), torch.autograd.grad(true, list(net.parameters())), strict=True):
                assert got.grad is not None
                worst = larger(worst, float((got.grad - want).abs().max()))
            optimizer.step()
            optimizer.zero_grad()
        controller.step()
    controller.close()
    return worst


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_batches_in_which_nothing_counts_have_no_gradient(micro_batch: int | None) -> None:
    assert max(run_ranks(_nobodys, 2, micro_batch)) < 1e-12


def _scaler(rank: int, hook: str | None) -> dict[str, Any]:
    """A GradScaler job with one infinite step: the step is skipped, the scale halves, later gradients are finite."""
    from tests.union import hook_of

    torch.manual_seed(0)
    net = nn.Linear(5, 5)
    x = torch.randn(240, 5)
    data = TensorDataset(x, x.flip(1))
    controller = dynamix.Controller(
        Script(ANSWERS), batch_size=4, max_batch_size=32, interval=2, global_batch="adaptive"
    )
    loader = DataLoader(data, batch_sampler=controller.batch_sampler(data))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inner, state = hook_of(hook)
    model = controller.wrap(DDP(net), optimizer, scaler=scaler, hook=inner, hook_state=state)
    scales, skipped = [], 0
    for step, (bx, by) in enumerate(loader):
        loss = F.mse_loss(model(bx), by)
        if step == 8 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = net.weight.detach().clone()
        scaler.step(optimizer)
        skipped += int(torch.equal(before, net.weight))
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        controller.step(loss=loss if step != 8 else None)
    controller.close()
    dist.barrier()
    finite = all(bool(torch.isfinite(p).all()) for p in net.parameters())
    return {
        "scales": scales,
        "skipped": skipped,
        "finite": finite,
        "noise": controller._coordinator.progress.shared[-1][1],
        "loss": float(loss.detach()),
    }


@pytest.mark.parametrize("hook", [None, "powersgd"])
def test_grad_scaler_skips_the_infinite_step_and_nothing_else(hook: str | None) -> None:
    results = run_ranks(_scaler, 3, hook)
    for result in results:
        assert result["skipped"] == 1
        assert result["finite"]
        assert result["scales"][7:9] == [1024.0, 512.0]
        assert result["scales"] == results[0]["scales"]
        # Norms are measured without the loss scale: with it the noise would be a million times larger.
        assert 0 < result["noise"] < 50


def _forgotten(rank: int) -> str:
    controller, _, loader = _controller()
    net = nn.Linear(5, 5).double()
    model = controller.wrap(DDP(net), torch.optim.SGD(net.parameters(), lr=0.1), weighting="loss")
    x, y = next(iter(loader))
    F.mse_loss(model(x), y).backward()
    try:
        controller.step()
    except UsageError as error:
        return str(error)
    return "accepted"


def test_a_forgotten_weight_call_is_an_error() -> None:
    assert all("controller.weight(loss).backward()" in m for m in run_ranks(_forgotten, 2 + 1))
