"""Training repeats itself, goes on where it stopped, improves on the rule; its files say how they were made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamix.errors import ConfigError
from dynamix.policies.files import describe_policy
from dynamix.policies.goodput import Goodput
from dynamix.policies.learned.policy import PRETRAINED, LearnedPolicy, pretrained
from dynamix_lab.simulator import ClusterEnv, rollout, sample_family
from dynamix_lab.training.dynamix_policy import ResidualTraining, TrainingConfig, train
from dynamix_lab.training.evaluation import evaluate_families, validation_score
from dynamix_lab.training.tensorboard import TensorBoard
from tests.refused import refused

TINY = TrainingConfig(
    **{"workers": (3,), "rows": 12, "windows": 4, "clone_rounds": 1, "regret_rounds": 1, "families": 2},
    **{"ppo_updates": 1, "ppo_workers": (3,), "ppo_windows": 3, "validate_every": 2, "validation_workers": (2,)},
    **{"validation_rows": 8, "validation_windows": 4, "judged_workers": (2,), "judged_rows": 8},
)


def _weights(policy: LearnedPolicy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.net.parameters()])


def test_two_trainings_with_one_seed_give_identical_weights_and_another_seed_does_not() -> None:
    said: list[str] = []
    one = train(TINY, 3, progress=lambda what, fraction: said.append(what))
    torch.manual_seed(12345)  # global RNG state must not matter
    assert torch.equal(_weights(one), _weights(train(TINY, 3)))
    other = train(dataclasses.replace(TINY, clone_rounds=0, ppo_updates=0), 4)
    assert not torch.equal(_weights(one), _weights(other))
    assert [words.split()[0] for words in said][:3] == ["clone", "regret", "ppo"]


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


def test_a_trained_policy_saves_its_configuration(tmp_path: Path) -> None:
    policy = train(dataclasses.replace(TINY, clone_rounds=0, ppo_updates=0), 0)
    policy.save(tmp_path / "p.safetensors")
    assert json.loads((tmp_path / "p.json").read_text())["training"]["clone_rounds"] == 0
    assert describe_policy(tmp_path / "p.safetensors")["seed"] == 0


@pytest.mark.parametrize("workers", [2, 8])
def test_the_shipped_policy_settles_where_nothing_changes(workers: int) -> None:
    env = ClusterEnv(sample_family("affine-quiet", 16, workers, 55), seed=5)
    path = np.array([np.log(window.batch_size) for window in rollout(pretrained(), env, 40)])
    swings = np.abs(np.diff(path[21:], axis=0))
    assert np.median(swings) < 0.03
    assert np.quantile(swings, 0.99) < 0.5
