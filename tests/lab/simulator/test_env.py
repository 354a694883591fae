"""The simulator: paired worlds, what a delay costs, what samples cost, and the environments that others accept."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.seeding import np_random
from pettingzoo.test import parallel_api_test, parallel_seed_test

import dynamix
from dynamix.data.lengths import SampleCosts
from dynamix.errors import ConfigError
from dynamix.features import FEATURES
from dynamix.model import JobModel
from dynamix.policies import make_policy, policy_names
from dynamix.policies.proportional import LBBSP, speeds
from dynamix.window import Bounds, Window
from dynamix_lab.simulator import (
    ClusterEnv,
    best_allocation,
    rollout,
    rollout_path,
    sample_clusters,
    sample_family,
    with_lengths,
)
from dynamix_lab.simulator.compute import Costs, costs_when_cut
from dynamix_lab.simulator.disturbances import MovingNeighbour, Slowdowns
from dynamix_lab.simulator.environments import GymClusterEnv, ParallelClusterEnv, VectorClusterEnv
from dynamix_lab.simulator.network import step_time
from dynamix_lab.simulator.statistics import efficiency
from tests.processes import run
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


def test_the_moving_neighbour_slows_exactly_one_worker_and_moves() -> None:
    neighbour = MovingNeighbour(0, 4, np.full(3, 15.0), np.full(3, 2.0))
    seen = np.array([neighbour.at(np.full(3, t)) for t in np.arange(0, 600, 5.0)])
    assert (seen.max(-1) == 2.0).all()
    assert (seen.sum(-1) == 5.0).all()
    assert len(np.unique(seen.argmax(-1)[:, 0])) == 4


def test_impossible_settings_are_refused() -> None:
    clusters = sample_clusters(1, 2, 0)
    refused(ConfigError, "interval", ClusterEnv, clusters, seed=0, interval=0)


def test_an_answer_is_what_a_job_would_make_of_it() -> None:
    """The nearest sizes within the bounds, with which shipped policies answer anyway."""
    env = world()
    window, high = env.reset(), env.bounds.high
    np.testing.assert_array_equal(env.step(3 * high).batch_size, high)
    answer = window.batch_size * [1000.0, 0.0, 1.5, 1.0]
    projected = dynamix.project(answer, env.bounds, current=high)
    np.testing.assert_array_equal(env.step(answer.tolist()).batch_size, projected)
    for wrong, says in ((-high, "batch size from the policy"), (high * np.nan, "finite"), ([1, 2], "shape of the pol")):
        refused(ConfigError, says, env.step, wrong)
    for name in policy_names():
        policy, window = make_policy(name), env.reset()
        for _ in range(4):
            answer = policy.decide(window, env.bounds)
            window = env.step(answer)
            np.testing.assert_array_equal(window.batch_size, answer, err_msg=name)


def world() -> ClusterEnv:
    return ClusterEnv(sample_family("affine-slowdowns", 3, 4, seed=2), seed=2)


def test_the_first_window_is_at_equal_shares_and_each_other_under_the_answer_to_the_one_before() -> None:
    env, twin = world(), LBBSP()
    windows = list(rollout(LBBSP(), env, 5))
    assert len(windows) == 6
    assert (windows[0].batch_size == windows[0].batch_size[:, :1]).all()
    for before, after in pairwise(windows):
        np.testing.assert_array_equal(after.batch_size, twin.decide(before, env.bounds))


@pytest.mark.parametrize("windows", [0, 3])
def test_a_path_has_a_point_before_the_first_decision_and_one_after_each(windows: int) -> None:
    env = world()
    path = rollout_path(LBBSP(), env, windows)
    assert path.shape == (windows + 1, 2, 3)
    np.testing.assert_array_equal(path[-1], [env.clock_s, env.progress])
    np.testing.assert_array_equal(path, rollout_path(LBBSP(), env, windows))  # every rollout starts over


@pytest.mark.parametrize(("workers", "share", "sigma"), [(8, 32, 0.5), (32, 32, 1.0)])
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
    idle = costs_when_cut(np.array([[8, 0, 8, 0]]), np.array([[1.0]]), np.zeros((1, 4)), np.full((1, 4), 0.9))
    assert (idle[0] > 0).tolist() == [True, False, True, False]


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


REGISTERED = """
import sys, warnings
warnings.simplefilter("error")
import dynamix, gymnasium
assert "dynamix/Cluster-v0" not in gymnasium.registry, "importing dynamix registers nothing"
one = gymnasium.make("dynamix_lab.simulator.environments:dynamix/Cluster-v0", family="pai-steady", workers=3, windows=2)
many = gymnasium.make_vec("dynamix/Cluster-v0", num_envs=5, family="pai-steady", workers=3, windows=2)
seen, _ = one.reset(seed=1)
assert one.observation_space.contains(seen)
*_, truncated, _ = (one.step(one.action_space.sample()), one.step(one.action_space.sample()))[1]
assert truncated
seen, _ = many.reset(seed=1)
assert seen.shape == (5, 3, seen.shape[-1]) and type(many.unwrapped).__name__ == "VectorClusterEnv"
"""


def test_a_fresh_process_makes_the_registered_environment_and_its_vector_form() -> None:
    run("-c", REGISTERED)


def test_gymnasium_and_pettingzoo_accept_the_environments() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(GymClusterEnv(workers=3, windows=5), skip_render_check=True)
    parallel_api_test(ParallelClusterEnv(workers=3, windows=5), num_cycles=30)
    parallel_seed_test(lambda: ParallelClusterEnv(workers=3, windows=5))
    refused(ConfigError, "family", GymClusterEnv, "nonsense")
    refused(ConfigError, "clusters", VectorClusterEnv, clusters=0)


def test_clusters_as_one_array_are_seeded_end_together_and_reset() -> None:
    env = VectorClusterEnv("pai-straggler", 6, 4, windows=3)
    first, _ = env.reset(seed=4)
    assert first.shape == (6, *env.single_observation_space.shape)
    assert env.observation_space.contains(first)
    rewards = []
    for _ in range(3):
        seen, reward, terminated, truncated, _ = env.step(np.zeros((6, 4), np.float32))
        rewards.append(reward)
        assert env.observation_space.contains(seen)
        assert not terminated.any()
    assert truncated.all()
    assert np.isfinite(rewards).all()
    _, reward, _, truncated, _ = env.step(np.zeros((6, 4), np.float32))
    assert (reward == 0).all()
    assert not truncated.any()
    again, _ = env.reset(seed=4)
    np.testing.assert_array_equal(first, again)


def test_the_lines_that_make_a_policy_of_a_trained_network_do_what_the_environment_did() -> None:
    page = (Path(__file__).parents[3] / "docs" / "authors.md").read_text()
    (block,) = (block.split("```")[0] for block in page.split("```python\n")[1:] if "class Trained" in block)
    exec(block, known := {"np": np, "dynamix": dynamix})
    weights = np.random.default_rng(0).normal(size=len(FEATURES))

    def predict(seen: Any) -> Any:
        return np.tanh(seen @ weights)

    env, policy = VectorClusterEnv("pai-straggler", 6, 4), known["Trained"](predict)
    seen, _ = env.reset(seed=4)
    seed = int(np_random(4)[0].integers(2**31))  # as Gymnasium draws it
    same = ClusterEnv(sample_family("pai-straggler", 6, 4, seed), seed=seed)
    window = same.reset()
    for _ in range(5):
        seen, *_, about = env.step(predict(seen))
        window = same.step(policy.decide(window, same.bounds))
        np.testing.assert_array_equal(window.batch_size, about["batch_sizes"])
    assert (window.batch_size != window.batch_size[:, :1]).any()
