"""The exchange: its seconds and its overlap follow from steps of different length."""

from __future__ import annotations

import numpy as np
import pytest

from dynamix.model.exchange import OVERLAPS, Exchange


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
