"""The simulator: paired worlds, what the decision's delay costs, and optima inside the bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.policies.proportional import LBBSP
from dynamix.policies.static import Static
from dynamix_lab.simulator import (
    ClusterEnv,
    LaggedReference,
    best_allocation,
    rollout_path,
    sample_clusters,
    sample_family,
)
from dynamix_lab.simulator.clusters import bounds_of
from dynamix_lab.simulator.compute import Costs
from dynamix_lab.simulator.disturbances import MovingNeighbour, Slowdowns
from dynamix_lab.simulator.measuring import RECENT, StepsTaken
from dynamix_lab.simulator.network import ring_all_reduce, step_time
from dynamix_lab.simulator.statistics import efficiency
from dynamix_lab.simulator.streams import RandomStream
from tests.refused import refused


def test_two_policies_meet_the_same_disturbances_at_the_same_wall_clock() -> None:
    clusters = sample_clusters(20, 4, 0)
    off, on = clusters.slow_off_s, clusters.slow_on_s
    one, other = (Slowdowns(5, off, on, clusters.slow_strongest) for _ in range(2))
    fine = [one.at(np.full(20, t)).copy() for t in np.arange(0, 60, 0.25)]
    coarse = [other.at(np.full(20, t)).copy() for t in np.arange(0, 60, 3.0)]  # a policy with longer steps
    np.testing.assert_array_equal(np.array(fine)[::12], np.array(coarse))
    assert len(np.unique(np.array(coarse))) > 10  # something happened


def test_the_same_seed_and_decisions_give_the_same_windows_and_reset_starts_the_world_over() -> None:
    clusters = sample_clusters(5, 4, 1)
    envs = [ClusterEnv(clusters, seed=2) for _ in range(2)]
    windows = [env.step(env.reset().batch_size).to_dict() for env in envs]
    assert windows[0] == windows[1]
    assert envs[0].step(envs[0].reset().batch_size).to_dict() == windows[0]
    other = ClusterEnv(clusters, seed=3)
    assert other.step(other.reset().batch_size).to_dict() != windows[0]


def test_a_window_attributes_every_second_and_holds_one_allocation() -> None:
    env = ClusterEnv(sample_clusters(6, 3, 2), seed=0, interval=5, delay=2)
    window = env.reset()
    np.testing.assert_allclose(
        (window.compute + window.wait + window.communication) * 5, env.clock_s[:, None] * np.ones(3)
    )
    before = env.clock_s
    new = np.array(window.batch_size) // 2
    after = env.step(new)
    np.testing.assert_array_equal(after.batch_size, new)
    measured = (after.compute + after.wait + after.communication)[:, 0] * 5
    assert (env.clock_s - before > measured).all()  # the delay's steps took time and belong to no window
    assert env.steps == 12


def test_windows_of_unlike_lengths_are_those_that_each_cluster_would_have_had_alone() -> None:
    clusters, lengths = sample_family("affine-slowdowns", 3, 4, 2), np.array([1, 7, 4])
    together = ClusterEnv(clusters, seed=0)
    sizes = np.array(together.reset().batch_size)
    sizes[1] += 1
    together.step(sizes, lengths)
    after = together.step(2 * sizes, lengths)
    assert after.steps.tolist() == lengths.tolist()
    assert together.counts.tolist() == (5 + np.array([0, 1, 0]) + lengths + 1 + lengths).tolist()
    for cluster, length in enumerate(lengths):
        other = ClusterEnv(clusters, seed=0)
        other.reset()
        other.step(sizes, np.full(3, length))
        own = other.step(2 * sizes, np.full(3, length))
        for name in ("compute", "compute_std", "wait", "communication", "noise"):
            np.testing.assert_allclose(getattr(after, name)[cluster], getattr(own, name)[cluster], err_msg=name)
        assert other.clock_s[cluster] == together.clock_s[cluster]


def test_an_allocation_that_stays_waits_for_nothing() -> None:
    env = ClusterEnv(sample_clusters(2, 3, 2), seed=0, interval=5, delay=3)
    sizes = np.array(env.reset().batch_size)
    env.step(sizes)
    sizes[0] += 1
    env.step(sizes)
    assert env.counts.tolist() == [5 + 5 + 3 + 5, 5 + 5 + 5]


def test_a_decision_takes_its_time_once_a_window_where_it_does_not_hide() -> None:
    calm = replace(sample_clusters(2, 3, 2), slow_off_s=np.full((2, 3), 1e12), neighbour_factor=np.ones(2))
    clocks = []
    for decision_s in (np.zeros(2), np.array([0.0, 0.25])):
        env = ClusterEnv(replace(calm, decision_s=decision_s), seed=0, interval=4)
        window = env.reset()
        for _ in range(3):
            window = env.step(window.batch_size)
        clocks.append(env.clock_s)
    free, dear = clocks
    assert dear[0] == free[0]
    assert dear[1] - free[1] == pytest.approx(0.75)


def test_errors_of_measured_steps_are_seen_in_their_deviation() -> None:
    still = replace(sample_clusters(40, 4, 2), jitter_sd=np.zeros((40, 4)), stall=np.zeros(40))
    still = replace(still, slow_off_s=np.full((40, 4), 1e12), neighbour_factor=np.ones(40))
    window = ClusterEnv(replace(still, time_error=np.full(40, 0.02)), seed=0, interval=20).reset()
    seen = window.compute_std / window.compute
    assert seen.mean() == pytest.approx(0.02 * np.sqrt(5), rel=0.1)
    assert np.nanmax(ClusterEnv(still, seed=0, interval=20).reset().compute_std) < 1e-9


def test_a_step_that_holds_a_pause_is_left_out_of_times() -> None:
    recent = np.full((RECENT, 2), np.nan)
    taken = StepsTaken()
    for seconds in (1.0, 1.0, 5.0):
        taken.add(np.full((2, 3), seconds), np.full(2, seconds), None, np.array([True, seconds == 5.0]))
    found = taken.averaged(recent)
    np.testing.assert_allclose(found.compute[0], 1.0)
    np.testing.assert_allclose(found.compute[1], 5.0)  # nothing to compare it with
    assert recent[-1].tolist() == [5.0, 5.0]
    taken = StepsTaken()
    taken.add(np.full((2, 3), 11.0), np.full(2, 11.0), None, np.array([True, True]))
    assert np.isnan(taken.averaged(recent).compute).all()


def test_most_best_batches_lie_inside_the_bounds() -> None:
    for workers in (2, 4, 16):
        env = ClusterEnv(sample_clusters(100, workers, 3), seed=0)
        sizes = LaggedReference(env).decide(env.reset(), env.bounds)
        inside = (sizes > env.bounds.low) & (sizes < env.bounds.high)
        assert inside.mean() > 0.95
        ratio = sizes.sum(-1) / env.clusters.base_batch
        assert 0.2 < np.quantile(ratio, 0.05) < np.quantile(ratio, 0.95) < 6


def test_best_allocation_beats_its_neighbourhood() -> None:
    rng = np.random.default_rng(0)
    alpha, beta = rng.uniform(0.005, 0.02, (1, 4)), rng.uniform(5e-4, 2e-3, (1, 4))
    exchange, overlap, phi, base = np.array([0.05]), np.array([1.5]), np.array([600.0]), np.array([512.0])

    def goodput(b: np.ndarray) -> float:
        total = b.sum(-1)
        whole = step_time((alpha + beta * b).max(-1), exchange, overlap)
        return float((total / whole * efficiency(phi, total, base))[0])

    def gain(total: np.ndarray) -> np.ndarray:
        return efficiency(phi[:, None], total, base[:, None])

    costs, high = Costs(alpha, beta), np.full((1, 4), 1e6)
    best = best_allocation(costs, np.ones((1, 4)), exchange, overlap, gain, base, high)
    for _ in range(200):
        assert goodput(best * np.exp(0.1 * rng.normal(size=(1, 4)))) < goodput(best) * 1.001


def test_adapting_beats_static_and_the_reference_beats_the_rule() -> None:
    clusters, rates = sample_clusters(40, 4, 4), {}
    for name in ("static", "lb_bsp", "reference"):
        env = ClusterEnv(clusters, seed=1)
        policy = {"static": Static, "lb_bsp": LBBSP}.get(name, lambda env=env: LaggedReference(env))()
        seconds, progress = rollout_path(policy, env, 40)[-1]
        rates[name] = np.exp(np.log(progress / seconds).mean())
    assert rates["static"] * 1.1 < rates["lb_bsp"] < rates["reference"]


def test_the_moving_neighbour_slows_exactly_one_worker_and_moves() -> None:
    neighbour = MovingNeighbour(0, 4, np.full(3, 15.0), np.full(3, 2.0))
    seen = np.array([neighbour.at(np.full(3, t)) for t in np.arange(0, 600, 5.0)])
    assert (seen.max(-1) == 2.0).all()
    assert (seen.sum(-1) == 5.0).all()
    assert len(np.unique(seen.argmax(-1)[:, 0])) == 4


def test_streams_depend_on_key_and_counter_only() -> None:
    stream = RandomStream(0, "x", (1000,))
    first = stream.uniform(np.uint64(3))
    stream.uniform(np.uint64(4))
    np.testing.assert_array_equal(first, stream.uniform(np.uint64(3)))
    assert abs(first.mean() - 0.5) < 0.05
    assert abs(np.corrcoef(first, RandomStream(0, "y", (1000,)).uniform(np.uint64(3)))[0, 1]) < 0.1
    normal = np.concatenate([stream.normal(np.uint64(i)) for i in range(20)])
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03


def test_formulas() -> None:
    assert ring_all_reduce(1, 0.1, 1e6, 1e6) == 0
    assert step_time(np.array(3.0), np.array(4.0), np.array(2.0)) == pytest.approx(5.0)


def test_impossible_settings_are_refused() -> None:
    clusters = sample_clusters(1, 2, 0)
    refused(ConfigError, "interval", ClusterEnv, clusters, seed=0, interval=0)
    refused(ConfigError, "allocation shape", ClusterEnv(clusters, seed=0).step, np.array([1, 2]))
    assert bounds_of(clusters).low.min() == 1
