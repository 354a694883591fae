"""Gymnasium and PettingZoo accept our environments, and what they give is the simulator's."""

from __future__ import annotations

import warnings

import numpy as np
from gymnasium.utils.env_checker import check_env
from pettingzoo.test import parallel_api_test, parallel_seed_test

from dynamix.errors import ConfigError
from dynamix_lab.simulator.environments import GymClusterEnv, ParallelClusterEnv, VectorClusterEnv
from tests.processes import run
from tests.refused import refused


def test_gymnasium_accepts_the_environment() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(GymClusterEnv(workers=3, windows=5), skip_render_check=True)


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


def test_pettingzoo_accepts_the_environment() -> None:
    parallel_api_test(ParallelClusterEnv(workers=3, windows=5), num_cycles=30)
    parallel_seed_test(lambda: ParallelClusterEnv(workers=3, windows=5))


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


def test_a_larger_share_for_a_worker_shows_in_its_size_and_bounds_hold() -> None:
    env = GymClusterEnv("affine-quiet", workers=3)
    env.reset(seed=1)
    before = env._worlds.env.batch[0].copy()
    *_, info = env.step(np.array([1.0, 0.0, -1.0], np.float32))
    assert info["batch_sizes"][0] > before[0]
    assert info["batch_sizes"][2] < before[2]


def test_impossible_environments_are_refused() -> None:
    refused(ConfigError, "family", GymClusterEnv, "nonsense")
    refused(ConfigError, "clusters", VectorClusterEnv, clusters=0)
