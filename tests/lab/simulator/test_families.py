"""Calibrated figures and families of clusters: what holds in each, and that no policy can cheat."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.policies.static import Static
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix_lab.simulator import (
    FAMILIES,
    ClusterEnv,
    Clusters,
    LaggedReference,
    SlowdownTrace,
    calibration,
    interior_share,
    rollout,
    sample_clusters,
    sample_family,
)
from dynamix_lab.simulator.compute import Costs, costs_of_samples
from dynamix_lab.simulator.disturbances import Slowdowns
from dynamix_lab.training.evaluation import times_to_progress
from tests.refused import refused


def steady(family: str, count: int, workers: int, seed: int, **changed: Any) -> Clusters:
    """Clusters of a family without jitter."""
    quiet = {"jitter_sd": np.zeros((count, workers)), "jitter_s": None, "together_sd": None}
    return dataclasses.replace(sample_family(family, count, workers, seed), **{**quiet, **changed})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_repeats_and_has_mostly_interior_optima(family: str) -> None:
    clusters = sample_family(family, 20, 8, 5)
    runs = []
    for _ in range(2):
        env = ClusterEnv(clusters, seed=0)
        windows = list(rollout(LaggedReference(env), env, 10))
        assert np.isfinite(env.clock_s).all()
        assert (env.progress > 0).all()
        assert (windows[-1].batch_size <= env.bounds.high).all()
        shares = [interior_share(window.batch_size, env.clusters).mean() for window in windows]
        assert np.mean(shares[1:]) > 0.5
        runs.append(windows[-1].to_dict())
    assert runs[0] == runs[1]
    alone = ClusterEnv(sample_family(family, 2, 1, 3).take([1]), seed=1)
    assert np.isfinite(alone.step(alone.reset().batch_size).step).all()


def _stairs(family: str, workers: int = 8) -> Floats:
    """Factors (T, C, W) at every half second of ten minutes."""
    stairs = sample_family(family, 12, workers, 0).stairs
    return np.array([stairs.at(np.full(12, t)) for t in np.arange(0.0, 600.0, 0.5)])


def test_rotating_neighbours_visit_every_worker_in_turn() -> None:
    slowed = _stairs("rotating-neighbours") > 1
    assert (slowed.sum(-1) == 2).all()  # eight workers have two neighbours
    assert slowed.any(0).all()


def test_throttled_workers_slow_down_slowly_and_recover() -> None:
    factors = _stairs("throttling")
    up, down = np.diff(factors, axis=0).max(0), -np.diff(factors, axis=0).min(0)
    hot = factors.max(0) > 1
    assert hot.any(-1).all()
    assert (up[hot] < down[hot]).all()
    assert factors[:, hot].min(0) == pytest.approx(1)


def test_a_replaced_worker_is_waited_for_once_and_has_a_new_speed() -> None:
    factors = _stairs("replaced-worker")
    changed = factors[-1] != 1
    assert (changed.sum(-1) >= 1).all()
    assert (factors[:, ~changed] == 1).all()
    assert (factors[-1] < 2.6).all()
    clusters = sample_family("replaced-worker", 12, 8, 0)
    slow = clusters.costs.seconds(np.repeat(clusters.base_batch[:, None] / 8, 8, 1)) * (factors.max(0) - 1)
    assert slow.max(-1).min() > 2  # seconds that its loss lasts at least


def test_samples_of_unlike_cost_add_up_as_log_normal_ones_do() -> None:
    rng = np.random.default_rng(0)
    for batch, sigma in ((1, 1.0), (32, 1.0), (32, 0.5)):
        normal = rng.normal(size=(100_000, 1))
        drawn = costs_of_samples(np.full((100_000, 1), batch), np.full((100_000, 1), sigma), normal)
        summed = np.exp(rng.normal(-(sigma**2) / 2, sigma, (100_000, batch))).sum(-1)
        assert drawn.mean() == pytest.approx(batch, rel=0.02)
        assert drawn.std() == pytest.approx(summed.std(), rel=0.05)
        assert np.quantile(drawn, 0.95) == pytest.approx(np.quantile(summed, 0.95), rel=0.03)


def test_a_trace_slows_the_worker_it_names() -> None:
    clusters = dataclasses.replace(sample_family("affine-quiet", 2, 2, 0), jitter_s=None)
    env = ClusterEnv(clusters, seed=0, trace=SlowdownTrace(np.array([0.0]), np.array([[1.0, 5.0]])))
    plain = ClusterEnv(clusters, seed=0)
    np.testing.assert_allclose(env.advance()[0], plain.advance()[0] * [1.0, 5.0])
    with pytest.raises(ConfigError, match="workers"):
        ClusterEnv(
            sample_family("affine-quiet", 2, 3, 0), seed=0, trace=SlowdownTrace(np.array([0.0]), np.ones((1, 2)))
        )


def test_some_jitter_is_in_seconds_and_some_is_everybodys() -> None:
    quiet = steady("affine-quiet", 6, 8, 0)
    env = ClusterEnv(quiet, seed=0)
    undisturbed = env.advance()[0]
    slices = ClusterEnv(dataclasses.replace(quiet, jitter_s=0.01 * undisturbed), seed=0)
    seconds = np.array([slices.advance()[0] for _ in range(400)])
    np.testing.assert_allclose(seconds.std(0), 0.01 * undisturbed, rtol=0.2)
    slices.apply(slices.batch // 2)
    half = np.array([slices.advance()[0] for _ in range(400)])
    np.testing.assert_allclose(half.std(0), 0.01 * undisturbed, rtol=0.2)  # the same seconds of a shorter step
    waves = ClusterEnv(dataclasses.replace(quiet, together_sd=np.full(6, 0.1)), seed=0)
    log = np.log(np.array([waves.advance()[0] for _ in range(400)]))
    assert np.ptp(log - log[:, :, :1], axis=0).max() < 1e-9
    assert 0.05 < log.std(0).mean() < 0.15


def test_without_a_rule_for_the_learning_rate_progress_follows_the_measured_curve() -> None:
    clusters = sample_family("affine-quiet", 3, 4, 0)
    refused(ConfigError, "adascale", ClusterEnv, clusters, seed=0, lr_rule="cosine")
    env = ClusterEnv(clusters, seed=0, lr_rule="none")
    large = 4.0 * env.batch.sum(-1)
    assert (env.gain(large) < ClusterEnv(clusters, seed=0).gain(large)).all()  # it promises less of large batches


# ---------------------------------------------------------------- nothing to gain from the frame of windows


class Altered(LaggedReference):
    """The lagged reference with its answer changed in every `every`-th window."""

    def __init__(self, env: ClusterEnv, every: int, change: float) -> None:
        super().__init__(env)
        self.every, self.change, self.t = every, change, 0

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        self.t += 1
        sizes = super().decide(window, bounds)
        changed = np.clip((sizes * self.change).astype(np.int64), bounds.low, bounds.high)
        return changed if self.t % self.every == 0 else sizes


@pytest.mark.parametrize(
    ("trick", "every", "change"), [("splitting", 2, 0.8), ("lengthening", 1, 1.5), ("burning", 10, 0.05)]
)
def test_a_policy_gains_less_than_one_per_cent_by(trick: str, every: int, change: float) -> None:
    factories = {"lagged": LaggedReference, "altered": lambda env: Altered(env, every, change)}
    factories["static"] = lambda _: Static()
    times = times_to_progress(
        factories, sample_family("affine-slowdowns", 40, 4, 11), seed=5, windows=40, interval=5, delay=1
    )
    gain = float(np.exp(np.log(times["lagged"] / times["altered"]).mean())) - 1
    assert gain < 0.01, trick


def test_the_older_broad_family_is_unchanged_by_the_calibrated_ones() -> None:
    clusters = sample_clusters(3, 4, 0)
    env = ClusterEnv(dataclasses.replace(clusters, decision_s=None), seed=1)
    env.step(env.reset().batch_size, np.full(3, 6))
    assert clusters.curve is None
    assert env.clock_s.tolist() == pytest.approx(GOLDEN)


GOLDEN = [5.533597132961637, 8.233116056988678, 1.0274982427132375]


def test_shipped_figures_are_good_fits_and_grow_as_noise_does() -> None:
    models = calibration().affine_models()
    assert {"cifar10", "imagenet", "bert"} <= set(models)
    for fits in models.values():
        assert min(fit.r2 for fit in fits) >= 0.9
        assert len({fit.alpha_s for fit in fits}) == len(fits)
    for curve in calibration().noise.values():
        assert curve.rho > -0.1  # deepspeech2 and yolov3: no growth with the batch
        assert curve.knots[-1] > curve.knots[0]
    assert calibration().held_out["gavel"]["inside"]["mean_absolute"] < 0.11  # some of its jobs are not affine
    refused(ConfigError, "cifar10", calibration().of, "alexnet", "T4")
    refused(ConfigError, "A100", calibration().of, "bert", "H9000")


def test_a_curve_gives_the_measured_time_and_inverts() -> None:
    name = calibration().curve_names[0]
    fit = calibration().of(*name)
    costs = Costs(np.array([[fit.alpha_s]]), np.array([[fit.beta_s]]), np.array([[0]]))
    sizes = np.arange(1.0, fit.batch_max + 1)
    seconds = np.array([float(costs.seconds(np.array([[b]]))[0, 0]) for b in sizes])
    for budget in np.quantile(seconds, [0.3, 0.6, 0.9]):
        found = float(costs.within(np.array([[budget]]), np.ones((1, 1)), np.array([[float(fit.batch_max)]]))[0, 0, 0])
        largest = sizes[seconds <= budget].max()
        assert abs(found - largest) <= 1.6 + 0.03 * largest, (budget, found, largest)


def test_a_cliff_costs_nothing_before_it_and_more_than_its_share_after() -> None:
    costs = Costs(np.array([[0.01]]), np.array([[0.001]]), None, np.array([[64.0]]), np.array([[1.0]]))
    at, beyond = (float(costs.seconds(np.array([[b]]))[0, 0]) for b in (64.0, 128.0))
    assert at == pytest.approx(0.074)
    assert beyond == pytest.approx(2 * 0.138)


def test_workers_of_a_group_slow_down_together_and_others_do_not() -> None:
    group = np.array([[0, 0, 1, 1]])
    shape = (1, 4)
    process = Slowdowns(3, np.full(shape, 10.0), np.full(shape, 5.0), np.full(shape, 3.0), group=group)
    seen = np.array([process.at(np.array([t]))[0].copy() for t in np.arange(0, 200, 1.0)])
    np.testing.assert_array_equal(seen[:, 0], seen[:, 1])
    np.testing.assert_array_equal(seen[:, 2], seen[:, 3])
    assert (seen[:, 0] != seen[:, 2]).any()


TRACE = "time_s,0,1\n0,1,1\n10,2,1\n20,1,1.5\n"


def test_a_trace_is_replayed_by_wall_clock_and_its_last_row_holds(tmp_path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    trace = SlowdownTrace.load(tmp_path / "t.csv")
    assert trace.at(np.array([0.0, 9.9, 10.0, 25.0, 1e6])).tolist() == [[1, 1], [1, 1], [2, 1], [1, 1.5], [1, 1.5]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time_s,0,1\n0,1,1\n10,,1\n", ":3"),
        ("time_s,0,1\n0,1\n", "cells at"),
        ("time_s,0,1\n0,1,-1\n", "line 2"),
        ("time_s,0,1\n0,1,nan\n", "not finite"),
        ("time_s,0,1\n0,1,1\n5,1,1\n5,1,2\n", "line 4"),
        ("time_s,0,1\n3,1,1\n", "line 2"),
        ("0,1,1\n", "head"),
        ("", "head"),
    ],
)
def test_a_bad_trace_is_refused_with_the_line_that_is_wrong(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    refused(ConfigError, says, SlowdownTrace.load, path)
    refused(ConfigError, "can be read", SlowdownTrace.load, tmp_path / "none.csv")
