"""The learned policy: equivariance, bounds whatever was (not) measured, and files that can be trusted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.features import features
from dynamix.policies.goodput import Goodput, wish
from dynamix.policies.learned.policy import TRUST, LearnedPolicy, ResidualNet
from dynamix.policies.registry import make_policy
from dynamix.window import PER_CLUSTER, PER_WORKER, Bounds, Window


def _random_net(seed: int = 0) -> ResidualNet:
    """A network far from zero, so that nothing holds only because the answer is the rule's."""
    torch.manual_seed(seed)
    net = ResidualNet()
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    return net


def _window(workers: int, seed: int, *, clusters: int | None = None) -> Window:
    rng = np.random.default_rng(seed)
    shape = (workers,) if clusters is None else (clusters, workers)
    known = {name: rng.uniform(0.05, 1.0, shape) for name in PER_WORKER}
    return Window.of(
        rng.integers(1, 200, shape), **known, noise=rng.uniform(10, 1e4, shape[:-1]), signal=np.ones(shape[:-1])
    )


def _some(window: Window, pick: object) -> Window:
    known = {n: getattr(window, n)[..., pick] for n in PER_WORKER}
    return Window.of(window.batch_size[..., pick], **known, **{n: getattr(window, n) for n in PER_CLUSTER})


def test_features_and_decisions_follow_a_permutation_of_the_workers() -> None:
    order = np.random.default_rng(1).permutation(7)
    one, other = LearnedPolicy(_random_net()), LearnedPolicy(_random_net())
    for seed in range(4):
        window = _window(7, seed)
        swapped = _some(window, order)
        np.testing.assert_allclose(features(window)[order], features(swapped), rtol=1e-5, atol=1e-6)
        seen, swapped_seen = one.observe(window, Bounds.of(7)), other.observe(swapped, Bounds.of(7))
        np.testing.assert_allclose(seen[order], swapped_seen, rtol=1e-4, atol=1e-4)
        delta, growth = one.act(seen, window.batch_size > 0)
        delta_swapped, growth_swapped = other.act(swapped_seen, swapped.batch_size > 0)
        np.testing.assert_allclose(delta[order], delta_swapped, atol=1e-3)
        np.testing.assert_allclose(growth, growth_swapped, atol=1e-3)


def test_a_live_window_and_a_row_of_a_simulated_one_are_the_same_to_features_and_policy() -> None:
    simulated, live = LearnedPolicy(_random_net()), [LearnedPolicy(_random_net()) for _ in range(3)]
    for seed in range(3):
        batch = _window(4, seed, clusters=3)
        answer = simulated.decide(batch, Bounds.of(4))
        for c in range(3):
            known = {n: getattr(batch, n)[c] for n in PER_WORKER + PER_CLUSTER}
            window = Window.of(batch.batch_size[c], **known)
            np.testing.assert_array_equal(features(batch)[c], features(window))
            # One job's network answers in NumPy, several jobs' in torch: rounding may move a sample.
            np.testing.assert_allclose(live[c].decide(window, Bounds.of(4)), answer[c], atol=1)


@pytest.mark.parametrize("idle", [0, 2])
def test_one_jobs_answer_in_numpy_is_what_torch_would_say(idle: int) -> None:
    net = _random_net(3)
    observed = np.random.default_rng(0).normal(size=(5, net.inputs)).astype(np.float32)
    active = np.arange(5) >= idle
    local, shared, _ = net(torch.from_numpy(observed)[None], torch.from_numpy(active)[None])
    delta, growth = LearnedPolicy(net).act(observed, active)
    np.testing.assert_allclose(delta[active], local[0, active, 0].detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(growth, shared[0, 0].detach(), rtol=1e-4, atol=1e-5)


def test_untrained_it_answers_as_the_goodput_rule() -> None:
    policy, rule = LearnedPolicy(), Goodput()
    for seed in range(5):
        window = _window(6, seed)
        np.testing.assert_array_equal(policy.decide(window, Bounds.of(6)), rule.decide(window, Bounds.of(6)))


def test_no_size_goes_further_beyond_the_one_in_force_and_the_rules_than_trusted() -> None:
    policy, rule, bounds = LearnedPolicy(_random_net(1)), Goodput(), Bounds.of(6, 1, 4096)
    for seed in range(5):
        window = _window(6, seed)
        answer, own = policy.decide(window, bounds), wish(rule.fit_model(window), window, bounds)
        assert (answer <= np.maximum(own, window.batch_size) * np.exp(TRUST) + 1).all()
        assert (answer >= np.minimum(own, window.batch_size) * np.exp(-TRUST) - 1).all()


def test_the_global_batch_is_held_below_the_rules_or_left_but_never_pushed_beyond_it() -> None:
    for seed in range(5):
        window, bounds = _window(6, seed), Bounds.of(6, 1, 4096)
        policy, none = LearnedPolicy(), np.zeros(6)
        policy.observe(window, bounds)
        held, left, pushed = (policy.allocate(window, bounds, none, np.array(g)) for g in (-1.0, 0.0, 1.0))
        np.testing.assert_array_equal(pushed, left)
        assert held.sum() < left.sum()


_VALUES = st.sampled_from([np.nan, np.nan, 0.0, 1e-9, 0.1, 1.0, 1e9, np.inf, -1.0])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), workers=st.integers(1, 6), quantum=st.sampled_from([1, 8]))
def test_any_pattern_of_missing_and_absurd_values_gives_sizes_inside_the_bounds(
    data: st.DataObject, workers: int, quantum: int
) -> None:
    policy, bounds = LearnedPolicy(_random_net(3)), Bounds.of(workers, 0, 512, quantum=quantum)
    each = {"min_size": workers, "max_size": workers}
    for _ in range(3):
        sizes = data.draw(st.lists(st.integers(0, 512 // quantum).map(quantum.__mul__), **each))
        known = {n: data.draw(st.lists(_VALUES, **each)) for n in ("compute", "data", "wait", "cpu")}
        cluster = {n: data.draw(_VALUES) for n in ("noise", "signal", "base_batch")}
        answer = policy.decide(Window.of(sizes, **known, **cluster), bounds)
        assert ((answer >= bounds.low) & (answer <= bounds.high) & (answer % quantum == 0)).all()
        assert bounds.total_low <= answer.sum() <= bounds.total_high


def test_before_any_timing_the_allocation_stays() -> None:
    policy = LearnedPolicy(_random_net())
    assert policy.decide(Window.of([10, 20, 30], noise=5.0, signal=1.0), Bounds.of(3)).tolist() == [10, 20, 30]


def test_one_worker_adapts_only_the_global_batch() -> None:
    policy = LearnedPolicy(_random_net())
    bounds = Bounds.of(1)
    seen = policy.observe(window := _window(1, 0), bounds)
    delta, _ = policy.act(seen, window.batch_size > 0)
    one, other = (policy.allocate(window, bounds, delta + more, np.array(-0.3)) for more in (0, 1))
    np.testing.assert_array_equal(one, other)


def test_saved_and_resumed_it_decides_the_same(tmp_path: Path) -> None:
    policy = LearnedPolicy(_random_net())
    policy.decide(_window(4, 0), Bounds.of(4))
    policy.save(tmp_path / "p.safetensors")
    again = make_policy(str(tmp_path / "p.safetensors"))
    again.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    for seed in range(1, 4):
        window = _window(4, seed)
        np.testing.assert_array_equal(policy.decide(window, Bounds.of(4)), again.decide(window, Bounds.of(4)))
