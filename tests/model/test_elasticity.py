"""How time really grows with the batch, size by size."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynamix.model.elasticity import CENTRES, HALF, LocalElasticity
from dynamix.model.state import restored, saved
from dynamix.window import Floats

UNIT = np.array([100.0])


def seen(*measured: tuple[float, float], curve: LocalElasticity | None = None, **settings: float) -> LocalElasticity:
    curve = LocalElasticity(**settings) if curve is None else curve
    for batch, seconds in measured:
        curve = curve.update(UNIT, np.array([batch]), np.array([seconds]))
    return curve


def known(curve: LocalElasticity) -> Floats:
    return np.asarray(curve.moments[0][0])


def test_only_the_sizes_that_a_change_crossed_are_learned_of() -> None:
    curve = seen(
        (100.0, 1.0), (100.0 * np.exp(4 * HALF), 2.0)
    )  # from the middle of one range to that of the one after next
    middle = len(CENTRES) // 2
    np.testing.assert_allclose(known(curve)[middle : middle + 3], np.array([1, 2, 1]) * HALF * 4 * HALF)
    assert not known(curve)[:middle].any()
    assert not known(curve)[middle + 3 :].any()
    slope = np.log(2.0) / (4 * HALF)
    np.testing.assert_allclose(curve.moments[1][0] / np.maximum(known(curve), 1e-9), slope * (known(curve) > 0))


@pytest.mark.parametrize(
    ("first", "second"), [((100.0, 1.0), (101.0, 1.01)), ((100.0, 1.0), (120.0, 3.0)), ((100.0, 1.0), (0.0, np.nan))]
)
def test_small_changes_jumps_of_speed_and_idle_windows_say_nothing(
    first: tuple[float, float], second: tuple[float, float]
) -> None:
    assert not known(seen(first, second)).any()
    assert known(seen(first, (120.0, 1.3))).any()


def test_a_change_is_from_the_last_window_that_was_measured() -> None:
    np.testing.assert_array_equal(
        seen((100.0, 1.0), (50.0, np.nan), (200.0, 2.0)).moments, seen((100.0, 1.0), (200.0, 2.0)).moments
    )


def test_what_a_worker_did_before_counts_less_at_each_of_its_changes() -> None:
    once = seen((100.0, 1.0), (141.0, 1.4))
    twice = seen((100.0, 1.4), curve=once)
    np.testing.assert_allclose(known(twice), (0.95 + 1.0) * known(once))
    thrice = seen((100.0, 1.4), curve=seen((100.0, 1.0), (141.0, 1.4), forget=0.5))
    np.testing.assert_allclose(known(thrice), 1.5 * known(once))


def test_the_update_leaves_the_old_curve_as_it_is_and_a_restored_one_goes_on() -> None:
    curve = seen((100.0, 1.0), (150.0, 1.4))
    before = json.dumps(saved(curve))
    after = seen((300.0, 4.0), curve=curve)
    assert json.dumps(saved(curve)) == before
    again = seen((300.0, 4.0), curve=restored(LocalElasticity(), json.loads(before)))
    assert json.dumps(saved(again)) == json.dumps(saved(after))


def test_an_excess_is_what_lies_beyond_the_line_as_far_as_it_is_known() -> None:
    curve, line = seen((100.0, 1.0), (200.0, 4.0)), (np.array([0.5]), np.array([0.005]))
    excess = curve.excess(UNIT, *line)[0]
    at = len(CENTRES) // 2 + 1
    samples = 100.0 * np.exp(CENTRES[at])
    elasticity = 0.005 * samples / (0.5 + 0.005 * samples)
    square = known(curve)[at]
    np.testing.assert_allclose(excess[at], (2.0 - elasticity) * square / (square + 0.02))
    assert excess[0] == 0.0
    steep, certain = curve.around(curve.excess(UNIT, *line), UNIT, np.array([samples]))
    np.testing.assert_allclose(steep[0], excess[at : at + 2])
    np.testing.assert_allclose(certain[0], known(curve)[at : at + 2] / (known(curve)[at : at + 2] + 0.02))


def test_the_way_there_costs_what_the_way_back_saves() -> None:
    curve = seen((60.0, 0.5), (200.0, 4.0), (90.0, 1.0))
    excess = curve.excess(UNIT, np.array([0.0]), np.array([0.01]))
    there = LocalElasticity.beyond(excess, UNIT, np.array([70.0]), np.array([180.0]))
    back = LocalElasticity.beyond(excess, UNIT, np.array([180.0]), np.array([70.0]))
    np.testing.assert_allclose(there, -back)
    assert there > 0.1
    halves = [
        LocalElasticity.beyond(excess, UNIT, np.array([a]), np.array([b])) for a, b in ((70.0, 110.0), (110.0, 180.0))
    ]
    np.testing.assert_allclose(sum(halves), there)
    assert LocalElasticity.beyond(excess, UNIT, np.array([70.0]), np.array([70.0])) == 0.0
    far = LocalElasticity.beyond(excess, UNIT, np.array([0.0]), np.array([70.0]))
    np.testing.assert_allclose(far, LocalElasticity.beyond(excess, UNIT, np.array([0.01]), np.array([70.0])))


def test_beyond_the_known_sizes_the_outermost_ranges_count() -> None:
    curve = seen((100.0, 1.0), (200.0, 3.0))
    excess = curve.excess(UNIT, np.array([0.0]), np.array([0.01]))
    for batch, first in ((1e-9, 0), (0.001, 0), (1e6, len(CENTRES) - 2)):
        steep, _ = curve.around(excess, UNIT, np.array([batch]))
        np.testing.assert_array_equal(steep[0], excess[0][first : first + 2])
