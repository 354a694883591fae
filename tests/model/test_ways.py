"""Which way workers meet, and how many samples a round then has: by what exchanges and computing take."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.model.ways import Ways
from dynamix.projection import project
from dynamix.runtime.job import fixed_at
from dynamix.window import Bounds, Ints, Window

PIECE = 32


def job(workers: int = 4, samples: float = math.inf) -> tuple[Ways, Bounds, Ints]:
    """Its chooser, bounds of a step over gradients, and even shares of one."""
    bounds = fixed_at(Bounds.of(workers, 1, 8 * PIECE), workers * PIECE)
    return Ways(workers * PIECE, workers, samples), bounds, np.full(workers, PIECE)


def seen(sizes: Ints, exchange_s: float, *, speeds: float | list[float] = 1000.0, late_s: float = 0.0) -> Window:
    compute = np.asarray(sizes) / np.asarray(speeds)
    wait = compute.max() - compute + late_s
    return Window.of(sizes, compute=compute, communication=exchange_s, wait=wait)


def chosen(ways: Ways, bounds: Bounds, window: Window, payload: float = 1.0) -> Ints:
    """The sizes of even workers that follow from a window."""
    allowed = ways.within(bounds, window, payload=payload)
    assert int(allowed.total_low) == int(allowed.total_high)
    return project(window.batch_size, allowed)


def test_the_network_decides_and_a_little_changes_nothing() -> None:
    ways, bounds, sizes = job()
    for exchange_s, payload, apart in (
        (1e-4, 1, False),
        (0.03, 1, True),
        (1e-4, 1, True),
        (1, 50, False),
        (1e-4, 1, False),
    ):
        sizes = chosen(ways, bounds, seen(sizes, exchange_s), payload)
        assert ways.is_apart(sizes) == apart == (ways.report["meet"] == "parameters")
        assert np.isfinite([ways.report["gradients"], ways.report["parameters"]]).all()
    chosen(ways, bounds, seen(sizes, 0.03))
    assert "promises" in ways.why
    assert "30 ms" in ways.why


def test_gradients_that_travel_while_workers_compute_are_taken_for_what_they_are() -> None:
    """3 of 30 ms are left over gradients; a meeting hides nothing. What the first one shows is remembered."""
    ways, bounds, sizes = job()
    sizes = chosen(ways, bounds, seen(sizes, 0.008))
    assert ways.is_apart(sizes)
    sizes = chosen(ways, bounds, seen(sizes, 0.4))
    assert ways.hidden_s == pytest.approx(0.392)
    assert not ways.is_apart(sizes)  # 8 ms a step are less than 400 ms a meeting
    for _ in range(3):
        sizes = chosen(ways, bounds, seen(sizes, 0.008))
        assert not ways.is_apart(sizes)
    assert ways.is_apart(chosen(ways, bounds, seen(sizes, 0.5)))  # a link has become ten times as slow


def test_a_slow_worker_is_foreseen_at_its_pieces_and_not_at_its_small_share() -> None:
    """All have 20 ms a pass beside 1 ms a sample at speed 1; over gradients the slow one has 8 samples of 128."""
    ways, bounds, _ = job()
    speeds, promised = np.array([1.0, 1.0, 1.0, 0.3]), []
    for sizes in ([32, 32, 32, 32], [38, 38, 38, 14], [40, 40, 40, 8], [40, 40, 40, 8], [40, 40, 40, 8]):
        shares = np.array(sizes)
        compute = (0.020 + 0.001 * shares) / speeds
        window = Window.of(shares, compute=compute, communication=1e-3, wait=compute.max() - compute)
        ways.within(bounds, window)
        promised.append(ways.parameters)
    assert promised[-1] == pytest.approx(promised[0], rel=0.03)


def test_what_optimizers_remember_makes_a_meeting_dearer() -> None:
    ways, bounds, sizes = job()
    chosen(ways, bounds, seen(sizes, 0.01), payload=3.0)
    assert "a meeting takes 30 ms" in ways.why


def test_workers_that_stall_now_and_then_need_not_wait_for_each_other_in_every_step() -> None:
    ways, bounds, sizes = job()
    for _ in range(4):
        told = chosen(ways, bounds, seen(sizes, 1e-4, late_s=0.02))
    assert ways.is_apart(told)


@given(
    speeds=st.lists(st.floats(100, 5000), min_size=2, max_size=6),
    exchange_s=st.floats(0, 10),
    rate=st.floats(1e-3, 1),
    payload=st.floats(0.5, 3),
    data=st.data(),
)
def test_a_round_is_one_step_over_gradients_or_whole_pieces_of_everybody(
    speeds: list[float], exchange_s: float, rate: float, payload: float, data: st.DataObject
) -> None:
    ways, bounds, sizes = job(len(speeds), data.draw(st.integers(len(speeds) * PIECE, 10**5)))
    for _ in range(3):
        allowed = ways.within(bounds, seen(sizes, exchange_s, speeds=speeds), rate, payload)
        sizes = project(np.array(speeds), allowed)
        total = int(sizes.sum())
        if ways.is_apart(sizes):
            assert 2 * ways.base <= total <= ways.epoch
            assert (sizes % PIECE == 0).all()
            assert (sizes >= PIECE).all()
        else:
            assert total == ways.base
        assert (project(sizes, ways.bounds_of(bounds, sizes)) == sizes).all()


def test_nothing_measured_changes_nothing() -> None:
    ways, bounds, sizes = job()
    assert chosen(ways, bounds, Window.of(sizes)).tolist() == [PIECE] * 4
    assert chosen(ways, bounds, Window.of(8 * sizes)).tolist() == [8 * PIECE] * 4


def test_a_data_set_of_less_than_two_steps_has_no_rounds_apart() -> None:
    ways, bounds, sizes = job(samples=2 * 4 * PIECE - 1)
    assert not ways.is_apart(chosen(ways, bounds, seen(sizes, 10.0)))
