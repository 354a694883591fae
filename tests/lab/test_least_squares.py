"""Affine costs by least squares: exact where they can be told, proportional where not."""

from __future__ import annotations

import json

import numpy as np

from dynamix.model.state import restored, saved
from dynamix_lab.baselines.least_squares import LeastSquares


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


def test_moments_are_those_of_relative_errors_and_forget_only_where_something_was_measured() -> None:
    fit = LeastSquares(0.5).update(np.array([2.0, 3.0]), np.array([4.0, 0.5]))
    np.testing.assert_allclose(fit.moments[:, 0], [1 / 16, 2 / 16, 4 / 16, 1 / 4, 2 / 4])
    again = fit.update(np.array([2.0, 3.0]), np.array([4.0, np.nan]))
    np.testing.assert_allclose(again.moments[:, 0], 1.5 * fit.moments[:, 0])
    np.testing.assert_array_equal(again.moments[:, 1], fit.moments[:, 1])
    for batch, seconds in (
        (0.0, 1.0),
        (1.0, 0.0),
        (np.inf, 1.0),
        (1.0, np.inf),
        (np.nan, 1.0),
        (-1.0, 1.0),
        (1.0, -1.0),
    ):
        assert LeastSquares().update(np.array([batch]), np.array([seconds])).moments.tolist() == [[0.0]] * 5
    alpha, beta, told = LeastSquares().update(np.array([1.0]), np.array([np.nan])).solve()
    assert alpha.tolist() == [0.0]
    assert np.isnan(beta).all()
    assert not told.any()
    assert (
        LeastSquares(0.5).update(np.ones(3), np.ones(3)).update(np.ones(2), np.ones(2)).moments.tolist()
        == [[1.0] * 2] * 5
    )


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
