"""Figures that run along with a job."""

from __future__ import annotations

import json

import numpy as np

from dynamix.model.running import Largest, Smoothed
from dynamix.model.state import UNKNOWN, restored, saved


def test_a_smoothed_figure_is_the_mean_of_logs_of_what_was_known_and_positive() -> None:
    smoothed = Smoothed(0.25)
    for value in ([np.nan, 2.0], [1.0, 0.0], [16.0, -3.0], [np.inf, 8.0], [np.nan, np.nan]):
        smoothed = smoothed.update(np.array(value))
    np.testing.assert_allclose(smoothed.value, [16.0**0.25, 2.0 * 4.0**0.25])
    assert np.isnan(Smoothed(0.5).update(np.array(np.nan)).value)
    assert Smoothed(0.5).update(np.array([2.0])).update(np.array([8.0, 8.0])).value.round(9).tolist() == [8.0, 8.0]


def test_the_largest_batch_is_never_below_the_base_batch_nor_forgotten() -> None:
    largest = Largest().update(np.array([50.0, 300.0]), np.array([100.0, 100.0]))
    assert largest.total.tolist() == [100.0, 300.0]
    assert largest.update(np.array([200.0, 200.0]), np.array([100.0, 100.0])).total.tolist() == [200.0, 300.0]
    assert largest.update(np.array(20.0), np.array(10.0)).total.tolist() == 20.0


def test_all_are_restored_as_they_were_saved() -> None:
    one = np.array([3.0, 5.0])
    for part in (Smoothed(0.3).update(one), Largest().update(one, one), Smoothed(0.3)):
        again = restored(
            type(part)(**({} if isinstance(part, Largest) else {"weight": 0.9})), json.loads(json.dumps(saved(part)))
        )
        for name in part.FIELDS:
            np.testing.assert_array_equal(getattr(again, name), getattr(part, name))
    assert restored(Smoothed(0.3), saved(Smoothed(0.3))).log is UNKNOWN
