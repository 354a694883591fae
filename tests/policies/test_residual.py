"""What the learned policy remembers: the rule's mistakes, and where a worker's time really grows faster than a line."""

from __future__ import annotations

import json

import numpy as np

from dynamix.features import LOCAL_FEATURES
from dynamix.model.elasticity import LocalElasticity
from dynamix.policies.learned.policy import LearnedPolicy
from dynamix.policies.learned.residual import OWN_FEATURES
from dynamix.window import Bounds, Floats, Ints, Window

BOUNDS = Bounds.of(2, 1, 800)


def _seconds(sizes: Ints, cliff: float = 1e9, factor: float = 1.0) -> Floats:
    """0.01 + 0.001 b, and beyond the cliff twice as long for twice the batch on top of it."""
    return np.asarray((0.01 + 1e-3 * sizes) * (1 + 2 * np.maximum(sizes / cliff - 1, 0)) * factor)


def _see(policy: LearnedPolicy, sizes: list[int], **how: float) -> dict[str, Floats]:
    batch = np.array(sizes)
    known = {"compute": _seconds(batch, **how), "compute_std": 1e-4, "communication": 0.02, "wait": 0.0}
    window = Window.of(batch, **known, steps=5, noise=1e5, signal=1.0, base_batch=200)
    seen = policy.observe(window, BOUNDS)[..., len(LOCAL_FEATURES) :]
    assert np.isfinite(seen).all()
    return {name: seen[..., i].astype(np.float64) for i, name in enumerate(OWN_FEATURES)}


def test_a_cliff_that_was_crossed_is_remembered_below_it() -> None:
    bent, straight = LearnedPolicy(), LearnedPolicy()
    for sizes in ([100, 100], [120, 120], [180, 180], [240, 240], [110, 110]):
        with_cliff = _see(bent, sizes, cliff=150.0)
        without = _see(straight, sizes)
    assert (with_cliff["warned"] > 0.1).all()  # the rule's answer is larger than what is in force
    assert (abs(without["warned"]) < 0.1).all()


def test_a_jump_of_speed_shows_in_the_surprise_and_is_forgotten_with_age() -> None:
    policy = LearnedPolicy()
    for _ in range(4):
        calm = _see(policy, [100, 100])
    hit = _see(policy, [100, 100], factor=2.0)
    later = [_see(policy, [100, 100], factor=2.0) for _ in range(3)][-1]
    assert (abs(calm["surprise"]) < 0.02).all()
    np.testing.assert_allclose(hit["surprise"], np.log(2), atol=0.05)
    np.testing.assert_allclose(later["from_best"], np.log(2), atol=0.1)
    assert (hit["age"] < later["age"]).all()
    assert (hit["hazard"] > calm["hazard"]).all()


def test_a_slowdown_that_stays_does_not_change_the_learned_growth() -> None:
    learned = []
    for factor in (1.0, 3.0):
        curve, unit = LocalElasticity(), np.array([100.0])
        for size in (100, 130, 170, 120):
            curve = curve.update(unit, np.array([float(size)]), _seconds(np.array([size])) * factor)
        learned.append(curve.excess(unit, np.array([0.01]), np.array([1e-3])))
    np.testing.assert_allclose(learned[0], learned[1])
    assert (abs(learned[0]) < 0.02).all()


def test_saved_and_restored_it_goes_on_the_same() -> None:
    one, other = LearnedPolicy(), LearnedPolicy()
    for sizes in ([100, 90], [120, 80], [110, 95]):
        _see(one, sizes)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    ours, theirs = _see(one, [130, 70]), _see(other, [130, 70])
    for name in OWN_FEATURES:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_another_number_of_workers_starts_anew() -> None:
    policy = LearnedPolicy()
    _see(policy, [100, 100])
    policy.observe(Window.of([50, 50, 50], compute=0.1), Bounds.of(3))
    assert policy.memory.windows == 1
    assert policy.fitted.now.sizes.tolist() == [50, 50, 50]
