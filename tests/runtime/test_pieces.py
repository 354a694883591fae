"""Unequal numbers of equal pieces: what every optimizer step applies is the gradient of the union batch."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.data.plan import pieces_of
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.runtime.measure.recorder import NORMS_EVERY
from tests.ranks import run_ranks
from tests.union import Case, Script, larger, worst_error

SHARES = {1: [[8], [5]], 2: [[32, 4], [9, 27]], 3: [[32, 4, 0], [8, 5, 23]], 4: [[32, 4, 16, 1], [3, 40, 2, 9]]}


@pytest.mark.parametrize("weighting", ["hook", "loss"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_applied_gradient_is_the_unions(workers: int, weighting: str) -> None:
    case = Case(SHARES[workers], micro_batch=4, weighting=weighting, samples=331, min_batch_size=0)
    assert max(run_ranks(worst_error, workers, case)) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"ddp": {"gradient_as_bucket_view": True}},
        {"ddp": {"find_unused_parameters": True}, "model": "headless"},
        {"ddp": {"static_graph": True}, "warm_up": True},
        {"model": "embedded"},
        {"model": "checkpointed"},
        {"num_workers": 4, "prefetch_factor": 4},
        {"hook": "allreduce", "dtype": torch.float32, "tolerance": 1e-6},
        {"hook": "powersgd", "dtype": torch.float32, "tolerance": 1e-5, "epochs": 4},
        {"hook": "fp16_compress", "dtype": torch.float32, "tolerance": 3e-3},
    ],
    ids=lambda options: "-".join(str(options.get(name)) for name in ("ddp", "model", "hook") if name in options),
)
def test_with_options_of_ddp_and_hooks(options: dict[str, Any]) -> None:
    tolerance = options.pop("tolerance", 1e-12)
    case = Case(SHARES[2], micro_batch=4, samples=331, **options)
    assert max(run_ranks(worst_error, 2, case)) < tolerance


def _buffers(rank: int) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.0))  # which leaves its statistics as they are
    torch.nn.init.constant_(net[1].get_buffer("running_var"), 5.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = dynamix.Controller(
        Script([[32, 4], [9, 27]]), 8, max_batch_size=64, interval=2, micro_batch=4, global_batch="adaptive"
    )
    data = TensorDataset(torch.randn(200, 3))
    loader = DataLoader(data, batch_sampler=controller.batch_sampler(data))
    model = controller.wrap(DDP(net), optimizer, batchnorm="weighted")
    for (x,) in loader:
        with controller.piece():
            model(x).square().mean().backward()
        if controller.optimizer_due:
            optimizer.step()
            optimizer.zero_grad()
        controller.step()
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
    controller = dynamix.Controller(
        Script([[30], [17]]), 30, max_batch_size=64, interval=2, micro_batch=8, global_batch="adaptive"
    )
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


def _tokens(rank: int) -> float:
    """Each sample carries its own weight; the union's gradient is known."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(211, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    weights = torch.rand(211, dtype=torch.float64, generator=generator) * 9 + 1
    net = nn.Linear(5, 5).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    controller = dynamix.Controller(
        Script([[16, 3, 0], [2, 7, 13]]),
        8,
        min_batch_size=0,
        max_batch_size=32,
        interval=2,
        micro_batch=4,
        global_batch="adaptive",
    )
    data = TensorDataset(x, y, weights)
    sampler = controller.batch_sampler(data)
    model = controller.wrap(DDP(net), optimizer, weighting="loss")
    worst, order = 0.0, torch.randperm(211, generator=torch.Generator().manual_seed(0))
    for bx, by, bw in DataLoader(data, batch_sampler=sampler):
        plan = sampler.plan()
        with controller.piece():
            loss = ((model(bx) - by).square().mean(1) * bw).sum() / bw.sum()
            controller.weight(loss, count=float(bw.sum())).backward()
        if controller.optimizer_due:
            index = order[plan.start : plan.start + int(plan.counts.sum())]
            union = ((net(x[index]) - y[index]).square().mean(1) * weights[index]).sum() / weights[index].sum()
            for got, true in zip(net.parameters(), torch.autograd.grad(union, list(net.parameters())), strict=True):
                assert got.grad is not None
                worst = larger(worst, float((got.grad - true).abs().max()))
            optimizer.step()
            optimizer.zero_grad()
        controller.step(loss=loss)
    controller.close()
    return worst


def test_given_counts_weight_the_gradient() -> None:
    assert max(run_ranks(_tokens, 3)) < 1e-10


def _noise(rank: int, weighting: str) -> tuple[float, float]:
    """Noise scale over all windows as the job measures it, and from the ranks' whole gradients."""
    sizes, rounds = np.array([9, 3, 6]), 8 * NORMS_EVERY
    torch.manual_seed(0)
    x = torch.randn(rounds * int(sizes.sum()), 16, dtype=torch.float64)
    y = 0.25 * x[:, :8] + torch.randn(len(x), 8, dtype=torch.float64)
    net = nn.Linear(16, 8).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    controller = dynamix.Controller("static", 6, interval=2 * NORMS_EVERY, micro_batch=4, global_batch="adaptive")
    coordinator = controller._coordinator
    coordinator.allocations.reset(0, sizes)
    found: list[tuple[float, float]] = []
    scale = coordinator.job.noise_scale
    scale.update = lambda noise, signal: found.append((noise, signal))  # type: ignore[method-assign]
    loader = DataLoader(TensorDataset(x, y), batch_sampler=controller.batch_sampler(x))
    model = controller.wrap(DDP(net, bucket_cap_mb=2e-4), optimizer, weighting=weighting)
    true: list[tuple[float, float]] = []
    pieces: list[tuple[Tensor, Tensor]] = []
    for inputs, target in loader:
        pieces.append((inputs, target))
        with controller.piece():
            loss = F.mse_loss(model(inputs), target)
            (controller.weight(loss) if weighting == "loss" else loss).backward()
        if controller.optimizer_due:
            mine = F.mse_loss(net(torch.cat([p[0] for p in pieces])), torch.cat([p[1] for p in pieces]))
            own = torch.cat([g.flatten() for g in torch.autograd.grad(mine, list(net.parameters()))])
            union = own * (sizes[rank] / sizes.sum())
            dist.all_reduce(union)
            squares = [torch.zeros((), dtype=torch.float64) for _ in sizes]
            dist.all_gather(squares, own.square().sum())
            if coordinator.progress.steps % NORMS_EVERY == 0:
                local = np.array([float(square) for square in squares])
                true.append(NoiseScale.estimate(local, float(union.square().sum()), sizes.astype(np.float64)))
            pieces = []
            optimizer.step()
            optimizer.zero_grad()
        controller.step(loss=loss)
    controller.close()
    if rank:
        return 1.0, 1.0
    measured, exact = (np.mean(pairs, axis=0) for pairs in (found, true))
    return float(measured[0] / measured[1]), float(exact[0] / exact[1])


@pytest.mark.parametrize("weighting", ["hook", "loss"])
def test_the_noise_scale_is_that_of_whole_shares(weighting: str) -> None:
    measured, exact = run_ranks(_noise, 3, weighting)[0]
    assert measured == pytest.approx(exact, rel=1e-6)


def test_find_limits_bounds_the_piece_and_not_the_share() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = dynamix.Controller("static", 32, micro_batch=16, global_batch="adaptive")
    model = controller.wrap(net, optimizer)
    high = controller.bounds.high.tolist()

    def step(batch: Tensor) -> None:
        if len(batch) > 10:
            raise torch.OutOfMemoryError
        model(batch).sum().backward()

    (cap,) = controller.find_limits(step, torch.randn(4, 3), margin=0.0)
    assert 5 <= cap <= 10
    assert controller.bounds.high.tolist() == high
    data = TensorDataset(torch.randn(256, 3))
    sizes = [len(x) for (x,) in DataLoader(data, batch_sampler=controller.batch_sampler(data))]
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
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    controller = dynamix.Controller("static", 15, interval=1, micro_batch=12)
    data = TensorDataset(torch.arange(60, dtype=torch.float32)[:, None].expand(60, 3))
    model = controller.wrap(net, optimizer)
    for (x,) in DataLoader(data, batch_sampler=controller.batch_sampler(data, shuffle=False)):
        with controller.piece():
            (model(x).sum() * 0).backward()
        if controller.optimizer_due:
            optimizer.step()
        due = controller.optimizer_due
        controller.step(loss=x[:, 0].mean())
        if due:
            break
    assert controller.metrics()["loss"] == pytest.approx(7.0)
