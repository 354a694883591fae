"""Unequal numbers of equal pieces: what every optimizer step applies is the gradient of the union batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.data.plan import pieces_of
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive
from tests.union import Script


def _buffers(rank: int) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.0))  # which leaves its statistics as they are
    torch.nn.init.constant_(net[1].get_buffer("running_var"), 5.0)
    controller = adaptive(Script([[32, 4], [9, 27]]), max_batch_size=64, micro_batch=4)
    job = Training(controller, TensorDataset(torch.randn(200, 3)), net, batchnorm="weighted")
    for (x,) in job.loader:
        with controller.piece():
            job.model(x).square().mean().backward()
        job.finish()
    controller.close()
    values: list[float] = net[1].get_buffer("running_var").tolist()
    return values


def test_weights_of_buffers_are_of_whole_shares() -> None:
    for values in run_ranks(_buffers, 2):
        assert values == pytest.approx([5.0] * 3, rel=1e-5)


def test_find_limits_bounds_the_piece_and_not_the_share() -> None:
    data = TensorDataset(torch.randn(256, 3))
    controller = dynamix.Controller("static", 32, micro_batch=16, global_batch="adaptive")
    job = Training(controller, data, nn.Linear(3, 1))
    high = controller.bounds.high.tolist()

    def step(batch: Tensor) -> None:
        if len(batch) > 10:
            raise torch.OutOfMemoryError
        job.model(batch).sum().backward()

    (cap,) = controller.find_limits(step, torch.randn(4, 3), margin=0.0)
    assert 5 <= cap <= 10
    assert controller.bounds.high.tolist() == high
    sizes = [len(x) for (x,) in job.loader]
    assert max(sizes) == cap
    assert sum(sizes) == 256


@pytest.mark.parametrize("most", range(3, 18))
def test_no_piece_is_a_single_sample(most: int) -> None:
    for share in range(2, 10 * most):
        sizes = pieces_of(share, most)
        assert sum(sizes) == share
        assert 1 < min(sizes) <= max(sizes) <= most


def test_what_is_observed_is_averaged_by_samples() -> None:
    data = TensorDataset(torch.arange(60, dtype=torch.float32)[:, None].expand(60, 3))
    controller = dynamix.Controller("static", 15, interval=1, micro_batch=12)
    job = Training(controller, data, nn.Linear(3, 1), sampling={"shuffle": False})
    for (x,) in itertools.islice(job.loader, 2):  # the pieces of one round
        with controller.piece():
            (job.model(x).sum() * 0).backward()
        job.finish(loss=x[:, 0].mean())
    assert controller.metrics()["loss"] == pytest.approx(7.0)
