"""The paper's form: exact steps, its range, ablations, files that can be trusted, and how it is learned."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynamix.errors import ConfigError, PolicyFileError
from dynamix.features import FEATURES
from dynamix.policies.registry import make_policy
from dynamix.policies.static import Static
from dynamix.window import PER_WORKER, Bounds, Window
from dynamix_lab.papers.additive import (
    OWN_FEATURES,
    STATE_FAMILIES,
    Actions,
    AdditiveNet,
    AdditivePolicy,
    pretrained,
)
from dynamix_lab.simulator import ClusterEnv, rollout_path, sample_family
from dynamix_lab.training.distributions import categorical
from dynamix_lab.training.dynamix_paper import PER_SECOND, PaperTrainingConfig, nearest_action, train
from dynamix_lab.training.episodes import Episode
from dynamix_lab.training.learner import Learner
from dynamix_lab.training.ppo import PPO
from dynamix_lab.training.simplified import Simplified, SimplifiedConfig, reward_to_go
from tests.refused import refused


def _random(seed: int = 0, **options: Any) -> AdditivePolicy:
    torch.manual_seed(seed)
    net = AdditiveNet(options.pop("actions", None))
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn_like(weight) * 0.5)
    return AdditivePolicy(net, **options)


def _window(workers: int, seed: int = 0, order: object = slice(None)) -> Window:
    rng = np.random.default_rng(seed)
    sizes, known = rng.integers(32, 300, workers), {name: rng.uniform(0.05, 1.0, workers) for name in PER_WORKER}
    cluster = {"noise": 5e3, "signal": 1.0, "base_batch": 128 * workers}
    return Window.of(sizes[order], **{n: v[order] for n, v in known.items()}, **cluster)


def test_at_128_samples_a_worker_actions_are_the_papers() -> None:
    window = Window.of([140, 200, 330], compute=0.1, base_batch=3 * 128)
    for index, step in enumerate((-100, -25, 0, 25, 100)):
        answer = AdditivePolicy().allocate(window, Bounds.of(3, 1, 2000), np.full(3, index))
        assert answer.tolist() == [size + step for size in (140, 200, 330)]


def test_sizes_are_clamped_to_the_papers_range_but_nobody_is_pushed_into_it() -> None:
    window = Window.of([40, 1000, 8, 1500], compute=0.1, base_batch=4 * 128)
    down, up = (AdditivePolicy().allocate(window, Bounds.of(4, 1, 2000), np.full(4, i)) for i in (0, 4))
    assert down.tolist() == [32, 900, 8, 1400]
    assert up.tolist() == [140, 1024, 108, 1500]


def test_actions_scale_with_the_users_batch_size_unless_told_otherwise() -> None:
    window = Window.of([1280, 1280], compute=0.1)
    assert AdditivePolicy().allocate(window, Bounds.of(2, 1, 9999), np.array([3, 1])).tolist() == [1530, 1030]
    literal = AdditivePolicy(AdditiveNet(Actions(scale="samples", high=4096.0)))
    assert literal.allocate(window, Bounds.of(2, 1, 9999), np.array([3, 1])).tolist() == [1305, 1255]


def test_decisions_follow_a_permutation_of_the_workers() -> None:
    order = np.random.default_rng(1).permutation(7)
    one, other, answers = _random(), _random(), set()
    for seed in range(6):
        answer = one.decide(_window(7, seed), Bounds.of(7))
        np.testing.assert_array_equal(answer[order], other.decide(_window(7, seed, order), Bounds.of(7)))
        answers |= set((answer - _window(7, seed).batch_size).tolist())
    assert len(answers) > 2, "the network never chose between actions"


_VALUES = st.sampled_from([np.nan, np.nan, 0.0, 1e-9, 0.1, 1.0, 1e9, np.inf, -1.0])


@settings(max_examples=15, deadline=None)
@given(data=st.data(), workers=st.integers(1, 5), quantum=st.sampled_from([1, 8]))
def test_any_pattern_of_missing_and_absurd_values_gives_sizes_inside_the_bounds(
    data: st.DataObject, workers: int, quantum: int
) -> None:
    policy, bounds = _random(3), Bounds.of(workers, 0, 512, quantum=quantum)
    for _ in range(3):
        sizes = st.lists(st.integers(0, 512 // quantum), min_size=workers, max_size=workers)
        values = st.lists(_VALUES, min_size=workers, max_size=workers)
        known = {n: data.draw(values) for n in ("compute", "data", "wait", "communication")}
        cluster = {n: data.draw(_VALUES) for n in ("noise", "signal", "base_batch")}
        answer = policy.decide(Window.of([quantum * s for s in data.draw(sizes)], **known, **cluster), bounds)
        assert ((answer >= bounds.low) & (answer <= bounds.high) & (answer % quantum == 0)).all()
        assert bounds.total_low <= answer.sum() <= bounds.total_high


def test_without_timing_the_allocation_stays() -> None:
    assert _random(1).decide(Window.of([40, 50, 60], noise=5.0, signal=1.0), Bounds.of(3)).tolist() == [40, 50, 60]


def test_an_ablated_family_of_the_state_is_not_seen() -> None:
    for family in STATE_FAMILIES:
        policy = _random(without=(family,))
        seen = policy.observe(_window(4))
        names = [*(n.removeprefix("mean_").removeprefix("max_") for n in FEATURES), *OWN_FEATURES]
        masked = np.array([name in STATE_FAMILIES[family] for name in names])
        assert not seen[:, masked].any()
        assert seen[:, ~masked].any()


def test_saved_and_resumed_it_decides_the_same(tmp_path: Path) -> None:
    policy = _random(2, without=("system",))
    policy.save(tmp_path / "p.safetensors")
    again = make_policy(str(tmp_path / "p.safetensors"))
    assert isinstance(again, AdditivePolicy)
    assert again.without == ("system",)
    for seed in range(3):
        np.testing.assert_array_equal(
            policy.decide(_window(4, seed), Bounds.of(4)), again.decide(_window(4, seed), Bounds.of(4))
        )
    resumed = _random(2, without=("system",))
    resumed.load_state_dict(json.loads(json.dumps(again.state_dict())))
    np.testing.assert_array_equal(resumed.observe(_window(4, 9)), again.observe(_window(4, 9)))


@pytest.mark.parametrize("wrong", [{"actions": {"steps": [1, 2, 3]}}, {"actions": {"jumps": 1}}, {"without": ["luck"]}])
def test_a_file_with_impossible_actions_or_families_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "p.safetensors"
    _random().save(path)
    about = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**about, **wrong}))
    refused(PolicyFileError, "families of the state", AdditivePolicy.load, path)


def test_impossible_actions_and_families_are_refused() -> None:
    for wrong in ({"steps": (1.0, 2.0)}, {"low": 0.0}, {"low": 64.0, "high": 32.0}, {"scale": "other"}):
        refused(ConfigError, "", Actions, **wrong)
    refused(ConfigError, "network, system, statistics", AdditivePolicy, without=("nonsense",))


QUICK = PaperTrainingConfig(
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


def _lesson(learner: Learner, seed: int, *, hidden: float = float("nan")) -> Episode:
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
    first = float(_lesson(learner, 1).reward.nanmean())
    for i in range(60):
        learner.update([_lesson(learner, i)])
    assert first < 0.4
    assert float(_lesson(learner, 1000).reward.nanmean()) > 0.8


@pytest.mark.parametrize("make", LEARNERS)
def test_stop_and_resume_gives_identical_weights(make: object) -> None:
    torch.manual_seed(0)
    whole = make(AdditiveNet(hidden=8), 1)  # type: ignore[operator]
    whole.update([_lesson(whole, 0)])
    saved = copy.deepcopy(whole.state_dict())
    whole.update([_lesson(whole, 1)])
    resumed = make(AdditiveNet(hidden=8), 99)  # type: ignore[operator]
    resumed.load_state_dict(saved)
    resumed.update([_lesson(resumed, 1)])
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


def test_one_seed_one_policy_whatever_learns() -> None:
    config = dataclasses.replace(QUICK, learner="simplified", reward="adam", clone_rounds=0, without=("statistics",))
    one = train(config, 3)
    torch.manual_seed(12345)  # global RNG state must not matter
    two = train(config, 3)
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), two.net.parameters(), strict=True))
    assert one.about["validation"] == two.about["validation"]
    assert (one.about["training"]["learner"], one.without) == ("simplified", ("statistics",))
    known = {"compute": [0.1, 0.3], "noise": 900.0, "signal": 1.0}
    never_simulated = {"retransmits_per_s": 9.0, "rtt_s": [0.1, 0.2], "bytes_per_s": [1e6, 1e8]}
    seen = [
        torch.from_numpy(AdditivePolicy(one.net).observe(Window.of([60, 60], **known, **more)))[None]
        for more in ({}, never_simulated)
    ]
    active = torch.ones(1, 2, dtype=torch.bool)
    torch.testing.assert_close(one.net(seen[0], active)[0], one.net(seen[1], active)[0])


def test_unknown_learners_and_rewards_are_refused() -> None:
    for wrong in ({"learner": "dqn"}, {"reward": "fun"}):
        refused(ConfigError, "", PaperTrainingConfig, **wrong)


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
