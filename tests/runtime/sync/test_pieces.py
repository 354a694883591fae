"""Unequal numbers of equal pieces: what every optimizer step applies is the gradient of the union batch."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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


def _alone(limit: float, *, with_piece: bool, models: int) -> list[float]:
    """The norm of every applied gradient over that of the union batch's, of all models, for one worker."""
    torch.manual_seed(0)
    x, y = torch.randn(200, 6, dtype=torch.float64), torch.randn(200, 6, dtype=torch.float64)
    controller = adaptive(Script([[30], [17]]), 30, max_batch_size=64, micro_batch=8)
    data = TensorDataset(x, y)
    sampler = controller.batch_sampler(data, shuffle=False)
    nets = [nn.Linear(6, 6).double() for _ in range(models)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        controller.wrap(net, optimizer)
    ratios = []
    for inputs, target in DataLoader(data, batch_sampler=sampler):
        plan, due = sampler.plan(), controller.optimizer_due
        union = slice(plan.start, plan.start + plan.samples)
        for net, optimizer in zip(nets, optimizers, strict=True):  # each in passes of its own
            with controller.piece() if with_piece else contextlib.nullcontext():
                F.mse_loss(net(inputs), target).backward()
            if due:
                true = torch.autograd.grad(F.mse_loss(net(x[union]), y[union]), list(net.parameters()))
                norm = torch.nn.utils.get_total_norm(true)
                if with_piece:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), limit)
                    norm = norm.clamp(max=limit)
                optimizer.step()
                gradients = [p.grad for p in net.parameters() if p.grad is not None]
                ratios.append(float(torch.nn.utils.get_total_norm(gradients) / norm))
                optimizer.zero_grad()
        controller.step()
    controller.close()
    return ratios


@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("limit", [1e9, 1e-2])
def test_a_worker_alone_clips_and_applies_whole_gradients_of_every_model(limit: float, models: int) -> None:
    for with_piece in (True, False):
        for ratio in _alone(limit, with_piece=with_piece, models=models):
            assert ratio == pytest.approx(1.0, rel=1e-3)  # clipping adds 1e-6 to the norm


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


def test_shares_of_whole_pieces_have_one_shape_until_the_tail() -> None:
    data = TensorDataset(torch.randn(331, 3))
    for batch_size, shapes in ((64, {8}), (30, {8, 4, 2})):
        controller = dynamix.Controller("lb_bsp", batch_size, micro_batch=8)
        sampler = controller.batch_sampler(data)
        seen = set()
        for batch in sampler:
            if sampler.plan().regular:
                seen.add(len(batch))
            sampler.consume()
        assert seen == shapes


def test_what_is_observed_is_averaged_by_samples() -> None:
    data = TensorDataset(torch.arange(60, dtype=torch.float32)[:, None].expand(60, 3))
    controller = dynamix.Controller("static", 15, interval=1, micro_batch=12)
    job = Training(controller, data, nn.Linear(3, 1), sampling={"shuffle": False})
    for (x,) in itertools.islice(job.loader, 2):  # the pieces of one round
        with controller.piece():
            (job.model(x).sum() * 0).backward()
        job.finish(loss=x[:, 0].mean())
    assert controller.metrics()["loss"] == pytest.approx(7.0)
