"""Training repeats itself, goes on where it stopped, improves on the rule; its files say how they were made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamix.errors import ConfigError
from dynamix.policies.files import describe_policy
from dynamix.policies.goodput import Goodput
from dynamix.policies.learned.policy import PRETRAINED, LearnedPolicy, pretrained
from dynamix.policies.stigmergic.policy import RANGES, Parameters
from dynamix_lab.simulator import ClusterEnv, rollout, sample_family
from dynamix_lab.training import stigmergic
from dynamix_lab.training.dynamix_policy import ResidualTraining, TrainingConfig, train
from dynamix_lab.training.evaluation import evaluate_families, validation_score
from dynamix_lab.training.stigmergic import SearchConfig, from_logits, to_logits
from dynamix_lab.training.tensorboard import TensorBoard
from tests.refused import refused

TINY = TrainingConfig(
    **{"workers": (3,), "rows": 12, "windows": 4, "clone_rounds": 1, "regret_rounds": 1, "families": 2},
    **{"ppo_updates": 1, "ppo_workers": (3,), "ppo_windows": 3, "validate_every": 2, "validation_workers": (2,)},
    **{"validation_rows": 8, "validation_windows": 4, "judged_workers": (2,), "judged_rows": 8},
)


def _weights(policy: LearnedPolicy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.net.parameters()])


def test_a_stopped_training_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop_in_ppo(what: str, fraction: float) -> None:
        if "regret" in what:
            raise Stop

    file = tmp_path / "training.pt"
    whole = ResidualTraining(TINY, 3)
    whole.run(lambda what, fraction: None, None, TensorBoard(None))
    first = ResidualTraining(dataclasses.replace(TINY), 3)
    refused(Stop, "", first.run, stop_in_ppo, file, TensorBoard(None))
    second = ResidualTraining(TINY, 3)
    second.run(lambda what, fraction: None, file, TensorBoard(None))
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
