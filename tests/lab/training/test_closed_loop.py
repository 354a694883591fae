"""Episodes for PPO: paid beside the rule in the same world, and credit that is exact for the window that follows."""

from __future__ import annotations

import dataclasses

import torch

from dynamix.policies.learned.policy import ResidualNet
from dynamix_lab.training.closed_loop import SCALE, paired_episode
from dynamix_lab.training.curriculum import training_clusters
from dynamix_lab.training.distributions import gaussian
from dynamix_lab.training.episodes import Episode
from dynamix_lab.training.hindsight import RecordingEnv
from dynamix_lab.training.ppo import PPO


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


def test_in_the_first_window_the_worlds_are_still_the_same_and_credit_explains_the_reward() -> None:
    """Later on they have trained apart. Credit leaves out the step that a decision takes to arrive."""
    ppo = _learner(-1.5)
    episode = paired_episode(ppo, *(RecordingEnv(_env().clusters, seed=3, delay=0) for _ in range(2)), windows=1)
    assert episode.at_once is not None
    own, common = (part[0] for part in episode.at_once)
    acted = own.abs().sum(-1) > 0
    assert acted.any()
    # One worker's part of a joint action and what the others add do not sum up exactly.
    together = torch.corrcoef(torch.stack([(own.sum(-1) + common)[acted], episode.reward[0][acted]]))
    assert together[0, 1] > 0.8
    assert episode.reward.abs().max() <= SCALE


def test_what_an_action_did_at_once_replaces_the_first_reward_of_its_advantage() -> None:
    ppo, episode = _learner(-2.0), _episode(_learner(-2.0))
    advantage = ppo.advantages(episode, episode.evaluated[2])
    flat = ppo._flatten(episode)
    later = (advantage - episode.reward).flatten()
    torch.testing.assert_close(flat["own"], episode.at_once[0].flatten(0, 1) + later[:, None])
    torch.testing.assert_close(flat["common"], episode.at_once[1].flatten() + later)
    ppo.update([episode])
    assert all(torch.isfinite(weights).all() for weights in ppo.net.parameters())
