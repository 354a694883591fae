"""Losses that are made of all ranks' samples: exact as they are, refused where they would be weighted by shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.data import TensorDataset

import dynamix
from tests.ranks import Ok, run_cases, run_ranks
from tests.runtime.jobs import Training
from tests.union import Script

pytestmark = pytest.mark.multiproc
SAMPLES, WIDTH, SHARES = 600, 5, [[12, 4], [4, 12], [14, 2], [5, 11]]


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


def _gathered(own: Tensor) -> Tensor:
    return _Gathered.apply(own)  # type: ignore[no-untyped-call, no-any-return]


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
KINDS: dict[str, dict[str, tuple[Loss, Loss]]] = {
    "all": {
        "contrastive": (lambda a, b, n: _contrast(_gathered(a), _gathered(b)), lambda a, b, n: _contrast(a, b)),
        "contrastive, own features": (
            lambda a, b, n: _contrast(_rows_of_all(a), _rows_of_all(b)) * dist.get_world_size(),
            lambda a, b, n: _contrast(a, b),
        ),
        "decorrelation": (
            lambda a, b, n: _decorrelated(all_reduce(a.T @ b), n),
            lambda a, b, n: _decorrelated(a.T @ b, n),
        ),
        "ring": (lambda a, b, n: _own_rows(a, b) / n * dist.get_world_size(), lambda a, b, n: _pairs(a, b) / n),
    },
    "own rows": {
        "ring": (lambda a, b, n: _own_rows(a, b) / len(a), lambda a, b, n: _pairs(a, b) / n),
    },
    "each": {
        "averaged": (
            lambda a, b, n: all_reduce(F.mse_loss(a, b)) / dist.get_world_size(),
            lambda a, b, n: F.mse_loss(a, b),
        ),
        "gathered means": (
            lambda a, b, n: _gathered(F.mse_loss(a, b).reshape(1, 1)).mean(),
            lambda a, b, n: F.mse_loss(a, b),
        ),
        "of parts": (_of_parts, lambda a, b, n: F.mse_loss(a, b)),
        "beside a penalty": (_beside_weights, lambda a, b, n: F.mse_loss(a, b)),
        "averaged in place": (lambda a, b, n: _averaged_in_place(a, b), lambda a, b, n: F.mse_loss(a, b)),
    },
}


def _worst(case: tuple[str, str, str]) -> float:
    """How far gradients are from the union's, for a kind of loss of that name under a weighting."""
    kind, name, weighting = case
    own, whole = KINDS[kind][name]
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 6, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, WIDTH)).double()
    group = dist.new_group()
    controller = dynamix.Controller(Script(SHARES), 8, max_batch_size=16, interval=1, process_group=group)
    data = TensorDataset(x, x + 0.3 * torch.randn_like(x))
    job = Training(controller, data, net, lr=0.02, weighting=weighting)

    def loss_of(model: nn.Module, *views: Tensor) -> Tensor:
        a, b = model(torch.cat(views)).chunk(2)
        return (whole if model is net else own)(a, b, job.sampler.plan().samples)

    return job.worst_error(loss_of, lambda loss, *_: controller.weight(loss) if weighting == "loss" else loss)


def test_each_kind_is_exact_under_its_weighting_and_never_refused() -> None:
    weightings = {"all": "given", "each": "hook", "own rows": "loss"}
    cases = [(kind, name, weighting) for kind, weighting in weightings.items() for name in KINDS[kind]]
    for case, errors in zip(cases, run_cases(_worst, 2, cases), strict=True):
        assert max(errors) < 1e-10, case


def _named(rank: int, name: str) -> float:
    return _worst(("all", name, "hook"))


@pytest.mark.parametrize("name", ["contrastive", "contrastive, own features", "decorrelation"])
def test_a_loss_of_all_samples_that_would_be_weighted_ends_the_job_with_the_line_to_write(name: str) -> None:
    first, other = run_ranks(_named, 2, name, expect_failure=True)
    assert not isinstance(first, Ok)
    assert "UsageError" in first
    assert "wrap(..., weighting='given')" in first
    assert not isinstance(other, Ok)  # it waits for the first rank in the loop's own collective, or was told
    assert not str(other).startswith("hung")
