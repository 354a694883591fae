"""Learning in the paper's form: both learners learn, resume exactly and repeat; the shipped file earns its row."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dynamix.errors import ConfigError
from dynamix.policies.files import describe_policy
from dynamix.policies.registry import make_policy
from dynamix.policies.static import Static
from dynamix.window import Window
from dynamix_lab.papers.additive import Actions, AdditiveNet, AdditivePolicy, pretrained
from dynamix_lab.simulator import ClusterEnv, rollout_path, sample_family
from dynamix_lab.training.distributions import categorical
from dynamix_lab.training.dynamix_paper import PER_SECOND, PaperTrainingConfig, nearest_action, train
from dynamix_lab.training.episodes import Episode
from dynamix_lab.training.learner import Learner
from dynamix_lab.training.ppo import PPO
from dynamix_lab.training.simplified import Simplified, SimplifiedConfig, reward_to_go

TINY = PaperTrainingConfig(
    **{"families": ("pai-steady", "affine-slowdowns"), "workers": (2, 4), "rows": 16, "windows": 6, "updates": 2},
    **{"clone_rounds": 1, "clone_windows": 4, "validate_every": 1, "validation_workers": (4,)},
    **{"validation_clusters": 2, "validation_windows": 4, "hidden": 16},
)
LEARNERS = [
    lambda net, seed: Simplified(net, SimplifiedConfig(learning_rate=2e-2), seed=seed),
    lambda net, seed: PPO(
        net, categorical, dataclasses.replace(PER_SECOND, learning_rate=5e-3, worker_rows=256), seed=seed
    ),
]


def _episode(learner: Learner, seed: int, *, hidden: float = float("nan")) -> Episode:
    """Each worker sees, in one feature, which of two actions is right: +25 or -25."""
    generator = torch.Generator().manual_seed(seed)
    observed = torch.zeros(4, 16, 3, learner.net.inputs)
    observed[..., 0] = torch.randint(0, 2, (4, 16, 3), generator=generator) * 2.0 - 1.0
    mask = torch.ones(4, 16, 3, dtype=torch.bool)
    chosen = torch.stack([learner.choose(o, m) for o, m in zip(observed, mask, strict=True)])
    reward = _rightness(observed, chosen)
    reward[0, 0] = hidden
    return Episode(observed, mask, chosen, reward, torch.full((4, 16), 9.0), observed[-1], mask[-1])


def _rightness(observed: Tensor, chosen: Tensor) -> Tensor:
    return (chosen == torch.where(observed[..., 0] > 0, 3, 1)).float().mean(-1)


@pytest.mark.parametrize("make", LEARNERS)
def test_it_learns_which_action_is_right(make: object) -> None:
    torch.manual_seed(0)
    learner = make(AdditiveNet(hidden=16), 0)  # type: ignore[operator]
    first = float(_episode(learner, 1).reward.nanmean())
    for i in range(60):
        learner.update([_episode(learner, i)])
    assert first < 0.4
    assert float(_episode(learner, 1000).reward.nanmean()) > 0.8


@pytest.mark.parametrize("make", LEARNERS)
def test_stop_and_resume_gives_identical_weights(make: object) -> None:
    torch.manual_seed(0)
    whole = make(AdditiveNet(hidden=8), 1)  # type: ignore[operator]
    whole.update([_episode(whole, 0)])
    saved = copy.deepcopy(whole.state_dict())
    whole.update([_episode(whole, 1)])
    resumed = make(AdditiveNet(hidden=8), 99)  # type: ignore[operator]
    resumed.load_state_dict(saved)
    resumed.update([_episode(resumed, 1)])
    for a, b in zip(whole.net.parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()


def test_rewards_to_go_are_discounted_by_the_seconds_that_pass_and_skip_what_is_unknown() -> None:
    reward = torch.tensor([[1.0], [float("nan")], [4.0]])
    seconds = torch.tensor([[1.0], [2.0], [5.0]])
    assert reward_to_go(reward, seconds, 0.5).flatten().tolist() == [1 + 0.5 * 0.25 * 4, 0.25 * 4, 4.0]


def test_the_label_of_imitation_is_the_action_whose_size_comes_nearest() -> None:
    window = Window.of([128, 128, 128, 40], base_batch=512)
    label = nearest_action(Actions(), window, np.array([30.0, 110.0, 131.0, 10.0]))
    assert label.tolist() == [0, 1, 2, 1]  # at the lower clamp the smaller of two equal steps


@pytest.mark.parametrize("options", [{}, {"learner": "simplified", "reward": "adam", "clone_rounds": 0}])
def test_one_seed_one_policy(options: dict[str, object]) -> None:
    config = dataclasses.replace(TINY, **options)  # type: ignore[arg-type]
    one = train(config, 3)
    torch.manual_seed(12345)  # global RNG state must not matter
    two = train(config, 3)
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), two.net.parameters(), strict=True))
    assert one.about["validation"] == two.about["validation"]


def test_a_trained_file_says_how_it_was_made_and_ignores_what_the_simulator_never_showed(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, updates=1, without=("statistics",))
    train(config, 1).save(tmp_path / "p.safetensors")
    about = describe_policy(tmp_path / "p.safetensors")
    assert about["training"]["learner"] == "ppo"
    assert about["without"] == ["statistics"]
    policy = AdditivePolicy.load(tmp_path / "p.safetensors")
    window = {"compute": [0.1, 0.3], "noise": 900.0, "signal": 1.0}
    seen = [
        policy.net(
            torch.from_numpy(AdditivePolicy(policy.net).observe(Window.of([60, 60], **window, **more)))[None],
            torch.ones(1, 2, dtype=torch.bool),
        )[0]
        for more in ({}, {"retransmits_per_s": 9.0, "rtt_s": [0.1, 0.2], "bytes_per_s": [1e6, 1e8]})
    ]
    torch.testing.assert_close(seen[0], seen[1])


def test_unknown_learners_and_rewards_are_refused() -> None:
    for wrong in ({"learner": "dqn"}, {"reward": "fun"}):
        with pytest.raises(ConfigError):
            PaperTrainingConfig(**wrong)  # type: ignore[arg-type]


def test_the_shipped_policy_beats_static_on_clusters_it_never_saw() -> None:
    assert isinstance(make_policy("dynamix-paper"), AdditivePolicy)
    gains = []
    for family in ("pai-steady", "affine-slowdowns", "memory-cliff", "co-location"):
        speeds = []
        for policy in (pretrained(), Static()):
            env = ClusterEnv(sample_family(family, 16, 8, 123_456), seed=6)
            seconds, progress = rollout_path(policy, env, 40)[-1]
            speeds.append(np.log(progress / seconds))
        gains.append(float((speeds[0] - speeds[1]).mean()))
    assert np.mean(gains) > 0.05
