"""Arrays of state: how they lie in memory, and how they are saved."""

from __future__ import annotations

import numpy as np

from dynamix.model.running import Largest, Smoothed
from dynamix.model.state import UNKNOWN, array_of, laid_out, merged


def test_the_longer_axis_lies_innermost_and_values_stay() -> None:
    many, few = np.arange(18.0).reshape(9, 2), np.arange(18.0).reshape(2, 9)
    for x in (many, few, np.arange(36.0).reshape(2, 9, 2)):
        np.testing.assert_array_equal(laid_out(x), x)
        assert max(zip(x.shape[-2:], laid_out(x).strides[-2:], strict=True))[1] == 8
    assert laid_out(few) is few


def test_a_state_of_nothing_is_nothing_again() -> None:
    assert array_of([]) is UNKNOWN
    assert array_of([[], []]) is UNKNOWN
    assert array_of(3.0).shape == ()
    assert array_of([1, 2]).dtype == np.float64


def test_merging_takes_the_new_state_only_of_the_newer_clusters() -> None:
    newer, ones = np.array([True, False]), np.ones(2)
    both = merged(newer, Largest(5 * ones), Largest(3 * ones))
    assert both.total.tolist() == [5.0, 3.0]
    assert merged(newer, Smoothed(0.3, 5 * ones), Smoothed(0.9, 3 * ones)).weight == 0.3
