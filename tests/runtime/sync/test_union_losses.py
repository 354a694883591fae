"""Losses that are made of all ranks' samples: exact as they are, refused where they would be weighted by shares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from tests.ranks import Ok, run_ranks
from tests.runtime.jobs import order_of
from tests.union import Script, flat_gradient, larger

pytestmark = pytest.mark.multiproc
SAMPLES, WIDTH, SHARES = 200, 5, [[12, 4], [4, 12], [14, 2], [5, 11]]


class _Gathered(torch.autograd.Function):
    """The rows of all ranks; gradients of all ranks come back to each."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        counts = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor(len(own)))
        parts = [own.new_zeros(int(max(counts)), *own.shape[1:]) for _ in counts]
        dist.all_gather(parts, F.pad(own, (0, 0, 0, len(parts[0]) - len(own))))
        ctx.begin, ctx.end = int(sum(counts[: dist.get_rank()])), int(sum(counts[: dist.get_rank() + 1]))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient[ctx.begin : ctx.end]


class _Summed(torch.autograd.Function):
    """The sum over ranks; gradients of all ranks come back to each."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        own = own.clone()
        dist.all_reduce(own)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _gathered(own: Tensor) -> Tensor:
    return _Gathered.apply(own)  # type: ignore[no-untyped-call, no-any-return]


def _summed(own: Tensor) -> Tensor:
    return _Summed.apply(own)  # type: ignore[no-untyped-call, no-any-return]


def _rows_of_all(own: Tensor) -> Tensor:
    """The rows of all ranks, of which only the own ones have gradients."""
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(len(own)))
    rows = list(torch.split(_gathered(own.detach()), [int(count) for count in counts]))
    rows[dist.get_rank()] = own
    return torch.cat(rows)


def _contrast(a: Tensor, b: Tensor) -> Tensor:
    alike = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.2
    return F.cross_entropy(alike, torch.arange(len(a)))


def _pairs(a: Tensor, b: Tensor, first: int = 0) -> Tensor:
    """SigLIP's loss of rows `a`, which belong to rows `first` and on of `b`: summed over `a`."""
    own = torch.eye(len(b), dtype=a.dtype)[first : first + len(a)]
    return -F.logsigmoid((2 * own - 1) * (a @ b.T)).sum()


def _decorrelated(of_all: Tensor, samples: int) -> Tensor:
    return (of_all / samples - torch.eye(WIDTH, dtype=of_all.dtype)).square().sum()


def _distilled(a: Tensor, b: Tensor) -> Tensor:
    """How alike samples are to each other, of a student and of a teacher."""
    return F.kl_div((a @ a.T).log_softmax(1), (b.detach() @ b.detach().T).softmax(1), reduction="batchmean")


def _own_rows(a: Tensor, b: Tensor) -> Tensor:
    """SigLIP's loss of the own rows and all columns, summed."""
    counts = _gathered(torch.tensor([[float(len(a))]])).flatten()
    return _pairs(a, _gathered(b), int(counts[: dist.get_rank()].sum()))


def _averaged_in_place(a: Tensor, b: Tensor) -> Tensor:
    loss = F.mse_loss(a, b)
    dist.all_reduce(loss.detach())  # shares memory with the loss, which is all ranks' from now on
    return loss


def _beside_weights(a: Tensor, b: Tensor, total: int) -> Tensor:
    """With a penalty on weights that have as many rows as the global batch has samples."""
    torch.manual_seed(0)
    weights = torch.randn(total, 3, dtype=a.dtype, requires_grad=True)
    return _averaged_in_place(a, b) + weights.square().sum()


def _of_parts(a: Tensor, b: Tensor, total: int) -> Tensor:
    """Of as many parts of the own samples, such as tokens, as the global batch has samples."""
    parts = total // len(a) if total % len(a) == 0 else 1
    a, b = (own.unsqueeze(1).repeat(1, parts, 1).flatten(0, 1) for own in (a, b))
    return _averaged_in_place(a, b)


Loss = Callable[[Tensor, Tensor, int], Tensor]
# What a rank computes of its own two views and the samples of all, and what one process computes of the union batch.
OF_ALL: dict[str, tuple[Loss, Loss]] = {
    "contrastive": (lambda a, b, n: _contrast(_gathered(a), _gathered(b)), lambda a, b, n: _contrast(a, b)),
    "contrastive, own features": (
        lambda a, b, n: _contrast(_rows_of_all(a), _rows_of_all(b)) * dist.get_world_size(),
        lambda a, b, n: _contrast(a, b),
    ),
    "decorrelation": (lambda a, b, n: _decorrelated(_summed(a.T @ b), n), lambda a, b, n: _decorrelated(a.T @ b, n)),
    "distillation": (lambda a, b, n: _distilled(_gathered(a), _gathered(b)), lambda a, b, n: _distilled(a, b)),
    "ring": (lambda a, b, n: _own_rows(a, b) / n * dist.get_world_size(), lambda a, b, n: _pairs(a, b) / n),
}
OF_OWN_ROWS: dict[str, tuple[Loss, Loss]] = {
    "ring": (lambda a, b, n: _own_rows(a, b) / len(a), lambda a, b, n: _pairs(a, b) / n),
}
OF_EACH: dict[str, tuple[Loss, Loss]] = {
    "averaged": (lambda a, b, n: _summed(F.mse_loss(a, b)) / dist.get_world_size(), lambda a, b, n: F.mse_loss(a, b)),
    "gathered means": (
        lambda a, b, n: _gathered(F.mse_loss(a, b).reshape(1, 1)).mean(),
        lambda a, b, n: F.mse_loss(a, b),
    ),
    "of parts": (_of_parts, lambda a, b, n: F.mse_loss(a, b)),
    "beside a penalty": (_beside_weights, lambda a, b, n: F.mse_loss(a, b)),
    "averaged in place": (lambda a, b, n: _averaged_in_place(a, b), lambda a, b, n: F.mse_loss(a, b)),
}


def _worst(rank: int, losses: tuple[Loss, Loss], weighting: str) -> float:
    """The largest relative error of a step's gradient."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 6, dtype=torch.float64)
    data = TensorDataset(x, x + 0.3 * torch.randn_like(x))
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, WIDTH)).double()
    reference, worst = copy.deepcopy(net), 0.0
    group = dist.new_group()
    controller = dynamix.Controller(Script(SHARES), 8, max_batch_size=16, interval=1, process_group=group)
    sampler = controller.batch_sampler(data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    model = controller.wrap(DDP(net, process_group=group), optimizer, weighting=weighting)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for views in DataLoader(data, batch_sampler=sampler):
            plan = sampler.plan()
            loss = losses[0](*model(torch.cat(views)).chunk(2), plan.samples)
            (controller.weight(loss) if weighting == "loss" else loss).backward()
            union = order_of(SAMPLES, epoch)[plan.start : plan.start + plan.samples]
            reference.load_state_dict(net.state_dict())
            reference.zero_grad()
            whole = reference(torch.cat([view[union] for view in data.tensors])).chunk(2)
            losses[1](*whole, plan.samples).backward()
            got, want = flat_gradient(net), flat_gradient(reference)
            worst = larger(worst, float((got - want).norm() / want.norm()))
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
    controller.close()
    return worst


def _all_worst(rank: int, weighting: str) -> dict[str, float]:
    kinds = {"given": OF_ALL, "hook": OF_EACH, "loss": OF_OWN_ROWS}[weighting]
    return {name: _worst(rank, losses, weighting) for name, losses in kinds.items()}


@pytest.mark.parametrize("weighting", ["given", "hook", "loss"])
def test_each_kind_is_exact_under_its_weighting_and_never_refused(weighting: str) -> None:
    for told in run_ranks(_all_worst, 2, weighting):
        assert max(told.values()) < 1e-10, told


def _named(rank: int, name: str) -> float:
    return _worst(rank, OF_ALL[name], "hook")


@pytest.mark.parametrize("name", ["contrastive", "contrastive, own features", "decorrelation", "distillation"])
def test_a_loss_of_all_samples_that_would_be_weighted_ends_the_job_with_the_line_to_write(name: str) -> None:
    first, other = run_ranks(_named, 2, name, expect_failure=True)
    assert not isinstance(first, Ok)
    assert "UsageError" in first
    assert "wrap(..., weighting='given')" in first
    assert not isinstance(other, Ok)  # it waits for the first rank in the loop's own collective, or was told
    assert other != "hung"
