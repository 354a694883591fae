"""The goodput rule: what it decides where the answer is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dynamix.policies.goodput import Goodput
from dynamix.policies.registry import make_policy
from dynamix.window import Bounds, Window
from tests.policies.worlds import affine, goodput


def test_a_static_size_can_be_named() -> None:
    window = Window.of([32, 32])
    assert make_policy("static:256").decide(window, Bounds.of(2)).tolist() == [256, 256]
    assert make_policy("static:256").decide(window, Bounds.of(2, 1, [300, 100])).tolist() == [256, 100]


@pytest.mark.parametrize("overlap", [1.0, 2.0])
def test_goodput_finds_the_best_of_all_allocations_of_a_small_cluster(overlap: float) -> None:
    alpha, beta, exchange, phi, bounds = [0.02, 0.0, 0.03], [1e-3, 4e-3, 2e-3], 0.2, 400.0, Bounds.of(3, 1, 256)
    policy, sizes = Goodput(), np.array([64, 64, 64])
    for _ in range(8):
        sizes = policy.decide(affine(sizes, alpha, beta, exchange=exchange, phi=phi, overlap=overlap), bounds)
    axes = [np.arange(1, 257, 3)] * 3
    every = np.stack(np.meshgrid(*axes), -1).reshape(-1, 3)
    best = goodput(every, alpha, beta, exchange, phi, overlap).max()
    assert goodput(sizes, alpha, beta, exchange, phi, overlap) >= 0.995 * best


def test_a_slower_worker_gets_less_and_a_dearer_exchange_makes_batches_larger() -> None:
    def settled(beta: list[float], exchange: float) -> np.ndarray:
        policy, sizes = Goodput(), np.array([64, 64])
        for _ in range(30):
            sizes = policy.decide(affine(sizes, 0.01, beta, exchange=exchange, phi=1000.0), Bounds.of(2))
        return sizes

    even, uneven, dear = settled([1e-3, 1e-3], 0.05), settled([1e-3, 3e-3], 0.05), settled([1e-3, 1e-3], 0.5)
    assert abs(int(even[0]) - int(even[1])) <= 1
    assert uneven[0] > 2 * uneven[1]
    assert dear.sum() > 1.5 * even.sum()


def test_the_global_batch_grows_slowly_where_training_has_not_been_and_at_once_where_it_has() -> None:
    policy, sizes, seen = Goodput(), np.array([64, 64]), [128]
    for phi in [1e4] * 12 + [10.0] * 20 + [1e4] * 12:
        sizes = policy.decide(affine(sizes, 0.1, 1e-3, exchange=0.5, phi=phi), Bounds.of(2))
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
            window = affine(sizes, 0.05, 1e-3, exchange=0.05, phi=1000.0)
            sizes = policy.decide(dataclasses.replace(window, steps=np.asarray(steps)), Bounds.of(2))
        return int(sizes.sum())

    free = settled(10, steps=500.0)
    # What is left of the way promises less than half a per cent.
    assert abs(settled(300 // steps + 10, steps=float(steps)) / free - 1) < 0.15


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
