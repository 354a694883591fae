"""Noise scale, model averaging, DBS's convergence claim, the public `weighted` hook."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.runtime.measure.pairs import ConsecutiveNoise
from tests.ranks import refusal, run_cases, run_ranks

DIMENSION, SIGNAL = 400, 0.3  # |G|^2 and tr(Sigma) of the quadratic's gradient noise are known
TRACE = 2.0 * DIMENSION


def _measurements(sizes: np.ndarray, repeats: int, seed: int) -> np.ndarray:
    """(repeats, 2): estimates (S, G2) from Gaussian gradients with known mean and covariance."""
    random = np.random.default_rng(seed)
    mean = np.full(DIMENSION, np.sqrt(SIGNAL / DIMENSION))
    found = []
    for _ in range(repeats):
        g = mean + random.standard_normal((len(sizes), DIMENSION)) * np.sqrt(2.0 / sizes)[:, None]
        whole = (sizes[:, None] * g).sum(0) / sizes.sum()
        found.append(NoiseScale.estimate((g**2).sum(1), float((whole**2).sum()), sizes.astype(float)))
    return np.array(found)


@pytest.mark.parametrize("sizes", [[8, 8], [3, 40], [5, 9, 1, 30], [64] * 8])
def test_noise_scale_is_unbiased_for_any_split(sizes: list[int]) -> None:
    found = _measurements(np.array(sizes), 3000, seed=1)
    error = found.std(0) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(0) - [TRACE, SIGNAL]) < 4 * error)


def _cannikin(sizes: np.ndarray, local_sq: np.ndarray, global_sq: float) -> tuple[float, float]:
    """Inverse-covariance weighting of per-worker estimates (arXiv 2402.05302)."""
    b, total = sizes.astype(float), float(sizes.sum())
    g2 = (total * global_sq - b * local_sq) / (total - b)
    s = (local_sq - global_sq) / (1 / b - 1 / total)
    i, j = np.meshgrid(b, b, indexing="ij")
    a_g = (total**2 - i**2 - j**2) / (total * (total - i) * (total - j))
    np.fill_diagonal(a_g, (total + 2 * b) / (total**2 - total * b))
    a_s = i * j * (total - i - j) / ((total - i) * (total - j))
    np.fill_diagonal(a_s, total * b / (total - b))
    weights = [np.linalg.pinv(a) @ np.ones(len(b)) for a in (a_s, a_g)]
    return float(weights[0] @ s / weights[0].sum()), float(weights[1] @ g2 / weights[1].sum())


def test_pooled_estimate_varies_no_more_than_cannikins() -> None:
    sizes, random = np.array([4, 9, 30, 64]), np.random.default_rng(5)
    pooled, other = [], []
    for _ in range(2000):
        g = 0.05 + random.standard_normal((4, DIMENSION)) * np.sqrt(2.0 / sizes)[:, None]
        local, whole = (g**2).sum(1), float((((sizes[:, None] * g).sum(0) / sizes.sum()) ** 2).sum())
        pooled.append(NoiseScale.estimate(local, whole, sizes.astype(float)))
        other.append(_cannikin(sizes, local, whole))
    assert np.all(np.std(pooled, axis=0) < 1.02 * np.std(other, axis=0))


@given(st.lists(st.integers(0, 64), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_noise_scale_needs_two_active_workers(sizes: list[int]) -> None:
    noise, signal = NoiseScale.estimate(np.ones(len(sizes)), 0.5, np.array(sizes, dtype=float))
    active = sum(1 for size in sizes if size)
    assert np.isnan(noise) == (active < 2)
    assert np.isnan(signal) == (active < 2)


def test_single_worker_noise_from_consecutive_gradients() -> None:
    random, pairs, found = np.random.default_rng(2), ConsecutiveNoise(), []
    mean = np.full(DIMENSION, np.sqrt(SIGNAL / DIMENSION))
    for _ in range(3000):
        g = torch.from_numpy(mean + random.standard_normal(DIMENSION) * np.sqrt(2.0 / 16))
        pair = pairs.observe([g], 16.0)
        if pair is not None:
            found.append([float(v) for v in pair])
    error = np.std(found, axis=0) / np.sqrt(len(found))
    assert len(found) == 1500
    assert np.all(np.abs(np.mean(found, axis=0) - [TRACE, SIGNAL]) < 4 * error)


def _quadratic(adversarial: bool) -> list[float]:
    """Weighted SGD on a strongly convex quadratic, curvature 1 to 10, with bounded shares chosen against it."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    curvature = torch.linspace(1, 10, 20)
    net = nn.Linear(20, 1, bias=False)
    nn.init.constant_(net.weight, 3.0)
    n = [16, 16, 16, 16]
    model = DDP(net)
    model.register_comm_hook(None, dynamix.weighted(allreduce_hook, count=lambda: (n[rank], sum(n))))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    distances = []
    for step in range(300):
        if adversarial:  # the largest share to another worker every step, bounds 2 to 58
            n[:] = [2, 2, 2, 2]
            n[(step * 7) % 4] = 58
        noise = torch.randn(n[rank], 20, generator=generator)
        loss = (0.5 * curvature * net.weight**2).sum() + (noise.mean(0) * net.weight).sum()
        (model(torch.zeros(1, 20)).sum() * 0 + loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        distances.append(float(net.weight.detach().square().sum()))
    return distances


@pytest.mark.multiproc
def test_dbs_converges_at_the_rate_of_synchronous_sgd() -> None:
    equal, adversarial = (ranks[0] for ranks in run_cases(_quadratic, 4, [False, True]))
    rate = [np.log(d[0] / d[40]) for d in (equal, adversarial)]
    assert rate[1] > 0.95 * rate[0]
    assert np.mean(adversarial[200:]) < 1.3 * np.mean(equal[200:])


def _average(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))
    net.register_buffer("columns", torch.arange(12.0).view(4, 3)[:, 1] * (rank + 1))  # a view
    whole = nn.Linear(4, 3)
    whole.load_state_dict(net[0].state_dict())
    counts = [40, 0, 20]
    mine = x[sum(counts[:rank]) : sum(counts[: rank + 1])]
    with torch.no_grad():
        net[1].running_mean.fill_(float(rank))
    if counts[rank]:
        net[0](mine).square().mean().backward()
        with torch.no_grad():
            net[0].weight -= 0.1 * net[0].weight.grad
    else:
        with torch.no_grad():
            net[0].weight.fill_(float("nan"))  # whatever an idle worker holds must not matter
    dynamix.weighted_average(net, counts[rank])
    whole(x).square().mean().backward()
    want = whole.weight.detach() - 0.1 * whole.weight.grad
    wrong: list[tuple[int, type[Exception]]] = [(-1, ConfigError), (0, UsageError)]
    said = [refusal(error, dynamix.weighted_average, nn.Linear(2, 2), count) for count, error in wrong]
    buffers = [float(net[1].running_mean[0]), *net.get_buffer("columns").tolist()]
    return {"error": float((net[0].weight - want).abs().max()), "buffers": buffers, "said": said}


@pytest.mark.multiproc
def test_weighted_average_every_step_equals_the_weighted_gradient_and_needs_samples() -> None:
    for result in run_ranks(_average, 3):
        assert result["error"] < 1e-6
        columns = [v * (1 * 40 + 3 * 20) / 60 for v in (1.0, 4.0, 7.0, 10.0)]
        assert result["buffers"] == pytest.approx([(0 * 40 + 2 * 20) / 60, *columns])
        assert "count=-1" in result["said"][0]
        assert "no worker has trained on a sample" in result["said"][1]


KINDS = [torch.int16, torch.uint16, torch.uint32, torch.uint64]  # that gloo does not know
EIGHTS = [torch.float8_e4m3fn, torch.float8_e5m2]


def _with_buffers(kinds: list[torch.dtype], rank: int) -> nn.Module:
    net = nn.Linear(2, 1)
    for kind in kinds:
        values = [2**63 + 5, 3, 2**64 - 1] if kind == torch.uint64 else [4, 3, 5]
        net.register_buffer(str(kind)[6:], torch.tensor(values[rank:] + values[:rank], dtype=kind))
    return net


def _exchanged(rank: int) -> list[Any]:
    """For each way and list of types whether it is taken, and whether the first rank's buffers arrived to the bit."""
    told: list[Any] = []
    for meet, norm in (("gradients", "rank0"), ("gradients", "weighted"), ("parameters", "rank0"), ("auto", "rank0")):
        for kinds in (KINDS, EIGHTS):
            model = DDP(_with_buffers(kinds, rank), init_sync=False).eval()
            controller, steps = dynamix.Controller("static", 4, meet=meet), torch.optim.SGD(model.parameters(), lr=0.1)
            told.append(refusal(UsageError, controller.wrap, model, steps, batchnorm=norm))
            if told[-1] == "accepted":
                model(torch.ones(4, 2))
                pairs = zip(model.buffers(), _with_buffers(kinds, 0).buffers(), strict=True)
                assert all(torch.equal(own.view(torch.uint8), first.view(torch.uint8)) for own, first in pairs)
            controller.close()
    dynamix.weighted_average(net := _with_buffers(KINDS, rank), 1)
    assert [b.tolist() for b in net.buffers()] == [*[[4, 5, 5]] * 3, [2**63 + 5, 2**64 - 1, 2**64 - 1]]
    return [*told, refusal(UsageError, dynamix.weighted_average, _with_buffers(EIGHTS, rank), 1)]


@pytest.mark.multiproc
def test_buffers_of_types_that_gloo_does_not_know_travel_to_the_bit_or_are_refused_by_name() -> None:
    for told in run_ranks(_exchanged, 2):
        assert [told[at] for at in (0, 1, 2, 4, 6)] == ["accepted"] * 5
        assert all("float8_e4m3fn, of which workers cannot take the mean" in told[at] for at in (3, 5, 7, 8))
