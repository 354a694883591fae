"""Noise scale, Pollux, Cannikin and affine costs by least squares: what each finds where the answer is known.

What must hold of every rule, whatever is measured, is in tests/policies/test_goodput.py.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynamix.model.state import restored, saved
from dynamix.window import Bounds, Window
from dynamix_lab.baselines.cannikin import Cannikin
from dynamix_lab.baselines.least_squares import LeastSquares
from dynamix_lab.baselines.noise_scale import NoiseScalePolicy
from dynamix_lab.baselines.pollux import Pollux
from tests.policies.worlds import affine, goodput


def test_noise_scale_follows_the_noise_scale_with_equal_shares_and_a_limited_step() -> None:
    policy, sizes, bounds = NoiseScalePolicy(weight=1.0), np.array([48, 16]), Bounds.of(2)
    for phi, expected in ((96.0, [48, 48]), (1000.0, [96, 96]), (1000.0, [192, 192]), (np.nan, [384, 384])):
        sizes = policy.decide(Window.of(sizes, noise=phi, signal=1.0), bounds)
        assert sizes.tolist() == expected
    assert NoiseScalePolicy().decide(Window.of([10, 30]), bounds).tolist() == [20, 20]
    assert NoiseScalePolicy().decide(Window.of([10, 10], noise=1.0, signal=0.0), bounds).tolist() == [20, 20]


@pytest.mark.parametrize("overlap", [1.0, 1.6, 4.0])
@pytest.mark.parametrize("phi", [100.0, 1000.0, 20000.0])
def test_pollux_finds_what_a_search_over_all_uniform_batches_finds(overlap: float, phi: float) -> None:
    alpha, beta, exchange, bounds = [0.05, 0.08], [1e-3, 2e-3], 0.15, Bounds.of(2, 1, 512)
    policy, sizes = Pollux(threshold=1.001, candidates=200), np.array([64, 64])
    for _ in range(6):
        sizes = policy.decide(affine(sizes, alpha, beta, exchange=exchange, phi=phi, overlap=overlap), bounds)
        assert sizes[0] == sizes[1]
    every = np.arange(64, 513)[:, None] * np.array([1, 1])  # not below the base batch
    found = goodput(sizes, alpha, beta, exchange, phi, overlap)
    assert found >= 0.997 * goodput(every, alpha, beta, exchange, phi, overlap).max()


def test_pollux_keeps_a_batch_that_is_nearly_as_good() -> None:
    policy, sizes = Pollux(threshold=1e6), np.array([64, 64])
    for _ in range(3):
        sizes = policy.decide(affine(sizes, 0.05, 1e-3, exchange=0.1, phi=1e4), Bounds.of(2))
    assert sizes.tolist() == [64, 64]


def test_cannikin_measures_two_sizes_and_then_finishes_together_at_the_best_batch() -> None:
    alpha, beta, exchange, phi, bounds = [0.1, 0.0, 0.03], [1e-3, 4e-3, 2e-3], 0.2, 2000.0, Bounds.of(3, 1, 512)
    policy, sizes = Cannikin(), np.array([64, 64, 64])
    first = affine(sizes, alpha, beta, exchange=exchange, phi=phi)
    sizes = policy.decide(first, bounds)
    share = 64 / first.compute  # by speed, at the same global batch
    np.testing.assert_allclose(sizes, 192 * share / share.sum(), atol=1)
    sizes = policy.decide(affine(sizes, alpha, beta, exchange=exchange, phi=phi), bounds)
    seconds = np.asarray(alpha) + np.asarray(beta) * sizes
    assert seconds.max() - seconds.min() <= 2 * max(beta)
    rng = np.random.default_rng(0)
    others = np.clip(np.rint(sizes * np.exp(rng.normal(0, 0.15, (20000, 3)))), 1, 512)
    others = others[others.sum(-1) >= 192]
    best = goodput(others, alpha, beta, exchange, phi).max()
    assert goodput(sizes, alpha, beta, exchange, phi) >= 0.998 * best


def test_cannikin_gets_out_of_like_workers_with_like_sizes() -> None:
    policy, sizes = Cannikin(), np.array([64, 64])
    for _ in range(5):
        sizes = policy.decide(affine(sizes, 0.2, 1e-3, exchange=1e-6, phi=2000.0), Bounds.of(2, 1, 512))
    every = np.arange(64, 513)[:, None] * np.array([1, 1])
    best = goodput(every, 0.2, 1e-3, 1e-6, 2000.0).max()
    assert goodput(sizes, 0.2, 1e-3, 1e-6, 2000.0) >= 0.995 * best


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


def test_sizes_two_percent_apart_are_told_apart_and_slightly_growing_times_are_not() -> None:
    def fitted(*measured: tuple[float, float]) -> LeastSquares:
        fit = LeastSquares()
        for batch, seconds in measured:
            fit = fit.update(np.array([batch]), np.array([seconds]))
        return fit

    assert fitted((100.0, 1.1), (104.2, 1.142)).solve()[2].all()
    assert not fitted((100.0, 1.1), (103.8, 1.138)).solve()[2].any()
    assert fitted((100.0, 1.0), (200.0, 1.1)).solve()[2].all()
    assert not fitted((100.0, 1.0), (200.0, 1.01)).solve()[2].any()
    alpha, beta, told = fitted((100.0, 1.0), (200.0, 2.5)).solve()  # steeper than proportional
    assert told.all()
    assert alpha[0] == 0
    np.testing.assert_allclose(beta, (100 / 1.0 + 200 / 2.5) / (100.0**2 + 200.0**2 / 2.5**2))


def test_a_restored_fit_goes_on_as_the_one_that_was_saved() -> None:
    fit = LeastSquares(0.7).update(np.array([10.0]), np.array([0.5])).update(np.array([20.0]), np.array([0.7]))
    again = restored(LeastSquares(0.7), json.loads(json.dumps(saved(fit))))
    np.testing.assert_array_equal(again.moments, fit.moments)
    assert again.forget == 0.7
