"""The model-based rules: what each decides where the answer is known, and what must hold whatever is measured."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.errors import StateError
from dynamix.policies.goodput import Goodput
from dynamix.policies.registry import make_policy
from dynamix.window import PER_WORKER, Bounds, Window

NAMES = ("noise_scale", "pollux", "cannikin", "goodput", "static:48")


def _world(sizes: np.ndarray, alpha: Any, beta: Any, *, exchange: float, phi: float, overlap: float = 1.0) -> Window:
    """One noiseless window of an affine cluster."""
    seconds = np.asarray(alpha) + np.asarray(beta) * sizes
    slowest = seconds.max(-1, keepdims=True)
    whole = (slowest**overlap + exchange**overlap) ** (1 / overlap)
    known = {
        "compute": seconds,
        "compute_std": 1e-4 * seconds,
        "wait": slowest - seconds,
        "communication": whole - slowest,
    }
    return Window.of(sizes, **known, data=0.0, noise=phi, signal=1.0, steps=5, base_batch=64 * sizes.shape[-1])


def _goodput(sizes: np.ndarray, alpha: Any, beta: Any, exchange: float, phi: float, overlap: float = 1.0) -> np.ndarray:
    slowest, total = (np.asarray(alpha) + np.asarray(beta) * sizes).max(-1), sizes.sum(-1)
    return np.asarray(total / (slowest**overlap + exchange**overlap) ** (1 / overlap) / (phi + total))


def test_a_static_size_can_be_named() -> None:
    window = Window.of([32, 32])
    assert make_policy("static:256").decide(window, Bounds.of(2)).tolist() == [256, 256]
    assert make_policy("static:256").decide(window, Bounds.of(2, 1, [300, 100])).tolist() == [256, 100]


@pytest.mark.parametrize("overlap", [1.0, 2.0])
def test_goodput_finds_the_best_of_all_allocations_of_a_small_cluster(overlap: float) -> None:
    alpha, beta, exchange, phi, bounds = [0.02, 0.0, 0.03], [1e-3, 4e-3, 2e-3], 0.2, 400.0, Bounds.of(3, 1, 256)
    policy, sizes = Goodput(), np.array([64, 64, 64])
    for _ in range(8):
        sizes = policy.decide(_world(sizes, alpha, beta, exchange=exchange, phi=phi, overlap=overlap), bounds)
    axes = [np.arange(1, 257, 3)] * 3
    every = np.stack(np.meshgrid(*axes), -1).reshape(-1, 3)
    best = _goodput(every, alpha, beta, exchange, phi, overlap).max()
    assert _goodput(sizes, alpha, beta, exchange, phi, overlap) >= 0.995 * best


def test_a_slower_worker_gets_less_and_a_dearer_exchange_makes_batches_larger() -> None:
    def settled(beta: list[float], exchange: float) -> np.ndarray:
        policy, sizes = Goodput(), np.array([64, 64])
        for _ in range(30):
            sizes = policy.decide(_world(sizes, 0.01, beta, exchange=exchange, phi=1000.0), Bounds.of(2))
        return sizes

    even, uneven, dear = settled([1e-3, 1e-3], 0.05), settled([1e-3, 3e-3], 0.05), settled([1e-3, 1e-3], 0.5)
    assert abs(int(even[0]) - int(even[1])) <= 1
    assert uneven[0] > 2 * uneven[1]
    assert dear.sum() > 1.5 * even.sum()


def test_the_global_batch_grows_slowly_where_training_has_not_been_and_at_once_where_it_has() -> None:
    policy, sizes, seen = Goodput(), np.array([64, 64]), [128]
    for phi in [1e4] * 12 + [10.0] * 20 + [1e4] * 12:
        sizes = policy.decide(_world(sizes, 0.1, 1e-3, exchange=0.5, phi=phi), Bounds.of(2))
        seen.append(int(sizes.sum()))
    growth = np.diff(np.log(seen[:13]))
    assert (growth > 0.07).all(), "less than two per cent a step, in windows of five steps"
    assert (growth < 0.12).all()
    assert min(seen[13:33]) < seen[12] / 2
    back = next(i for i, total in enumerate(seen[33:]) if total >= 0.9 * seen[12])
    assert back <= 6, "the noise scale is smoothed over a few windows"


@pytest.mark.parametrize("steps", [1, 5, 50])
def test_slow_growth_ends_where_free_growth_would(steps: int) -> None:
    def settled(windows: int, steps: float) -> int:
        policy, sizes = Goodput(), np.array([64, 64])
        for _ in range(windows):
            window = _world(sizes, 0.05, 1e-3, exchange=0.05, phi=1000.0)
            sizes = policy.decide(dataclasses.replace(window, steps=np.asarray(steps)), Bounds.of(2))
        return int(sizes.sum())

    free = settled(10, steps=500.0)
    # What is left of the way promises less than half a per cent.
    assert abs(settled(300 // steps + 10, steps=float(steps)) / free - 1) < 0.15


@st.composite
def _runs(draw: st.DrawFn) -> tuple[Bounds, np.ndarray, np.random.Generator, float]:
    workers, q = draw(st.integers(1, 6)), draw(st.sampled_from([1, 4]))
    low = np.array(draw(st.lists(st.integers(0, 4), min_size=workers, max_size=workers))) * q
    high = low + np.array(draw(st.lists(st.integers(1, 60), min_size=workers, max_size=workers))) * q
    top = draw(st.integers(max(int(low.sum()) // q, 1), int(high.sum()) // q)) * q
    change = draw(st.sampled_from([np.inf, 1.5]))
    bounds = Bounds.of(workers, low, high, total_high=top, quantum=q, max_change=change)
    return bounds, (low + high) // 2 // q * q, np.random.default_rng(draw(st.integers(0, 10**6))), draw(st.floats(0, 1))


def _anything(sizes: np.ndarray, rng: np.random.Generator, missing: float) -> Window:
    """A window of positive random figures, each missing with that chance; now and then absurd."""
    shape = sizes.shape
    known: dict[str, Any] = {}
    for name in PER_WORKER:
        value = np.exp(rng.normal(-2, rng.choice([0.1, 3.0]), shape))
        known[name] = np.where(rng.random(shape) < missing, np.nan, value)
    for name in ("noise", "signal", "steps", "global_norm_sq"):
        value = np.exp(rng.normal(2, 3, shape[:-1])) * rng.choice([1.0, 1.0, 1.0, 0.0, -1.0])
        known[name] = np.where(rng.random(shape[:-1]) < missing, np.nan, value)
    return Window.of(sizes, **known)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(run=_runs())
def test_bounds_hold_whatever_is_measured_or_missing(
    name: str, run: tuple[Bounds, np.ndarray, np.random.Generator, float]
) -> None:
    bounds, sizes, rng, missing = run
    policy = make_policy(name)
    for _ in range(4):
        before = sizes
        sizes = policy.decide(_anything(sizes, rng, missing), bounds)
        assert sizes.dtype == np.int64
        assert sizes.shape == before.shape
        assert ((sizes >= bounds.low) & (sizes <= bounds.high) & (sizes % bounds.quantum == 0)).all()
        if np.isinf(bounds.max_change):
            assert bounds.total_low <= sizes.sum() <= bounds.total_high


@pytest.mark.parametrize("name", NAMES)
def test_nothing_measured_changes_no_share(name: str) -> None:
    window, policy = Window.of([[30, 30], [30, 30]]), make_policy(name)
    for _ in range(3):
        sizes = policy.decide(window, Bounds.of(2))
        assert (sizes[:, 0] == sizes[:, 1]).all()
        if not name.startswith("static"):
            assert (sizes == 30).all()


@pytest.mark.parametrize("name", NAMES)
def test_permuting_the_workers_permutes_the_answer(name: str) -> None:
    rng = np.random.default_rng(5)
    alpha, beta = rng.uniform(0, 0.05, 6), rng.uniform(1e-3, 5e-3, 6)
    order, bounds = rng.permutation(6), Bounds.of(6, 1, 400)
    one, other = make_policy(name), make_policy(name)
    a, b = np.full(6, 64), np.full(6, 64)
    for _ in range(5):
        a = one.decide(_world(a, alpha, beta, exchange=0.1, phi=900.0), bounds)
        b = other.decide(_world(b, alpha[order], beta[order], exchange=0.1, phi=900.0), bounds)
        assert (np.abs(a[order] - b) <= 1).all()
        b = a[order]


@pytest.mark.parametrize("name", NAMES)
def test_clusters_in_one_array_are_decided_as_if_alone(name: str) -> None:
    rng = np.random.default_rng(6)
    alpha, beta = rng.uniform(0, 0.05, (3, 4)), rng.uniform(1e-3, 5e-3, (3, 4))
    together, alone = make_policy(name), [make_policy(name) for _ in range(3)]
    sizes, bounds = np.full((3, 4), 64), Bounds.of(4, 1, 400)
    for _ in range(4):
        window = _world(sizes, alpha, beta, exchange=0.1, phi=900.0)
        single = [
            p.decide(_world(sizes[i], alpha[i], beta[i], exchange=0.1, phi=900.0), bounds) for i, p in enumerate(alone)
        ]
        sizes = together.decide(window, bounds)
        np.testing.assert_array_equal(sizes, np.stack(single))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_policy_goes_on_as_if_never_stopped(name: str) -> None:
    rng, bounds = np.random.default_rng(7), Bounds.of(3, 1, 400)
    policy, sizes = make_policy(name), np.full(3, 64)
    for _ in range(4):
        sizes = policy.decide(_world(sizes, 0.02, rng.uniform(1e-3, 3e-3, 3), exchange=0.1, phi=900.0), bounds)
    resumed = make_policy(name)
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    for _ in range(3):
        window = _world(sizes, 0.02, rng.uniform(1e-3, 3e-3, 3), exchange=0.1, phi=900.0)
        sizes = policy.decide(window, bounds)
        np.testing.assert_array_equal(sizes, resumed.decide(window, bounds))
    fresh = make_policy(name)
    fresh.load_state_dict(make_policy(name).state_dict())  # nothing learned yet


@pytest.mark.parametrize("name", NAMES)
def test_another_world_size_starts_over(name: str) -> None:
    policy = make_policy(name)
    for workers in (2, 3, 2):
        sizes = np.full(workers, 64)
        sizes = policy.decide(_world(sizes, 0.02, 1e-3, exchange=0.1, phi=900.0), Bounds.of(workers, 1, 400))
        assert sizes.shape == (workers,)


def test_sizes_stay_where_a_change_promises_next_to_nothing() -> None:
    policy, sizes, bounds = Goodput(), np.array([64, 64, 64]), Bounds.of(3, 8, 512)
    changes = []
    for step in range(30):
        seconds = np.array([0.02, 0.02, 0.02]) + np.array([1e-3, 2e-3, 4e-3]) * sizes
        seconds = seconds * (1 + 0.01 * np.sin(step + np.arange(3)))
        known = {"compute": seconds, "compute_std": 1e-3, "wait": seconds.max() - seconds, "communication": 0.03}
        known |= {"noise": 200.0 * (1 + 0.05 * np.sin(step)), "signal": 1.0}
        window = Window.of(sizes, **known, steps=5, base_batch=192)
        answer = policy.decide(window, bounds)
        changes.append(bool((answer != sizes).any()))
        sizes = answer
    assert any(changes[:5])
    assert sum(changes[10:]) <= 3, "a noise of one per cent is no reason"


def test_sizes_that_are_not_allowed_any_more_do_not_stay() -> None:
    policy, sizes = Goodput(), np.array([50, 50])
    window = Window.of(sizes, compute=[0.1, 0.1], compute_std=1e-3, steps=5, base_batch=100)
    for bounds in (Bounds.of(2, 8, 48), Bounds.of(2, 8, 512, total_low=120), Bounds.of(2, 8, 512, quantum=8)):
        answer = policy.decide(window, bounds)
        assert (answer <= bounds.high).all()
        assert bounds.total_low <= answer.sum() <= bounds.total_high
        assert (answer % bounds.quantum == 0).all()


@pytest.mark.parametrize("name", ["goodput", "dynamix"])
def test_a_state_of_another_version_is_refused_in_words(name: str) -> None:
    with pytest.raises(StateError, match="begin without"):
        make_policy(name).load_state_dict({"costs": {}, "noise": {}})
