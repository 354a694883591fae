"""How sure a job model says it is: quantiles hold what they promise on simulated clusters, and say what is unknown."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dynamix.model import JobModel
from dynamix.model.measured import step_seconds
from dynamix.window import Floats, Window
from dynamix_lab.simulator import ClusterEnv, Clusters, sample_clusters
from tests.model.test_jobmodel import affine, known

WINDOWS = 20


def calm(count: int, workers: int) -> Clusters:
    """Clusters whose speeds stay: what they will take is what they take now."""
    clusters = sample_clusters(count, workers, seed=5)
    shape = clusters.shape
    still = {"slow_off_s": np.full(shape, 1e9), "neighbour_factor": np.ones(count)}
    return dataclasses.replace(clusters, **still)  # type: ignore[arg-type]


def learned(clusters: Clusters, *, moved: bool) -> JobModel:
    """After a few windows, of one allocation or of many."""
    env, rng = ClusterEnv(clusters, seed=3), np.random.default_rng(0)
    window = env.reset()
    even, model = window.batch_size.copy(), JobModel().update(window)
    for _ in range(WINDOWS):
        scale = np.exp(rng.normal(0, 0.3, even.shape)) if moved else 1.0
        model = model.update(env.step(np.maximum(np.rint(even * scale), 1).astype(np.int64)))
    return model


def taken(clusters: Clusters, sizes: Floats) -> Floats:
    """Seconds (C,) of a step with `sizes`, over many steps."""
    env = ClusterEnv(clusters, seed=99)
    env.reset()
    return np.asarray(np.mean([step_seconds(env.step(sizes.astype(np.int64))) for _ in range(5)], 0))


@pytest.mark.parametrize("moved", [True, False])
def test_quantiles_hold_what_they_promise(moved: bool) -> None:
    clusters = calm(80, 4)
    model = learned(clusters, moved=moved)
    even = np.broadcast_to((clusters.base_batch // 4)[:, None], clusters.shape).astype(float)
    for sizes in (even, 2 * even):
        truth = taken(clusters, sizes)
        below = {q: float(np.mean(truth < model.step_s(sizes, quantile=q))) for q in (0.1, 0.5, 0.9)}
        if moved or sizes is even:
            assert all(abs(share - q) < 0.17 for q, share in below.items()), below
        else:  # nothing was measured of other sizes: at least as wide as it says
            assert below[0.1] < 0.14
            assert below[0.9] > 0.86
            assert 0.3 < below[0.5] < 0.75
        gain = 2 * taken(clusters, even) / taken(clusters, 2 * even)
        inside = (model.speedup(2 * even, beside=even, quantile=0.05) < gain) & (
            gain < model.speedup(2 * even, beside=even, quantile=0.95)
        )
        assert inside.mean() > 0.8


def test_one_size_is_no_ground_and_the_range_says_so() -> None:
    alpha, beta = np.array([0.1, 0.1]), np.array([1e-3, 4e-3])
    unmoved = JobModel()
    for step in range(1, 9):
        unmoved = unmoved.update(affine([64, 64], alpha, beta, step=5.0 * step))
    moved = known(alpha, beta)
    assert (bool(unmoved.grounded), bool(moved.grounded)) == (False, True)
    sizes = np.array([96, 32])
    narrow, wide = (
        float(model.speedup(sizes, quantile=0.9) - model.speedup(sizes, quantile=0.1)) for model in (moved, unmoved)
    )
    assert wide > 1.5 * narrow
    truth = (0.1 + 4e-3 * 64 + 0.1) / (0.1 + 4e-3 * 32 + 0.1)  # the exchange hides nothing
    for model in (moved, unmoved):
        low, high = (float(model.speedup(sizes, quantile=quantile)) for quantile in (0.02, 0.98))
        assert 0.98 * low < truth < 1.02 * high
    assert abs(float(moved.speedup(sizes)) / truth - 1) < 0.05


def test_a_speedup_is_of_the_same_worlds_on_both_sides() -> None:
    model = known([0.1, 0.2], [1e-3, 2e-3])
    for quantile in (0.01, 0.5, 0.99):
        assert float(model.speedup(model.sizes, quantile=quantile)) == pytest.approx(1.0, abs=1e-12)
    low, middle, high = (float(model.step_s(model.sizes, quantile=q)) for q in (0.1, 0.5, 0.9))
    assert low < middle < high
    assert middle == pytest.approx(float(model.step_s(model.sizes)), rel=0.03)


def test_what_was_never_measured_is_nan() -> None:
    model = JobModel().update(Window.of([32, 32]))
    assert np.isnan(model.step_s([16, 48], quantile=0.5))
    assert np.isnan(model.speedup([16, 48]))
    assert not bool(model.grounded)
    unmeasured_exchange = JobModel().update(Window.of([32, 32], compute=[0.1, 0.2]))
    assert float(unmeasured_exchange.step_s([32, 32], quantile=0.5)) == pytest.approx(0.2, rel=0.05)
