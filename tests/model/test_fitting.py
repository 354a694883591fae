"""What the rules learn online, from windows without noise and with it."""

from __future__ import annotations

import numpy as np
import pytest

from dynamix.model.costs import WorkerCosts
from dynamix.model.exchange import OVERLAPS, Exchange
from dynamix.model.least_squares import LeastSquares
from dynamix.model.measured import busy_seconds, exposed_seconds, slowest_seconds
from dynamix.window import Window


def _window(sizes: np.ndarray, seconds: np.ndarray, std: float = 1e-5, **more: object) -> Window:
    return Window.of(sizes, compute=seconds, compute_std=std, steps=5, base_batch=100 * sizes.shape[-1], **more)  # type: ignore[arg-type]


def test_least_squares_recover_alpha_and_beta_exactly_and_say_when_they_cannot() -> None:
    alpha, beta, fit = np.array([[0.1, 0.0], [0.02, 0.3]]), np.array([[1e-3, 4e-3], [2e-3, 1e-3]]), LeastSquares(0.9)
    first = np.array([[100.0, 100.0], [100.0, 100.0]])
    fit = fit.update(first, alpha + beta * first)
    a, b, told = fit.solve()
    assert not told.any()
    np.testing.assert_allclose(a + b * first, alpha + beta * first)  # proportional: right where it was seen
    second = np.array([[150.0, 60.0], [140.0, 100.0]])
    fit = fit.update(second, alpha + beta * second)
    a, b, told = fit.solve()
    assert told.tolist() == [[True, True], [True, False]]
    np.testing.assert_allclose(a[told], alpha[told], atol=1e-9)
    np.testing.assert_allclose(b[told], beta[told], rtol=1e-7)


def test_least_squares_never_give_a_negative_cost() -> None:
    fit = LeastSquares()
    for batch, seconds in ((10.0, 0.1), (20.0, 0.3), (30.0, 0.2)):
        fit = fit.update(np.array([batch]), np.array([seconds]))
        alpha, beta, _ = fit.solve()
        assert alpha[0] >= 0
        assert beta[0] > 0
    falling = LeastSquares()
    for batch, seconds in ((10.0, 0.3), (20.0, 0.1)):
        falling = falling.update(np.array([batch]), np.array([seconds]))
    assert not falling.solve()[2].any()


def test_offsets_of_the_bank_are_recovered_and_its_line_touches_the_costs() -> None:
    offset, beta, costs = np.array([3.0, 20.0, 60.0]), np.array([1e-3, 2e-3, 5e-3]), WorkerCosts(pooled=0.0)
    alpha = offset * beta
    for scale in (1.0, 1.4, 0.8, 1.2, 0.6, 1.5, 1.0):
        sizes = np.rint(np.array([100, 90, 110]) * scale).astype(int)
        costs = costs.update(_window(sizes, alpha + beta * sizes))
    a, b = costs.alpha, costs.beta
    np.testing.assert_allclose(a + b * sizes, alpha + beta * sizes, rtol=2e-3)
    np.testing.assert_allclose(b, beta, rtol=0.03)
    np.testing.assert_allclose(a / b, offset, atol=2.0)  # samples


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


def test_where_time_grows_faster_than_the_batch_no_fixed_cost_is_made_up() -> None:
    costs = WorkerCosts()
    for scale in (1.0, 1.5, 0.7, 1.3, 0.9, 1.6, 1.0):
        sizes = np.rint(np.array([100, 100]) * scale).astype(int)
        seconds = np.array([1e-3, 1e-5]) * sizes ** np.array([1.0, 2.0])
        costs = costs.update(_window(sizes, seconds))
    alpha, beta = costs.alpha, costs.beta
    np.testing.assert_allclose(alpha + beta * sizes, seconds, rtol=0.01)
    assert (alpha >= 0).all()
    assert (alpha < 0.05 * seconds).all()


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


@pytest.mark.parametrize("overlap", OVERLAPS[[0, 2, 4]])
def test_exchange_and_overlap_are_recovered_from_steps_of_different_length(overlap: float) -> None:
    exchange = Exchange()
    for slowest in (0.1, 0.25, 0.15, 0.4, 0.2, 0.3):
        whole = (slowest**overlap + 0.2**overlap) ** (1 / overlap)
        exchange = exchange.update(np.array(slowest), np.array(whole - slowest))
    ahead = np.array([0.05, 0.5])
    truth = (ahead**overlap + 0.2**overlap) ** (1 / overlap)
    np.testing.assert_allclose(np.exp(exchange.log_step(ahead)), truth, rtol=0.01)


def test_a_slower_link_is_taken_at_once() -> None:
    exchange = Exchange()
    for _ in range(10):
        exchange = exchange.update(np.array(0.1), np.array(0.1))
    exchange = exchange.update(np.array(0.1), np.array(0.2))
    assert float(np.exp(exchange.log_step(np.array([0.1]))[0])) == pytest.approx(0.3, rel=1e-6)


def test_seconds_of_the_slowest_are_computing_and_waiting_together() -> None:
    window = Window.of([4, 4], compute=[0.1, 0.2], wait=[0.15, 0.05], communication=[0.03, np.nan], data=[np.nan, 0.01])
    assert float(slowest_seconds(window)) == pytest.approx(0.25)
    assert float(exposed_seconds(window)) == pytest.approx(0.03)
    np.testing.assert_allclose(busy_seconds(window), [0.1, 0.21])
