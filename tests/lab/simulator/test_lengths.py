"""Simulated jobs that know what samples cost: their rounds are cut as real ones, and policies compare times by cost."""

from __future__ import annotations

import numpy as np
import pytest

from dynamix.data.lengths import SampleCosts
from dynamix.model import JobModel
from dynamix.policies import make_policy
from dynamix.policies.proportional import speeds
from dynamix.window import Bounds, Window
from dynamix_lab.simulator import ClusterEnv, sample_family, with_lengths
from dynamix_lab.simulator.compute import costs_when_cut


@pytest.mark.parametrize(("workers", "share", "sigma"), [(8, 32, 0.5), (32, 32, 1.0), (64, 64, 0.5)])
def test_rounds_are_cut_as_a_sampler_cuts_them(workers: int, share: int, sigma: float) -> None:
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(-(sigma**2) / 2, sigma, 100_000))
    costs, shares = SampleCosts(lengths, 100_000), rng.integers(share // 2, 2 * share, workers)
    low, high = np.ones(workers, dtype=np.int64), np.full(workers, 10**6)
    real = np.array([costs.cut(rng.integers(0, 100_000, shares.sum()), shares, low, high).work for _ in range(150)])
    batch = np.broadcast_to(shares, (600, workers))
    drawn = costs_when_cut(batch, np.full((600, 1), sigma), rng.normal(size=batch.shape), rng.random(batch.shape))
    slowest = [float((work / shares).max(1).mean()) for work in (real, drawn)]
    spread = [float((work / shares).std(0).mean()) for work in (real, drawn)]
    assert slowest[1] - 1 == pytest.approx(slowest[0] - 1, rel=0.25)
    assert spread[1] == pytest.approx(spread[0], rel=0.25)
    assert drawn.sum(1).mean() == pytest.approx(shares.sum(), rel=0.02)


def test_idle_workers_have_no_work() -> None:
    drawn = costs_when_cut(np.array([[8, 0, 8, 0]]), np.array([[1.0]]), np.zeros((1, 4)), np.full((1, 4), 0.9))
    assert (drawn[0, [1, 3]] == 0).all()
    assert (drawn[0, [0, 2]] > 0).all()


def test_windows_know_the_work_only_where_lengths_are_given() -> None:
    clusters = sample_family("data-dependent", 6, 8, 0)
    plain, told = ClusterEnv(clusters, seed=1).reset(), ClusterEnv(with_lengths(clusters), seed=1).reset()
    assert np.isnan(plain.work).all()
    assert (told.work > 0).all()
    assert told.work.sum(-1) == pytest.approx(told.batch_size.sum(-1), rel=0.2)
    assert (np.sort(told.wait.mean(-1)) < np.sort(plain.wait.mean(-1)) + 1e-9).mean() > 0.5


def test_long_samples_do_not_make_a_worker_slow() -> None:
    sizes, work = np.array([40, 40]), np.array([60.0, 20.0])
    window = Window.of(sizes, compute=1e-2 * work, compute_std=1e-4, wait=0.0, steps=5, step=5, work=work)
    assert speeds(window) == pytest.approx([100.0, 100.0])
    told, blind = (JobModel().update(each) for each in (window, Window.from_dict({**window.to_dict(), "work": None})))
    assert told.costs.beta[0] / told.costs.beta[1] == pytest.approx(1.0, abs=0.35)
    assert blind.costs.beta[0] / blind.costs.beta[1] > 2.5
    for name in ("lb_bsp", "dbs", "goodput", "cannikin", "dynamix", "stigmergic"):
        answer = make_policy(name).decide(window, Bounds.of(2, 1, 80, total_low=80, total_high=80))
        assert answer[0] / answer[1] == pytest.approx(1.0, abs=0.35), name


def test_fixed_costs_are_told_by_the_work_that_was_done() -> None:
    model = JobModel()
    for step in range(1, 30):
        work = np.array([20.0, 60.0]) if step % 2 else np.array([60.0, 20.0])
        seconds = 0.3 + 0.01 * work
        model = model.update(
            Window.of([40, 40], compute=seconds, compute_std=1e-3, wait=0.0, steps=5, step=step, work=work)
        )
    assert model.costs.alpha == pytest.approx([0.3, 0.3], rel=0.15)
    assert model.costs.beta == pytest.approx([0.01, 0.01], rel=0.15)
