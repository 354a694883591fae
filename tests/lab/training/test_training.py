"""Training repeats itself, goes on where it stopped and improves on the rule; and PPO, which it learns by."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dynamix.errors import ConfigError
from dynamix.policies.files import describe_policy
from dynamix.policies.goodput import Goodput
from dynamix.policies.learned.policy import PRETRAINED, LearnedPolicy, pretrained
from dynamix.policies.stigmergic.policy import RANGES, Parameters
from dynamix_lab.simulator import ClusterEnv, rollout, sample_family
from dynamix_lab.training import stigmergic
from dynamix_lab.training.distributions import Categorical, Gaussian, gaussian
from dynamix_lab.training.dynamix_policy import ResidualTraining, TrainingConfig, train
from dynamix_lab.training.episodes import Episode
from dynamix_lab.training.evaluation import evaluate_families, validation_score
from dynamix_lab.training.ppo import PPO, PPOConfig
from dynamix_lab.training.stigmergic import SearchConfig, from_logits, to_logits
from tests.refused import refused

TINY = TrainingConfig(
    **{"workers": (3,), "rows": 12, "windows": 4, "clone_rounds": 1, "regret_rounds": 1, "families": 2},
    **{"ppo_updates": 1, "ppo_workers": (3,), "ppo_windows": 3, "validate_every": 2, "validation_workers": (2,)},
    **{"validation_rows": 8, "validation_windows": 4, "judged_workers": (2,), "judged_rows": 8},
)


def test_a_stopped_training_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop_in_ppo(what: str, fraction: float) -> None:
        if "regret" in what:
            raise Stop

    file = tmp_path / "training.pt"
    whole = ResidualTraining(TINY, 3)
    whole.run(lambda what, fraction: None, None)
    first = ResidualTraining(dataclasses.replace(TINY), 3)
    refused(Stop, "", first.run, stop_in_ppo, file)
    second = ResidualTraining(TINY, 3)
    second.run(lambda what, fraction: None, file)
    for a, b in zip(whole.net.parameters(), second.net.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.scores == second.scores
    refused(ConfigError, "checkpoint", train, TINY, 4, checkpoint=file)


def test_untrained_it_scores_as_the_rule() -> None:
    assert validation_score(lambda _: LearnedPolicy(), 7, rows=32, windows=8, workers=(4,)) == 1.0


def test_the_shipped_policy_describes_itself_and_is_ahead_of_the_rule_on_clusters_it_never_saw() -> None:
    assert {"training", "seed", "validation", "evaluation"} <= describe_policy(PRETRAINED).keys()
    score = validation_score(lambda _: pretrained(), 123_456, rows=96, windows=30, workers=(8,))
    assert score > 1.0


def test_figures_of_families_are_paired_and_complete() -> None:
    made = {"again": lambda _: Goodput()}
    result = evaluate_families(made, [7], families=["affine-slowdowns"], workers=(4,), rows=16, windows=8)
    scores = result["cells"]["affine-slowdowns-4"]
    assert scores["again"]["over_goodput"] == [1.0, 1.0, 1.0]
    assert {"static", "lb_bsp", "cannikin", "goodput", "hedged", "again"} == scores.keys()
    assert scores["hedged"]["gap_closed"] == 1.0
    assert result["summary"]["again"]["ahead_of_goodput"] == []


@pytest.mark.parametrize("workers", [2, 8])
def test_the_shipped_policy_settles_where_nothing_changes(workers: int) -> None:
    env = ClusterEnv(sample_family("affine-quiet", 16, workers, 55), seed=5)
    path = np.array([np.log(window.batch_size) for window in rollout(pretrained(), env, 40)])
    swings = np.abs(np.diff(path[21:], axis=0))
    assert np.median(swings) < 0.03
    assert np.quantile(swings, 0.99) < 0.5


SEARCH = SearchConfig(
    **{"stages": ((2,),), "generations": (1,), "tried": 3, "kept": 2, "worlds": 1, "rows": 12, "windows": 6},
    **{"validation_workers": (2,), "validation_clusters": 6},
)


def test_a_seed_gives_the_same_numbers_and_the_best_on_validation_is_kept() -> None:
    first, again = stigmergic.train(SEARCH, seed=5), stigmergic.train(SEARCH, seed=5)
    assert first.parameters == again.parameters
    by_hand, learned = first.about["validation"]
    assert (first.parameters == Parameters()) == (learned <= by_hand)


def test_numbers_never_leave_their_ranges() -> None:
    drawn = from_logits(5.0 * np.random.default_rng(0).normal(size=len(RANGES)))
    for name, value in dataclasses.asdict(drawn).items():
        assert RANGES[name][0] <= value <= RANGES[name][1]
    np.testing.assert_allclose(to_logits(from_logits(to_logits(Parameters()))), to_logits(Parameters()), atol=1e-9)


class Single(nn.Module):
    """An actor and a critic of two inputs; no shared action."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)) for _ in range(2)
        )
        self.log_std_local = nn.Parameter(torch.zeros(1))
        self.log_std_shared = nn.Parameter(torch.zeros(0))

    def forward(self, observed: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = mask.unsqueeze(-1).to(observed.dtype)
        pooled = (observed * weight).sum(1) / weight.sum(1)
        return self.actor(observed), observed.new_zeros(len(observed), 0), self.critic(pooled).squeeze(-1)


def _episode_of(rows: list[tuple[Tensor, ...]], rewards: Tensor, last: Tensor, last_mask: Tensor) -> Episode:
    observed, mask, chosen, shared = (torch.stack(part) for part in zip(*rows, strict=True))
    return Episode(observed, mask, chosen, rewards, torch.ones_like(rewards), last, last_mask, shared)


def _batch(seed: int, workers: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(16, workers, dtype=torch.bool)
    mask[:, -1] = False
    return torch.randn(16, workers, 2, generator=generator), mask


def _episode(ppo: PPO, seed: int) -> Episode:
    rows = []
    for t in range(4):
        observed, mask = _batch(seed + t)
        rows.append((observed, mask, *ppo.act(observed, mask)))
    # Right is what each sees first.
    wrong = [(chosen.squeeze(-1) - observed[..., 0]) * mask for observed, mask, chosen, _ in rows]
    rewards = torch.stack([-error.square().sum(-1) for error in wrong])
    return _episode_of(rows, rewards, *_batch(seed + 9))


def test_it_learns_what_to_do_from_what_it_sees() -> None:
    torch.manual_seed(0)
    ppo = PPO(Single(), gaussian, PPOConfig(learning_rate=5e-3, minibatch=64), seed=0)
    first = float(_episode(ppo, 1000).reward.mean())
    for i in range(20):
        ppo.update([_episode(ppo, 10 * i)])
    assert float(_episode(ppo, 1000).reward.mean()) > 0.2 * first  # costs are negative rewards


def test_what_an_inactive_worker_sees_and_does_changes_nothing() -> None:
    torch.manual_seed(0)
    start = Single()
    results = []
    for junk in (0.0, 50.0):
        ppo = PPO(copy.deepcopy(start), gaussian, seed=1)
        episode = _episode(ppo, 0)
        episode.observed[:, :, -1] = junk
        episode.chosen[:, :, -1] = junk
        ppo.update([episode])
        results.append(torch.cat([p.detach().flatten() for p in ppo.net.parameters()]))
    assert torch.equal(results[0], results[1])


def test_an_advantage_is_the_discounted_surprise_of_what_follows_until_an_end_or_an_unknown_reward() -> None:
    """Windows of 1, 2, 3 and 1 s: A_t = s_t + (0.5 ^ seconds) 0.8 A_t+1, s_t = r_t + (0.5 ^ seconds) v_t+1 - v_t."""
    ppo = PPO(Single(), gaussian, PPOConfig(gamma=0.5, gae_lambda=0.8))
    reward = torch.tensor([[1.0], [2.0], [float("nan")], [3.0]])
    episode = _episode(ppo, 0)
    episode.reward, episode.duration = reward, torch.tensor([[1.0], [2.0], [3.0], [1.0]])
    values = torch.tensor([[1.0], [2.0], [4.0], [1.0], [8.0]])
    last = 3.0 + 0.5 * 8.0 - 1.0
    unknown = 0.0 + 0.125 * 0.8 * last
    second = 2.0 + 0.25 * 4.0 - 2.0 + 0.25 * 0.8 * unknown
    first = 1.0 + 0.5 * 2.0 - 1.0 + 0.5 * 0.8 * second
    expected = torch.tensor([first, second, unknown, last])
    torch.testing.assert_close(ppo.advantages(episode, values).flatten(), expected)
    episode.done = torch.tensor([[False], [True], [False], [False]])
    ended = torch.tensor([1.0 + 0.5 * 2.0 - 1.0 + 0.5 * 0.8 * (2.0 - 2.0), 0.0, unknown, last])
    torch.testing.assert_close(ppo.advantages(episode, values).flatten(), ended)


def test_both_kinds_of_actions_are_drawn_as_their_log_probabilities_say() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0]).expand(40_000, 1, 3)
    discrete = Categorical(logits)
    chosen, shared = discrete.sample(generator)
    frequencies = torch.bincount(chosen.flatten(), minlength=3) / 40_000
    each = torch.arange(3).view(3, 1)
    torch.testing.assert_close(
        frequencies, Categorical(logits[:3]).log_prob(each)[0].exp().flatten(), atol=0.01, rtol=0.0
    )
    assert shared.shape == (40_000, 0)
    mean, log_std = torch.full((40_000, 1, 2), 0.5), torch.tensor([0.0, -1.0])
    real = Gaussian(mean, torch.zeros(40_000, 1), log_std, torch.tensor([-2.0]))
    drawn = real.sample(generator)
    torch.testing.assert_close(drawn[0].std((0, 1)), log_std.exp(), rtol=0.02, atol=0.0)
    # The mean log-density of a normal action is -(1 + log 2 pi) / 2 - log sd.
    per_worker, of_cluster = (float(log.mean()) for log in real.log_prob(*drawn))
    normal = -(1 + np.log(2 * np.pi)) / 2
    assert per_worker == pytest.approx(2 * normal + 1.0, abs=0.03)
    assert of_cluster == pytest.approx(normal + 2.0, abs=0.03)


def test_an_anchor_draws_either_kind_of_action_back_and_absent_workers_do_not_count() -> None:
    mask = torch.tensor([[True, False]])
    here, there = (Categorical(torch.tensor([[[0.0, x], [0.0, 9.0 * x]]])) for x in (0.0, 1.0))
    odds = torch.tensor([0.0, 1.0]).softmax(0)
    kullback_leibler = float((odds * (odds.log() - np.log(0.5))).sum())
    assert float(here.distance(there, mask)) == pytest.approx(kullback_leibler, rel=1e-5)
    assert float(here.distance(here, mask)) == 0.0
    log_std = torch.tensor([np.log(0.5)]).float(), torch.tensor([0.0])
    near, far = (Gaussian(torch.tensor([[[x], [9.0]]]), torch.tensor([[x]]), *log_std) for x in (0.0, 1.0))
    assert float(near.distance(far, mask)) == pytest.approx(1 / 0.25 + 1.0)
