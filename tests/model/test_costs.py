"""What is learned of each worker's costs, from windows without noise and with it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dynamix.model.costs import OFFSETS, WorkerCosts
from dynamix.model.state import saved
from dynamix.window import Floats, Window


def _window(sizes: np.ndarray, seconds: np.ndarray, std: float = 1e-5, **more: object) -> Window:
    known: dict[str, Any] = {"steps": 5, "base_batch": 100 * sizes.shape[-1], **more}
    return Window.of(sizes, compute=seconds, compute_std=std, **known)


def test_a_slowdown_moves_the_level_at_once_and_leaves_the_offset_alone() -> None:
    alpha, beta, costs = np.array([0.02, 0.02]), np.array([1e-3, 1e-3]), WorkerCosts()
    for scale in (1.0, 1.5, 0.7, 1.2, 1.0):
        sizes = np.rint(np.array([100, 100]) * scale).astype(int)
        costs = costs.update(_window(sizes, alpha + beta * sizes))
    slow = np.array([1.0, 2.0])
    costs = costs.update(_window(sizes, slow * (alpha + beta * sizes)))
    a, b = costs.alpha, costs.beta
    np.testing.assert_allclose(b, slow * beta, rtol=0.05)
    np.testing.assert_allclose(a + b * sizes, slow * (alpha + beta * sizes), rtol=0.01)


@pytest.mark.parametrize("steps_before", [1, 2, 3, 4])
def test_a_slowdown_that_starts_within_a_window_is_seen_in_full(steps_before: int) -> None:
    costs, sizes = WorkerCosts(), np.array([100, 100])
    quiet = np.array([0.1, 0.1])
    for _ in range(4):
        costs = costs.update(_window(sizes, quiet, std=5e-4))
    steps = np.where(np.arange(5)[:, None] < steps_before, quiet, quiet * np.array([1.0, 2.0]))
    window = Window.of(sizes, compute=steps.mean(0), compute_std=steps.std(0, ddof=1), steps=5, base_batch=200)
    costs = costs.update(window)
    alpha, beta = costs.alpha, costs.beta
    np.testing.assert_allclose(alpha + beta * sizes, [0.1, 0.2], rtol=0.03)


def test_jitter_is_averaged_not_followed() -> None:
    rng, costs, sizes = np.random.default_rng(3), WorkerCosts(), np.array([100] * 8)
    errors = []
    for i in range(60):
        steps = 0.1 * (1 + 0.1 * rng.normal(size=(5, 8)))
        window = _window(sizes, steps.mean(0), std=float(steps.std(0, ddof=1).mean()))
        costs = costs.update(window)
        alpha, beta = costs.alpha, costs.beta
        if i >= 20:
            errors.append((alpha + beta * sizes) / 0.1 - 1)
    assert np.std(errors) < 0.6 * 0.1 / np.sqrt(5)


def test_a_worker_without_times_gets_the_others_mean_until_it_is_measured() -> None:
    costs = WorkerCosts()
    window = _window(np.array([50, 50, 50]), np.array([0.1, np.nan, 0.3]))
    costs = costs.update(window)
    alpha, beta = costs.alpha, costs.beta
    assert (alpha + 50 * beta)[1] == pytest.approx(0.2)
    costs = costs.update(_window(np.array([50, 50, 50]), np.array([0.1, 0.5, np.nan])))
    alpha, beta = costs.alpha, costs.beta
    np.testing.assert_allclose(alpha + 50 * beta, [0.1, 0.5, 0.3], rtol=0.01)


def _after(*seconds: float, sizes: int = 100) -> tuple[WorkerCosts, Floats]:
    """Costs of three workers of which the first took these seconds, and what it is believed to take now."""
    costs, batch = WorkerCosts(), np.array([sizes] * 3)
    for each in seconds:
        costs = costs.update(_window(batch, np.array([each, 0.1, 0.1]), std=1e-3))
    return costs, costs.alpha + costs.beta * batch


def test_a_stall_of_one_window_is_forgotten_and_a_jump_that_lasts_is_not() -> None:
    quiet = [0.1] * 6
    stalled, seconds = _after(*quiet, 0.2)
    np.testing.assert_allclose(seconds, [0.2, 0.1, 0.1], rtol=0.02)
    back, seconds = _after(*quiet, 0.2, 0.1)
    np.testing.assert_allclose(seconds, 0.1, rtol=0.01)
    stayed, seconds = _after(*quiet, 0.2, 0.2)
    np.testing.assert_allclose(seconds, [0.2, 0.1, 0.1], rtol=0.01)
    assert np.isfinite(stalled.before[0]).all()
    assert np.isnan(stalled.before[1:]).all()
    assert np.isnan(stayed.before).all()
    np.testing.assert_allclose(stayed.lasted, [1.0, 0.0])
    np.testing.assert_allclose(back.lasted, [0.0, 1.0])


@pytest.mark.parametrize("workers", [2, 5])
def test_what_all_workers_share_is_believed_as_far_as_it_is_followed(workers: int) -> None:
    moved = []
    for follow in (0.0, 0.3, 1.0):
        costs, sizes = WorkerCosts(follow=follow), np.array([100] * workers)
        for seconds in (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.13):
            costs = costs.update(_window(sizes, np.full(workers, seconds), std=0.02))
        moved.append(np.log((costs.alpha + costs.beta * sizes) / 0.1) / np.log(1.3))
    np.testing.assert_allclose(moved[2], 1.0, atol=1e-6)
    np.testing.assert_allclose(moved[1], 0.3 + 0.7 * moved[0], atol=1e-6)
    assert (moved[0] < 0.6).all()


def test_a_lean_speaks_for_its_offset_from_the_next_window_on() -> None:
    window = _window(np.array([100, 100]), np.array([0.1, 0.2]))
    costs = WorkerCosts().update(window)
    leaning = costs.lean_to(np.array([1.0]), 50.0)
    np.testing.assert_array_equal(leaning.weights, costs.weights)
    assert costs.lean.tolist() == [0.0]
    after, plain = leaning.update(window), costs.update(window)
    chosen = int(np.argmin(abs(OFFSETS - 1.0)))
    assert (after.weights[..., chosen] > 0.85).all()
    assert (plain.weights[..., chosen] < 0.5).all()
    unknown = leaning.lean_to(np.array([np.nan]), 50.0)
    np.testing.assert_array_equal(unknown.lean, leaning.lean)
    assert not costs.lean_to(np.array([np.nan]), 50.0).lean.any()
    np.testing.assert_allclose(leaning.lean[..., -1], 50.0 * np.log(2.0) ** 2)  # growth with a power has no offset
    again = costs.restored(json.loads(json.dumps(saved(costs))), lean=leaning.lean)
    np.testing.assert_array_equal(again.update(window).weights, after.weights)


def test_clusters_lean_each_for_itself() -> None:
    costs = WorkerCosts().update(Window.of(np.full((2, 1, 2), 100), compute=np.full((2, 1, 2), 0.1)))
    together = costs.lean_to(np.array([[[0.5]], [[2.0]]]), 10.0)
    for c, offset in enumerate((0.5, 2.0)):
        np.testing.assert_array_equal(together.lean[c, 0], costs.lean_to(np.array([offset]), 10.0).lean)
