"""Families of calibrated clusters: what holds in each, that references are good, and that no policy can cheat."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.policies.static import Static
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix_lab.simulator import (
    BREAKING,
    CONFORMING,
    FAMILIES,
    ClusterEnv,
    Clusters,
    Generalisation,
    HedgedReference,
    LaggedReference,
    SlowdownTrace,
    interior_share,
    rollout,
    rollout_path,
    sample_clusters,
    sample_family,
)
from dynamix_lab.simulator.compute import costs_of_samples
from dynamix_lab.training.evaluation import times_to_progress
from tests.refused import refused


def steady(family: str, count: int, workers: int, seed: int, **changed: Any) -> Clusters:
    """Clusters of a family without jitter."""
    quiet = {"jitter_sd": np.zeros((count, workers)), "jitter_s": None, "together_sd": None}
    return dataclasses.replace(sample_family(family, count, workers, seed), **{**quiet, **changed})


def test_half_of_the_held_out_families_break_an_assumption() -> None:
    assert len(BREAKING) == len(CONFORMING)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("workers", [1, 4, 9])
def test_every_family_runs_is_finite_and_repeats(family: str, workers: int) -> None:
    clusters = sample_family(family, 5, workers, 3)
    runs = []
    for _ in range(2):
        env = ClusterEnv(clusters, seed=1)
        *_, window = rollout(LaggedReference(env), env, 8)
        assert np.isfinite(env.clock_s).all()
        assert (env.progress > 0).all()
        assert (window.batch_size <= env.bounds.high).all()
        runs.append(window.to_dict())
    assert runs[0] == runs[1]
    assert clusters.take([2]).shape == (1, workers)


@pytest.mark.parametrize("family", FAMILIES)
def test_optima_are_mostly_interior(family: str) -> None:
    env = ClusterEnv(sample_family(family, 60, 8, 5), seed=0)
    windows = rollout(LaggedReference(env), env, 15)
    shares = [interior_share(window.batch_size, env.clusters).mean() for window in windows]
    assert np.mean(shares[1:]) > 0.5


def _stairs(family: str, workers: int = 8) -> Floats:
    """Factors (T, C, W) at every half second of ten minutes."""
    stairs = sample_family(family, 12, workers, 0).stairs
    return np.array([stairs.at(np.full(12, t)) for t in np.arange(0.0, 600.0, 0.5)])


def test_rotating_neighbours_visit_every_worker_in_turn() -> None:
    slowed = _stairs("rotating-neighbours") > 1
    assert (slowed.sum(-1) == 2).all()  # eight workers have two neighbours
    assert slowed.any(0).all()


def test_periodic_neighbours_come_back_after_the_same_time() -> None:
    clusters = sample_family("periodic-neighbours", 12, 8, 0)
    stairs = clusters.stairs
    period = float(stairs.repeat_s[3, 5])
    for t in np.linspace(0, period, 50):
        assert stairs.at(np.full(12, t))[3, 5] == stairs.at(np.full(12, t + 4 * period))[3, 5]
    on = (_stairs("periodic-neighbours") > 1).mean(0)
    assert (on.max(-1) > 0.1).all()  # somebody is disturbed in every cluster
    assert (on < 0.8).all()


def test_throttled_workers_slow_down_slowly_and_recover() -> None:
    factors = _stairs("throttling")
    up, down = np.diff(factors, axis=0).max(0), -np.diff(factors, axis=0).min(0)
    hot = factors.max(0) > 1
    assert hot.any(-1).all()
    assert (up[hot] < down[hot]).all()
    assert factors[:, hot].min(0) == pytest.approx(1)


def test_warm_workers_stay_warm() -> None:
    factors = _stairs("warm-up")
    assert (factors[0] > 1.4).all()
    assert (np.diff(factors, axis=0) <= 0).all()
    assert factors[-1] == pytest.approx(1)


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


def test_unlike_samples_spread_large_batches_less() -> None:
    env = ClusterEnv(steady("data-dependent", 4, 4, 0, alpha=np.zeros((4, 4))), seed=0)
    spread = []
    for size in (4, 64):
        env.apply(np.full((4, 4), size))
        seconds = np.array([env.advance()[0] for _ in range(500)])
        spread.append((seconds.std(0) / seconds.mean(0)).mean())
    assert spread[0] / spread[1] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("field", ["compute", "noise"])
def test_longer_windows_measure_better(field: str) -> None:
    def error(interval: int) -> float:
        known = {"missing_times": None, "slow_off_s": np.full((40, 8), 1e12), "missing_noise": np.zeros(40, bool)}
        flat = {"noise_knots": None, "noise_growth": np.zeros(40), "noise_rho": None}
        clusters = steady("poor-probes", 40, 8, 0, **known, **flat)
        env = ClusterEnv(clusters, seed=0, interval=interval)
        windows = [env.step(env.batch) for _ in range(40)]
        logs = np.log([getattr(window, field) for window in windows])
        return float(np.diff(logs, axis=0).std())

    # A window four times as long has four times the steps, and four times the norms behind an estimate of phi, which
    # is smoothed from window to window.
    assert error(20) / error(5) == pytest.approx(0.5, rel=0.1)


def test_an_unknown_family_names_the_known() -> None:
    refused(ConfigError, "pai-steady", sample_family, "nonsense", 1, 1, 0)


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


def test_changing_sizes_costs_the_first_step_and_keeping_them_nothing() -> None:
    clusters = sample_family("affine-quiet", 4, 4, 0)
    free = sample_family("affine-quiet", 4, 4, 0)
    object.__setattr__(free, "change_cost_s", None)
    dear_env, free_env = ClusterEnv(clusters, seed=0), ClusterEnv(free, seed=0)
    sizes = dear_env.batch // 2 + 1
    for env in (dear_env, free_env):
        env.step(env.batch)
    np.testing.assert_array_equal(dear_env.clock_s, free_env.clock_s)
    for _ in range(2):
        for env in (dear_env, free_env):
            env.step(sizes)
    assert clusters.change_cost_s is not None
    np.testing.assert_allclose(dear_env.clock_s - free_env.clock_s, clusters.change_cost_s)


def test_without_a_rule_for_the_learning_rate_progress_follows_the_measured_curve() -> None:
    clusters = sample_family("affine-quiet", 3, 4, 0)
    refused(ConfigError, "adascale", ClusterEnv, clusters, seed=0, lr_rule="cosine")
    env = ClusterEnv(clusters, seed=0, lr_rule="none")
    large = 4.0 * env.batch.sum(-1)
    assert (env.gain(large) < ClusterEnv(clusters, seed=0).gain(large)).all()  # it promises less of large batches


def test_accuracy_grows_with_progress_and_large_batches_pay_the_named_penalty() -> None:
    clusters = sample_family("affine-quiet", 4, 4, 0)
    model, reached = Generalisation(free=1.0, per_octave=0.001), {}
    for factor in (1.0, 4.0):
        env = ClusterEnv(clusters, seed=0)
        sizes, told = project(factor * env.batch, env.bounds), []
        for _ in range(20):
            env.step(sizes)
            told.append(env.accuracy(model))
        early, *_, reached[factor] = told
        if factor == 1.0:
            assert (reached[factor] > early).all()
    without = Generalisation(free=1e9)
    assert (env.accuracy(without) >= reached[4.0]).all()
    assert (env.accuracy(without) > reached[4.0]).any()


def test_ten_thousand_workers_run() -> None:
    env = ClusterEnv(sample_family("affine-slowdowns", 1, 10_000, 0), seed=0)
    window = env.step(env.reset().batch_size)
    assert window.workers == 10_000


# ---------------------------------------------------------------- references


def _rate(env: ClusterEnv, policy: LaggedReference, windows: int) -> float:
    seconds, progress = rollout_path(policy, env, windows)[-1]
    return float(np.exp(np.log(progress / seconds).mean()))


def test_hedging_is_faster_where_all_workers_would_be_critical() -> None:
    rates = []
    for reference in (HedgedReference, LaggedReference):
        env = ClusterEnv(sample_family("co-location", 16, 64, 1), seed=1)
        rates.append(_rate(env, reference(env), 25))
    assert rates[0] > 1.02 * rates[1]


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
@pytest.mark.parametrize("family", ["affine-slowdowns", "pai-straggler"])
def test_a_policy_gains_less_than_one_per_cent_by(trick: str, every: int, change: float, family: str) -> None:
    factories = {"lagged": LaggedReference, "altered": lambda env: Altered(env, every, change)}
    factories["static"] = lambda _: Static()
    times = times_to_progress(factories, sample_family(family, 40, 4, 11), seed=5, windows=40, interval=5, delay=1)
    gain = float(np.exp(np.log(times["lagged"] / times["altered"]).mean())) - 1
    assert gain < 0.01, trick


def test_the_older_broad_family_is_unchanged_by_the_calibrated_ones() -> None:
    clusters = sample_clusters(3, 4, 0)
    env = ClusterEnv(dataclasses.replace(clusters, decision_s=None), seed=1)
    env.step(env.reset().batch_size, np.full(3, 6))
    assert clusters.curve is None
    assert env.clock_s.tolist() == pytest.approx(GOLDEN)


GOLDEN = [5.533597132961637, 8.233116056988678, 1.0274982427132375]
