"""The jobs of `dynamix bench compression` have the zeros that they are there for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamix_lab.commands import suites as commands
from dynamix_lab.suites.compression.jobs import EMBEDDINGS, JOBS, SPARSE_JOBS, make_job
from dynamix_lab.suites.compression.task import CompressionTask

TINY: dict[str, dict[str, Any]] = {
    "ncf": {"users": 3000, "items": 400, "samples": 32},
    "lstm-tied": {"vocabulary": 2000, "width": 16, "length": 8, "samples": 2, "drawn": 20, "text_bytes": 50_000},
    "transformer-tied": {"vocabulary": 2000, "width": 16, "length": 8, "samples": 2, "drawn": 20, "text_bytes": 50_000},
    "moe": {"experts": 16, "width": 16, "hidden": 8, "samples": 24},
    "lora": {"width": 32, "layers": 1},
    **{f"rows-{share}": {"rows": 500, "width": 4, "own": 20} for share in (0, 50, 100)},
}


def _job(name: str, workers: int = 1) -> CompressionTask:
    return make_job(name, 1, workers=workers, **TINY[name])


def _gradients(job: CompressionTask, number: int, net: nn.Module | None = None) -> dict[str, Tensor]:
    net = job.make_model(1) if net is None else net
    inputs, targets = job.batch(number)
    job.loss(net(inputs), targets).backward()
    return {name: p.grad.to_dense() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SPARSE_JOBS)
def test_batches_are_the_same_for_a_number_and_the_loss_falls(name: str) -> None:
    job = _job(name)
    assert all(torch.equal(one, other) for one, other in zip(job.batch(5), job.batch(5), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(job.batch(5), job.batch(6), strict=True))
    net = job.make_model(1)
    optimizer = job.make_optimizer([p for p in net.parameters() if p.requires_grad])
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        inputs, targets = job.batch(0)
        loss = job.loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", [name for name in SPARSE_JOBS if name in EMBEDDINGS])
def test_sparse_gradients_are_the_dense_ones(name: str) -> None:
    job = _job(name)
    assert job.make_sparse is not None
    sparse, dense = _gradients(job, 0, job.make_sparse(1)), _gradients(job, 0)
    for parameter, gradient in dense.items():
        torch.testing.assert_close(sparse[parameter], gradient)
    largest = max(dense.values(), key=lambda gradient: gradient.numel())
    assert float(largest.any(1).float().mean()) < 0.1, "most rows get none"


def test_experts_without_a_sample_get_no_gradient() -> None:
    found = _gradients(_job("moe"), 0)
    idle = [name for name in ("into", "back") if int(found[name].flatten(1).any(1).sum()) <= 8]
    assert idle == ["into", "back"], "of 16 experts"


def test_only_adapters_are_trained() -> None:
    found = _gradients(_job("lora"), 0)
    assert {name.rpartition(".")[2] for name in found} == {"down", "up"}


@pytest.mark.parametrize("share", [0, 50, 100])
def test_workers_share_as_many_rows_as_the_job_is_named_for(share: int) -> None:
    job = _job(f"rows-{share}", workers=3)
    rows = [set(job.batch(6 + rank)[0].tolist()) for rank in range(3)]
    assert [len(of_rank) for of_rank in rows] == [20] * 3
    common = set.intersection(*rows)
    assert len(common) == share / 100 * 20
    assert len(set.union(*rows)) == len(common) + 3 * (20 - len(common))
    assert rows[0] != set(job.batch(9)[0].tolist()), "another step, other rows"


def test_every_job_has_a_name_that_the_command_tells() -> None:
    assert ", ".join(JOBS) == commands._JOBS
    assert len(set(JOBS)) == len(JOBS)
    assert set(EMBEDDINGS) <= set(JOBS)
