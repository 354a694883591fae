"""Rewards: the paper's terms with their signs and weights, regret live and simulated, and what is not measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.policies.static import Static
from dynamix.window import Window
from dynamix_lab.simulator import ClusterEnv, LaggedReference, rollout, sample_family
from dynamix_lab.training.rewards import PaperReward, RewardWeights, SimulatedPaper, SimulatedRegret, sigma_norm

WEIGHTS = RewardWeights(accuracy=10.0, time=2.0, retransmits=0.5, sigma=3.0)


def _two(optimizer: Any, first: dict[str, Any], second: dict[str, Any]) -> float:
    reward = PaperReward(optimizer, WEIGHTS)
    reward.update(Window.of([50, 50], **first))
    return float(reward.update(Window.of([50, 50], **second)))


def test_every_term_of_the_papers_reward_counts_with_its_weight() -> None:
    first = {"compute": 1.0, "accuracy": 0.5, "retransmits_per_s": 0.0, "noise": 900.0, "signal": 1.0}
    for changed, difference in (
        ({"accuracy": 0.6}, 10 * 0.1),
        ({"compute": 1.5}, -2 * 0.5),
        ({"retransmits_per_s": [4.0, 0.0]}, -0.5 * 2),
    ):
        for optimizer in ("sgd", "adam"):
            same, other = _two(optimizer, first, first), _two(optimizer, first, {**first, **changed})
            assert other - same == pytest.approx(difference)
    assert _two("sgd", first, first) == pytest.approx(-2.0)
    assert _two("adam", first, first) == pytest.approx(-2.0 - 3 * np.sqrt(900 / 100))


def test_the_reference_time_is_the_jobs_first_and_what_is_unknown_counts_nothing() -> None:
    reward = PaperReward("adam", WEIGHTS)
    paid = [float(reward.update(Window.of([8, 8], compute=s))) for s in (np.nan, 2.0, 1.0, np.nan)]
    assert np.isnan(paid[0])
    assert paid[1:3] == [-2.0, -1.0]
    assert np.isnan(paid[3])


def test_a_lost_signal_is_a_large_sigma_not_an_infinite_one() -> None:
    assert float(sigma_norm(Window.of([8], noise=1.0, signal=0.0))) == 10.0
    assert np.isnan(sigma_norm(Window.of([8])))


def _env() -> ClusterEnv:
    return ClusterEnv(sample_family("pai-steady", 6, 4, seed=5), seed=5)


def test_simulated_regret_is_zero_for_the_reference_itself_and_negative_for_static() -> None:
    for make, zero in ((LaggedReference, True), (lambda _: Static(), False)):
        env = _env()
        reward = SimulatedRegret(env, _env())
        followed = rollout(make(env), env, 6)
        next(followed)  # the first window, before any decision
        paid = [reward.update(window) for window in followed]
        assert (np.array(paid) == 0).all() if zero else np.mean(paid) < -0.02


def test_the_papers_reward_in_simulation_pays_for_accuracy() -> None:
    env = _env()
    weighted, plain = (SimulatedPaper(env, "sgd", RewardWeights(accuracy=a)) for a in (100.0, 0.0))
    window = env.step(env.reset().batch_size)
    assert (weighted.update(window) > plain.update(window)).all()


def test_unknown_optimisers_are_refused() -> None:
    with pytest.raises(ConfigError, match="sgd, adam"):
        PaperReward("lion")  # type: ignore[arg-type]
