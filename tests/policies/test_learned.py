"""The learned policy: equivariance, bounds whatever was (not) measured, and what it remembers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynamix.features import LOCAL_FEATURES, features
from dynamix.policies.goodput import Goodput, wish
from dynamix.policies.learned.policy import TRUST, LearnedPolicy, ResidualNet
from dynamix.policies.learned.residual import OWN_FEATURES
from dynamix.window import PER_CLUSTER, PER_WORKER, Bounds, Window


def _random_net(seed: int = 0) -> ResidualNet:
    """A network far from zero, so that nothing holds only because the answer is the rule's."""
    torch.manual_seed(seed)
    net = ResidualNet()
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    return net


def _window(workers: int, seed: int) -> Window:
    rng = np.random.default_rng(seed)
    known = {name: rng.uniform(0.05, 1.0, workers) for name in PER_WORKER}
    return Window.of(rng.integers(1, 200, workers), **known, noise=rng.uniform(10, 1e4), signal=1.0)


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


def test_one_worker_adapts_only_the_global_batch() -> None:
    policy = LearnedPolicy(_random_net())
    bounds = Bounds.of(1)
    seen = policy.observe(window := _window(1, 0), bounds)
    delta, _ = policy.act(seen, window.batch_size > 0)
    one, other = (policy.allocate(window, bounds, delta + more, np.array(-0.3)) for more in (0, 1))
    np.testing.assert_array_equal(one, other)


def test_a_cliff_that_was_crossed_is_remembered_below_it() -> None:
    warned = {}
    for cliff in (150.0, 1e9):  # beyond it twice as long for twice the batch on top
        policy = LearnedPolicy()
        for size in (100, 120, 180, 240, 110):
            seconds = (0.01 + 1e-3 * size) * (1 + 2 * max(size / cliff - 1, 0))
            known = {"compute": [seconds] * 2, "compute_std": 1e-4, "communication": 0.02, "wait": 0.0}
            window = Window.of([size] * 2, **known, steps=5, noise=1e5, signal=1.0, base_batch=200)
            seen = policy.observe(window, Bounds.of(2, 1, 800))[..., len(LOCAL_FEATURES) :]
        warned[cliff] = seen[..., OWN_FEATURES.index("warned")]
    assert (warned[150.0] > 0.1).all()  # the rule's answer is larger than what is in force
    assert (abs(warned[1e9]) < 0.1).all()
