"""What needs the loss side: SyncBatchNorm, token counts; and GradScaler on either side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import UsageError
from tests.ranks import refusal, run_cases, run_ranks
from tests.runtime.jobs import Training, adaptive, order_of
from tests.union import Script

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


def _controller() -> dynamix.Controller:
    return adaptive(Script(ANSWERS), 4, max_batch_size=32, lr_rule="none")


def _sync_batch_norm(rank: int) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), ReferenceSyncBatchNorm(5), nn.Tanh(), nn.Linear(5, 5)).double()
    whole = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5)).double()
    job = Training(_controller(), _data(), net, lr=0.01, weighting="loss")

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if model is not job.net:
            return F.mse_loss(model(x), y)
        return F.mse_loss(torch.func.functional_call(whole, dict(net.named_parameters()), (x,)), y)

    return job.worst_error(loss_of, lambda loss, *_: job.controller.weight(loss))


def test_sync_batch_norm_on_the_loss_side_equals_one_big_batch() -> None:
    assert max(run_ranks(_sync_batch_norm, 3)) < 1e-10


REFUSED = {
    "syncbn": "SyncBatchNorm's backward mixes gradients",
    "plain": "is no DDP model: write wrap(DDP(net), optimizer)",
    "hooked": "already has a communication hook",
}


def _refusals(rank: int) -> list[str]:
    told = []
    for kind in REFUSED:
        net: nn.Module = nn.Linear(5, 5)
        if kind == "syncbn":
            net = DDP(nn.Sequential(net))
            net.module.append(nn.SyncBatchNorm(5))  # afterwards: DDP refuses it on a CPU
        elif kind == "hooked":
            net = DDP(net)
            net.register_comm_hook(None, dynamix.weighted(lambda s, b: None, count=lambda: (1, 2)))
        told.append(refusal(UsageError, _controller().wrap, net, torch.optim.SGD(net.parameters(), lr=0.1)))
    return told


def test_wrap_names_the_reason_and_the_fix() -> None:
    for told in run_ranks(_refusals, 2):
        for reason, message in zip(REFUSED.values(), told, strict=True):
            assert reason in message
            assert "weighting='loss'" in message or "hook=hook" in message


def _tokens(cut: tuple[int, int | None]) -> float:
    """Class-weighted and token-like counts: each sample carries its own weight."""
    torch.manual_seed(0)
    accumulate, micro_batch = cut
    net = nn.Linear(5, 5).double()
    x, y = _data().tensors
    weights = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) * 9 + 1
    answers = [[16, 3, 0], [2, 7, 13]] if micro_batch else ANSWERS
    given = {"accumulate": accumulate, "micro_batch": micro_batch, "min_batch_size": int(micro_batch is None)}
    controller = adaptive(Script(answers, accumulate), 4, max_batch_size=32, **given)
    job = Training(controller, TensorDataset(x, y, weights), net, lr=0.01, weighting="loss")

    def loss_of(net: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return ((net(x) - y).square().mean(1) * weight).sum() / weight.sum()

    return job.worst_error(
        loss_of, lambda loss, x, y, weight: controller.weight(loss / accumulate, count=float(weight.sum()))
    )


def test_given_counts_weight_the_gradient() -> None:
    assert max(map(max, run_cases(_tokens, 3, [(1, None), (2, None), (1, 4)]))) < 1e-10


def _nobodys(micro_batch: int | None) -> float:
    """In the first batches, and in some later ones, no token of any worker counts."""
    torch.manual_seed(0)
    net, x, order = nn.Linear(5, 3).double(), torch.randn(96, 5, dtype=torch.float64), order_of(96)
    y = torch.arange(96) % 3
    y[order[:40]] = y[order[60:72]] = -100
    controller = dynamix.Controller("static", 4, micro_batch=micro_batch)
    job = Training(controller, TensorDataset(x, y), net, weighting="loss")

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y, reduction="sum") / (y >= 0).sum().clamp(min=1)

    return job.worst_error(loss_of, lambda loss, x, y: controller.weight(loss, count=(y >= 0).sum()))


def test_batches_in_which_nothing_counts_have_no_gradient() -> None:
    assert max(map(max, run_cases(_nobodys, 2, [None, 2]))) < 1e-12


def _scaler(rank: int) -> dict[str, Any]:
    """A GradScaler job with one infinite step: the step is skipped, the scale halves, later gradients are finite."""
    torch.manual_seed(0)
    net, x = nn.Linear(5, 5), torch.randn(240, 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    controller = adaptive(Script(ANSWERS), 4, max_batch_size=32)
    job = Training(controller, TensorDataset(x, x.flip(1)), net, lr=0.05, scaler=scaler)
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


def test_grad_scaler_skips_the_infinite_step_and_nothing_else() -> None:
    results = run_ranks(_scaler, 3)
    for result in results:
        assert result["skipped"] == 1
        assert result["finite"]
        assert result["scales"][7:9] == [1024.0, 512.0]
        assert result["scales"] == results[0]["scales"]
        assert 0 < result["noise"] < 50  # norms without the loss scale: with it, it would be a million times larger


def _forgotten(rank: int) -> str:
    job = Training(_controller(), _data(), nn.Linear(5, 5).double(), weighting="loss")
    x, y = next(iter(job.loader))
    F.mse_loss(job.model(x), y).backward()
    return refusal(UsageError, job.controller.step)


def test_a_forgotten_weight_call_is_an_error() -> None:
    assert all("controller.weight(loss).backward()" in m for m in run_ranks(_forgotten, 2))
