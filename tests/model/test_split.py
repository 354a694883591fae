"""Optimal splits against brute force over all small integer allocations."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.model.split import at_most, best_split, finish_for, split
from dynamix.projection import project
from dynamix.window import Bounds

CASES = st.tuples(
    st.lists(st.floats(0.0, 0.2), min_size=3, max_size=3),
    st.lists(st.floats(1e-3, 2e-2), min_size=3, max_size=3),
    st.integers(6, 30),
)


def _slowest(sizes: np.ndarray, alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    return np.asarray((alpha + beta * sizes).max(-1))


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_a_split_of_a_given_total_is_within_one_sample_of_brute_force(
    case: tuple[list[float], list[float], int],
) -> None:
    alpha, beta, total = np.array(case[0]), np.array(case[1]), case[2]
    bounds = Bounds.of(3, 1, 12)
    everything = np.array(list(itertools.product(range(1, 13), repeat=3)))
    same = everything[everything.sum(-1) == total]
    ours = project(split(np.array(float(total)), alpha, beta, bounds), bounds, total=total)
    assert ours.sum() == total
    assert _slowest(ours, alpha, beta) <= _slowest(same, alpha, beta).min() + beta.max()


@settings(max_examples=60, deadline=None)
@given(CASES, st.floats(0.01, 0.3), st.floats(5.0, 200.0))
def test_the_goodput_of_the_best_split_is_brute_forces(
    case: tuple[list[float], list[float], int], exchange: float, phi: float
) -> None:
    alpha, beta, bounds = np.array(case[0]), np.array(case[1]), Bounds.of(3, 1, 25)

    def log_goodput(finish: np.ndarray, total: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(total) - np.log(finish + exchange) - np.log(total + phi))

    everything = np.array(list(itertools.product(range(1, 26), repeat=3)), dtype=float)
    values = log_goodput(_slowest(everything, alpha, beta), everything.sum(-1))
    ours = best_split(alpha, beta, bounds, log_goodput)
    assert ((ours >= 1) & (ours <= 25)).all()
    # Real sizes may be better than whole ones, and are never worse than the search's resolution.
    assert log_goodput(_slowest(ours, alpha, beta), ours.sum(-1)) >= values.max() - 1e-3


def test_the_range_of_the_global_batch_is_kept() -> None:
    alpha, beta = np.zeros(2), np.array([1e-3, 3e-3])
    bounds = Bounds.of(2, 1, 1000, total_low=100, total_high=400)
    more = best_split(alpha, beta, bounds, lambda finish, total: total)
    less = best_split(alpha, beta, bounds, lambda finish, total: -total)
    np.testing.assert_allclose([more.sum(), less.sum()], [400, 100], rtol=1e-6)
    np.testing.assert_allclose(more, [300, 100], rtol=1e-6)
    above = dataclasses.replace(bounds, total_low=np.array(250))
    assert best_split(alpha, beta, above, lambda finish, total: -total).sum() >= 249.999


def test_limits_of_the_global_batch_are_whole_steps_of_the_grid_and_stay_within_the_bounds() -> None:
    bounds = Bounds.of(2, 8, 400, quantum=8)
    assert [int(at_most(bounds, np.array(t)).total_high) for t in (100.0, 104.0, 1.0, 1e6)] == [104, 104, 16, 800]


def test_the_smallest_batch_is_finished_a_little_after_its_time_and_never_at_none() -> None:
    alpha, beta, low, high = np.zeros(2), np.array([1e-3, 2e-3]), np.zeros(2), np.full(2, 100.0)
    least = float(finish_for(np.array(0.0), alpha, beta, low, high))
    assert 0.0 < least < 1e-9
    later = float(finish_for(np.array(0.0), alpha + 0.5, beta, low, high))
    assert 0.5 < later < 0.5 + 1e-9
    sizes = best_split(alpha, beta, Bounds.of(2, 0, 100), lambda finish, total: -np.abs(np.log(total / 30.0)))
    assert abs(sizes.sum() - 30.0) < 3.0
