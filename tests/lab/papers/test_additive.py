"""The paper's form: exact steps, its range, ablations, any pattern of missing values, files that can be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.errors import ConfigError, PolicyFileError
from dynamix.features import FEATURES
from dynamix.policies.registry import make_policy
from dynamix.window import PER_WORKER, Bounds, Window
from dynamix_lab.papers.additive import (
    OWN_FEATURES,
    STATE_FAMILIES,
    Actions,
    AdditiveNet,
    AdditivePolicy,
    kept_features,
)
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


@pytest.mark.parametrize(("index", "step"), list(enumerate((-100, -25, 0, 25, 100))))
def test_at_128_samples_a_worker_actions_are_the_papers(index: int, step: int) -> None:
    window = Window.of([140, 200, 330], compute=0.1, base_batch=3 * 128)
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


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_an_ablated_family_of_the_state_is_not_seen(family: str) -> None:
    policy = _random(without=(family,))
    seen = policy.observe(_window(4))
    names = [*(n.removeprefix("mean_").removeprefix("max_") for n in FEATURES), *OWN_FEATURES]
    masked = np.array([name in STATE_FAMILIES[family] for name in names])
    assert not seen[:, masked].any()
    assert seen[:, ~masked].any()


def test_only_families_of_the_state_can_be_left_out() -> None:
    refused(ConfigError, "network, system, statistics", AdditivePolicy, without=("nonsense",))


def test_every_named_feature_of_a_family_exists() -> None:
    everything = {*FEATURES, *OWN_FEATURES}
    assert all(name in everything for names in STATE_FAMILIES.values() for name in names)
    assert kept_features(()).all()


def test_folded_inputs_no_longer_matter_and_the_answer_at_their_value_is_unchanged() -> None:
    policy, window = _random(), _window(5)
    seen, active = torch.from_numpy(policy.observe(window))[None], torch.ones(1, 5, dtype=torch.bool)
    constant = torch.zeros(seen.shape[-1], dtype=torch.bool)
    constant[:9] = True
    seen[..., constant] = 0.7
    before, _ = policy.net(seen, active)
    policy.net.fold(constant, torch.full((seen.shape[-1],), 0.7))
    torch.testing.assert_close(policy.net(seen, active)[0], before)
    seen[..., constant] = 4.0
    torch.testing.assert_close(policy.net(seen, active)[0], before)


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


@pytest.mark.parametrize(
    "wrong", [{"steps": (1.0, 2.0)}, {"low": 0.0}, {"low": 64.0, "high": 32.0}, {"scale": "other"}]
)
def test_impossible_actions_name_what_is_possible(wrong: dict[str, Any]) -> None:
    refused(ConfigError, "", Actions, **wrong)
