"""Training reproduces itself, improves on the rule, and its files say how they were made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dynamix.learning.evaluation import evaluate
from dynamix.learning.training import TrainingConfig, show, train
from dynamix.policies.learned import PRETRAINED, LearnedPolicy, pretrained

TINY = TrainingConfig(
    workers=(2, 4),
    rows=32,
    clone_rounds=2,
    clone_windows=6,
    ppo_updates=2,
    ppo_windows=4,
    validate_every=2,
    validation_clusters=4,
    validation_windows=4,
)


def test_two_trainings_with_one_seed_give_identical_weights_and_another_seed_does_not() -> None:
    said: list[str] = []
    one = train(TINY, 3, progress=lambda what, fraction: said.append(what))
    torch.manual_seed(12345)  # global RNG state must not matter
    two, other = train(TINY, 3), train(TINY, 4)
    pairs = list(zip(one.net.parameters(), two.net.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))
    assert said


def test_evaluation_is_paired_and_knows_lb_bsp() -> None:
    figures = evaluate({"untrained": lambda _: LearnedPolicy()}, [7], workers=(4,), clusters=16, windows=20)["4"]
    assert figures["untrained"] == figures["lb_bsp"]
    assert figures["static"]["geometric_mean"] < figures["lb_bsp"]["geometric_mean"] < 1


def test_the_shipped_policy_describes_itself_and_beats_lb_bsp_on_clusters_it_never_saw() -> None:
    about = show(PRETRAINED)
    assert {"training", "seed", "validation", "evaluation"} <= about.keys()
    figures = evaluate({"dynamix": lambda _: pretrained()}, [123_456], workers=(4, 8), clusters=32, windows=50)
    for w in ("4", "8"):
        for measure in ("geometric_mean", "worst_decile"):
            assert figures[w]["dynamix"][measure] > figures[w]["lb_bsp"][measure]


def test_a_trained_policy_saves_its_configuration(tmp_path: Path) -> None:
    policy = train(dataclasses.replace(TINY, clone_rounds=1, ppo_updates=0), 0)
    policy.save(tmp_path / "p.safetensors")
    assert json.loads((tmp_path / "p.json").read_text())["training"]["clone_rounds"] == 1
    assert show(tmp_path / "p.safetensors")["seed"] == 0


@pytest.mark.parametrize("workers", [2, 8])
def test_the_shipped_policy_does_not_let_the_global_batch_wander(workers: int) -> None:
    from dynamix.simulator import ClusterEnv, sample_clusters

    env = ClusterEnv(sample_clusters(32, workers, 55), seed=5)
    policy, window = pretrained(), env.reset()
    for _ in range(60):
        window = env.step(policy.decide(window, env.bounds))
    growth = window.global_batch / env.clusters.base_batch
    assert ((growth > 0.12) & (growth <= 8.01)).all()
