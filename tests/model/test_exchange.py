"""The exchange: its seconds and its overlap follow from steps of different length."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynamix.model.exchange import OVERLAPS, Exchange
from dynamix.model.state import restored, saved


@pytest.mark.parametrize("overlap", OVERLAPS[[0, 2, 4]])
def test_exchange_and_overlap_are_recovered_from_steps_of_different_length(overlap: float) -> None:
    exchange = Exchange()
    for slowest in (0.1, 0.25, 0.15, 0.4, 0.2, 0.3):
        whole = (slowest**overlap + 0.2**overlap) ** (1 / overlap)
        exchange = exchange.update(np.array(slowest), np.array(whole - slowest))
    ahead = np.array([0.05, 0.5])
    truth = (ahead**overlap + 0.2**overlap) ** (1 / overlap)
    np.testing.assert_allclose(np.exp(exchange.log_step(ahead)), truth, rtol=0.01)


def test_a_slower_link_is_taken_at_once() -> None:
    exchange = Exchange()
    for _ in range(10):
        exchange = exchange.update(np.array(0.1), np.array(0.1))
    exchange = exchange.update(np.array(0.1), np.array(0.2))
    assert float(np.exp(exchange.log_step(np.array([0.1]))[0])) == pytest.approx(0.3, rel=1e-6)


def test_small_changes_are_averaged_the_first_windows_alike_and_later_ones_by_the_least_weight() -> None:
    exchange = Exchange(weight=0.25)
    levels = []
    for exposed in (0.10, 0.11, 0.10, 0.11, 0.10, 0.11):
        exchange = exchange.update(np.array(0.3), np.array(exposed))
        levels.append(float(exchange.level[0]))  # no overlap: the exposed seconds themselves
    moved = (np.diff(levels)) / (np.log([0.11, 0.10, 0.11, 0.10, 0.11]) - levels[:-1])
    np.testing.assert_allclose(moved, [1 / 2, 1 / 3, 1 / 4, 1 / 4, 1 / 4], rtol=1e-9)


def test_what_is_not_measured_leaves_everything_as_it_is() -> None:
    exchange = Exchange().update(np.array(0.3), np.array(0.1))
    for slowest, exposed in ((np.nan, 0.1), (0.3, np.nan), (0.0, 0.1), (np.inf, 0.1)):
        after = exchange.update(np.array(slowest), np.array(exposed))
        assert saved(after) == saved(exchange)
    unknown = Exchange().update(np.array(np.nan), np.array(0.1))
    np.testing.assert_allclose(np.exp(unknown.log_step(np.array([0.3, 0.0]))), [0.3, 1e-12])


def test_a_restored_exchange_goes_on_as_the_one_that_was_saved() -> None:
    exchange = Exchange()
    for slowest in (0.1, 0.4, 0.2):
        exchange = exchange.update(np.array([slowest, 0.3]), np.array([0.1, 0.2]))
    again = restored(Exchange(), json.loads(json.dumps(saved(exchange))))
    ahead = np.array([[0.1, 0.5], [0.2, 0.3]])
    np.testing.assert_array_equal(again.log_step(ahead), exchange.log_step(ahead))
    one, other = (e.update(np.array([0.2, 0.2]), np.array([0.3, 0.1])) for e in (exchange, again))
    assert saved(one) == saved(other)


def test_clusters_that_begin_at_different_times_are_fitted_as_if_alone() -> None:
    together, alone = Exchange(), [Exchange(), Exchange()]
    for slowest, exposed in (([0.1, 0.2], [0.05, np.nan]), ([0.3, 0.2], [0.02, 0.01]), ([0.2, 0.4], [0.03, 0.004])):
        together = together.update(np.array(slowest), np.array(exposed))
        alone = [e.update(np.array(slowest[c]), np.array(exposed[c])) for c, e in enumerate(alone)]
    for name in Exchange.FIELDS:
        np.testing.assert_array_equal(getattr(together, name), [getattr(one, name) for one in alone])


def test_after_a_jump_windows_weigh_as_in_the_beginning() -> None:
    exchange = Exchange()
    for exposed in (0.1,) * 8 + (0.2,):
        exchange = exchange.update(np.array(0.1), np.array(exposed))
    assert float(exchange.count) == 1.0
    after = exchange.update(np.array(0.1), np.array(0.21))
    np.testing.assert_allclose(after.level[0] - exchange.level[0], 0.5 * np.log(0.21 / 0.2))
