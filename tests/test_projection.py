"""The one projection every policy uses, by its properties."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.projection import _water_fill, project
from dynamix.window import Bounds


@st.composite
def _cases(draw: st.DrawFn) -> tuple[np.ndarray, Bounds, int]:
    workers, q = draw(st.integers(1, 8)), draw(st.sampled_from([1, 4, 32]))
    low = np.array(draw(st.lists(st.integers(0, 4), min_size=workers, max_size=workers))) * q
    high = low + np.array(draw(st.lists(st.integers(1, 30), min_size=workers, max_size=workers))) * q
    target = np.array(draw(st.lists(st.floats(0, 500), min_size=workers, max_size=workers)))
    total = draw(st.integers(max(int(low.sum()) // q, 1), int(high.sum()) // q)) * q
    return target, Bounds.of(workers, low, high, quantum=q), total


@settings(max_examples=200, deadline=None)
@given(_cases())
def test_bounds_grid_and_exact_sum_hold_and_rounding_moves_less_than_one_grid_step(
    case: tuple[np.ndarray, Bounds, int],
) -> None:
    target, bounds, total = case
    sizes = project(target, bounds, total=total)
    q = bounds.quantum
    assert sizes.sum() == total
    assert ((sizes >= bounds.low) & (sizes <= bounds.high) & (sizes % q == 0)).all()
    real = _water_fill(target[None] / q, bounds.low[None] // q, bounds.high[None] // q, np.array([total // q]))[0]
    assert (np.abs(sizes / q - real) < 1 + 1e-6).all()


@settings(max_examples=100, deadline=None)
@given(_cases(), st.randoms(use_true_random=False))
def test_permuting_the_workers_permutes_the_answer_up_to_ties(
    case: tuple[np.ndarray, Bounds, int], random: object
) -> None:
    target, bounds, total = case
    order = np.random.default_rng(len(target)).permutation(len(target))
    swapped = Bounds.of(len(target), bounds.low[order], bounds.high[order], quantum=bounds.quantum)
    one, other = project(target, bounds, total=total)[order], project(target[order], swapped, total=total)
    assert (np.abs(one - other) <= bounds.quantum).all()


def test_ties_go_to_the_lower_rank() -> None:
    assert project([1.0, 1.0, 1.0], Bounds.of(3), total=5).tolist() == [2, 2, 1]


def test_max_change_limits_a_decision() -> None:
    bounds = Bounds.of(2, 1, 1000, max_change=2.0)
    assert project([1.0, 199.0], bounds, total=200, current=[100, 100]).tolist() == [50, 150]
