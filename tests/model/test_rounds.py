"""The size of a round of local steps: by what a meeting and a piece take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.model.rounds import FLAT, NEAR, RoundSize, steps_apart
from dynamix.projection import project
from dynamix.window import Bounds, Window


def test_the_rule_is_that_of_the_cube_root() -> None:
    assert steps_apart(1.0, 1.0) == 8
    assert steps_apart(8.0, 1.0) == 16
    assert steps_apart(0.0, 1.0) == 1
    assert steps_apart(1e9, 1.0) == 64


def window(sizes: list[int], piece_s: list[float], meeting_s: float, piece: int = 16) -> Window:
    compute = np.array(sizes) / piece * np.array(piece_s)
    return Window.of(sizes, compute=compute, communication=meeting_s, wait=compute.max() - compute)


@pytest.mark.parametrize("meeting_s", [0.0, 0.01, 0.1, 1.0, 10.0])
def test_a_round_has_about_the_steps_of_the_rule(meeting_s: float) -> None:
    chosen = RoundSize(16)
    bounds = chosen.within(Bounds.of(4, 1, 10**5, quantum=4), window([128] * 4, [0.1] * 4, meeting_s))
    assert bounds.total_low == bounds.total_high
    steps = int(bounds.total_low) / 64
    wanted = steps_apart(meeting_s, 0.1)
    assert wanted / NEAR - 0.1 <= steps <= max(wanted * NEAR, FLAT) + 0.1


def test_a_slow_worker_is_not_waited_for_with_a_piece_too_many() -> None:
    """Speeds 5:1 and few steps: totals are chosen at which the slow worker's part ends with the others'."""
    chosen = RoundSize(16)
    seen = window([160, 160, 160, 32], [0.1, 0.1, 0.1, 0.5], 0.002)
    bounds = chosen.within(Bounds.of(4, 16, 10**5, quantum=16), seen)
    total = int(bounds.total_low)
    assert 1.5 < chosen.steps < 3
    speeds = np.array([160.0, 160, 160, 32])
    ends = project(speeds, bounds, total=total) / speeds
    assert ends.max() / ends.min() < 1.25


def test_rounds_fill_an_epoch_where_meetings_are_dear() -> None:
    """Else its last round is a short one, whose meeting takes as long as any."""
    bounds, seen = Bounds.of(4, 16, 10**5, quantum=16), window([192] * 4, [0.1] * 4, 0.4)
    free = int(RoundSize(16).within(bounds, seen).total_low)
    filling = int(RoundSize(16, epoch=3.2 * free).within(bounds, seen).total_low)
    assert 3.2 * free / filling in (pytest.approx(3, abs=0.1), pytest.approx(4, abs=0.1))
    assert int(RoundSize(16, epoch=1000.5 * free).within(bounds, seen).total_low) == free


def test_nothing_measured_changes_nothing() -> None:
    bounds = RoundSize(16).within(Bounds.of(2, 1, 1000, quantum=4), Window.of([64, 64]))
    assert int(bounds.total_low) == int(bounds.total_high) == 128


@given(
    st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=9),
    st.floats(0, 100.0),
    st.integers(1, 64),
    st.floats(1, 1e7) | st.just(np.inf),
)
def test_the_size_is_always_one_that_the_bounds_allow(
    piece_s: list[float], meeting_s: float, high: int, epoch: float
) -> None:
    workers = len(piece_s)
    bounds = Bounds.of(workers, 1, 16 * high, quantum=4)
    sizes = [16 * max(1, high // 2)] * workers
    found = RoundSize(16, epoch).within(bounds, window(sizes, piece_s, meeting_s))
    assert found.total_low == found.total_high
    assert bounds.low.sum() <= found.total_low <= bounds.high.sum()
