"""Episodes and rewards: judged in hindsight, paid beside the rule, the paper's terms, and worlds that are possible."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from dynamix.errors import ConfigError
from dynamix.policies.learned.policy import LearnedPolicy, ResidualNet
from dynamix.policies.static import Static
from dynamix.window import Window
from dynamix_lab.simulator import ClusterEnv, Clusters, LaggedReference, bounds_of, rollout, sample_family
from dynamix_lab.training.cloning import demonstrate
from dynamix_lab.training.closed_loop import paired_episode
from dynamix_lab.training.curriculum import training_clusters
from dynamix_lab.training.distributions import gaussian
from dynamix_lab.training.episodes import Episode
from dynamix_lab.training.hindsight import DecisionRecorder, Decisions, RecordingEnv
from dynamix_lab.training.ppo import PPO
from dynamix_lab.training.rewards import PaperReward, RewardWeights, SimulatedPaper, SimulatedRegret, sigma_norm
from tests.refused import refused


def _world(workers: int = 4) -> Clusters:
    clusters = training_clusters(12, workers, 5)
    return dataclasses.replace(clusters, change_cost_s=None, noise_unit=30 * clusters.noise_unit)


def _decisions(windows: int = 4) -> Decisions:
    return demonstrate(ResidualNet(), RecordingEnv(_world(), seed=3), windows=windows, seed=0, guided=None)


@pytest.mark.parametrize("sigma", [None, 0.8])
def test_hindsight_on_the_sizes_that_were_used_is_what_the_simulator_gave(sigma: float | None) -> None:
    """Also where samples cost unlike much."""
    unlike = None if sigma is None else np.full(12, sigma)
    env = RecordingEnv(dataclasses.replace(_world(), cost_sigma=unlike), seed=3, delay=0)
    policy, recorder, window = LearnedPolicy(), DecisionRecorder(env), env.reset()
    given, sizes = [], []
    for _ in range(5):
        observed = policy.observe(window, env.bounds)
        recorder.before(policy, window, observed, None)
        clock, progress = env.clock_s, env.progress
        zero = np.zeros(window.batch_size.shape)
        sizes.append(policy.allocate(window, env.bounds, zero, zero[..., 0]))
        window = env.step(sizes[-1])
        recorder.after()
        given.append(np.log((env.progress - progress) / (env.clock_s - clock)))
    hindsight = recorder.decisions().log_goodput(torch.from_numpy(np.concatenate(sizes)).float()).reshape(5, -1)
    apart = hindsight.numpy() - np.array(given)
    # The noise scale itself moves a little within a window.
    np.testing.assert_allclose(apart, 0.0, atol=0.02)


def test_a_small_step_along_the_gradient_gains_what_it_promises() -> None:
    decisions = _decisions()
    delta = torch.zeros_like(decisions.wish, requires_grad=True)
    growth = torch.zeros_like(decisions.base, requires_grad=True)
    before = decisions.log_goodput(decisions.sizes(delta, growth))
    before.sum().backward()
    step = 1e-3
    after = decisions.log_goodput(
        decisions.sizes((delta + step * delta.grad).detach(), (growth + step * growth.grad).detach())
    )
    gain = (after - before.detach()).mean()
    promised = step * (delta.grad.square().sum(-1) + growth.grad.square()).mean()
    assert 0 < gain < 1.2 * promised


def test_only_the_worker_that_keeps_the_others_waiting_is_blamed() -> None:
    decisions = _decisions()
    usual, growth = torch.zeros_like(decisions.wish), torch.zeros_like(decisions.base)
    slowest = decisions.busy(decisions.sizes(usual, growth)).mean(-1).argmax(-1)
    late = torch.nn.functional.one_hot(slowest, usual.shape[1]).float() * 0.2
    credit = decisions.credit(late, growth, usual)
    own = credit.gather(1, slowest[:, None])
    assert own.mean() < -0.02
    assert own.mean() < credit.mean() - 0.01
    assert decisions.credit(usual, growth, usual).abs().max() < 1e-5


def _learner(log_std: float) -> PPO:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = ResidualNet(hidden=8)
    with torch.no_grad():
        net.log_std_local.fill_(log_std)
        net.log_std_shared.fill_(log_std)
    return PPO(net, gaussian, seed=0)


def _env() -> RecordingEnv:
    return RecordingEnv(dataclasses.replace(training_clusters(8, 4, 11), change_cost_s=None), seed=3)


def _episode(ppo: PPO, windows: int = 6) -> Episode:
    return paired_episode(ppo, _env(), _env(), windows=windows)


def test_who_answers_as_the_rule_is_paid_nothing() -> None:
    """But for a tie of rounding, which the least deviation breaks otherwise."""
    episode = _episode(_learner(-30.0))
    assert (episode.reward == 0).all(0).float().mean() > 0.8
    assert episode.at_once is not None
    assert all(part.abs().max() < 1e-3 for part in episode.at_once)


@pytest.mark.parametrize("workers", [1, 8])
def test_every_cluster_runs_and_can_be_allocated(workers: int) -> None:
    for seed in range(3):
        clusters = training_clusters(6, workers, seed)
        bounds = bounds_of(clusters)
        assert (bounds.low <= bounds.high).all()
        window = ClusterEnv(clusters, seed=seed).reset()
        assert (window.batch_size <= bounds.high).all()
        assert np.isfinite(window.step).all()
        assert clusters.curve is None or (clusters.curve < 0).all()  # measured curves belong to a test family


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
    refused(ConfigError, "sgd, adam", PaperReward, "lion")


def _steady() -> ClusterEnv:
    return ClusterEnv(sample_family("pai-steady", 6, 4, seed=5), seed=5)


def test_simulated_regret_is_zero_for_the_reference_itself_and_negative_for_static() -> None:
    for make, zero in ((LaggedReference, True), (lambda _: Static(), False)):
        env = _steady()
        reward = SimulatedRegret(env, _steady())
        followed = rollout(make(env), env, 6)
        next(followed)  # the first window, before any decision
        paid = [reward.update(window) for window in followed]
        assert (np.array(paid) == 0).all() if zero else np.mean(paid) < -0.02


def test_the_papers_reward_in_simulation_pays_for_accuracy() -> None:
    env = _steady()
    weighted, plain = (SimulatedPaper(env, "sgd", RewardWeights(accuracy=a)) for a in (100.0, 0.0))
    window = env.step(env.reset().batch_size)
    assert (weighted.update(window) > plain.update(window)).all()
