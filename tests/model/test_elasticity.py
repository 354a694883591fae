"""How time really grows with the batch, size by size."""

from __future__ import annotations

import numpy as np
import pytest

from dynamix.model.elasticity import LocalElasticity
from dynamix.window import Floats

UNIT = np.array([100.0])


def seen(*measured: tuple[float, float], curve: LocalElasticity | None = None, **settings: float) -> LocalElasticity:
    curve = LocalElasticity(**settings) if curve is None else curve
    for batch, seconds in measured:
        curve = curve.update(UNIT, np.array([batch]), np.array([seconds]))
    return curve


def known(curve: LocalElasticity) -> Floats:
    return np.asarray(curve.moments[0][0])


@pytest.mark.parametrize(
    ("first", "second"), [((100.0, 1.0), (101.0, 1.01)), ((100.0, 1.0), (120.0, 3.0)), ((100.0, 1.0), (0.0, np.nan))]
)
def test_small_changes_jumps_of_speed_and_idle_windows_say_nothing(
    first: tuple[float, float], second: tuple[float, float]
) -> None:
    assert not known(seen(first, second)).any()
    assert known(seen(first, (120.0, 1.3))).any()


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
