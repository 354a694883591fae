"""Traces decay, add up, and come out the same in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.errors import ConfigError, StateError
from dynamix.policies.stigmergic.field import Decay, Field, MemoryField
from tests.refused import refused

CELLS = 4


def step_by_step(decay: Decay, visits: dict[int, list[int]], last: int) -> np.ndarray:
    """The rule of the paper, written down literally: every cell at every step."""
    rho = np.full(CELLS, decay.start)
    for step in range(1, last + 1):
        rho = (1 - decay.alpha) * rho
        for cell in visits.get(step, []):
            rho[cell] += decay.beta
    return rho


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.5, 0.9, 1.0])
def test_lazy_decay_is_the_rule_step_by_step(alpha: float) -> None:
    decay = Decay(alpha=alpha)
    visits = {1: [0], 2: [0, 0, 3], 5: [1], 40: [1, 2], 170: [3], 331: [0, 1], 400: [0, 0]}
    field: Field = MemoryField(CELLS, decay)
    for step, cells in visits.items():
        field.deposit(cells, step=step)
        if step in (2, 40, 331, 400):
            np.testing.assert_allclose(
                field.read(np.arange(CELLS), step=step), step_by_step(decay, visits, step), atol=2e-3
            )


def test_a_cell_that_is_always_visited_tends_to_beta_over_alpha() -> None:
    field = MemoryField(CELLS)
    for step in range(1, 300):
        field.deposit([1], step=step)
    assert field.read([1], step=299)[0] == pytest.approx(0.1 / 0.05, rel=1e-3)
    assert field.read([0], step=299)[0] == pytest.approx(0, abs=1e-3)


@given(st.permutations([(1, 0, 1.0), (3, 0, 2.0), (3, 0, 0.5), (9, 1, 4.0), (200, 1, 1.0), (201, 0, 1.0)]))
@settings(max_examples=10, deadline=None)
def test_deposits_may_arrive_in_any_order(order: list[tuple[int, int, float]]) -> None:
    ordered, shuffled = MemoryField(CELLS), MemoryField(CELLS)
    for field, deposits in ((ordered, sorted(order)), (shuffled, order)):
        for step, cell, amount in deposits:
            field.deposit([cell], amount, step=step)
    np.testing.assert_allclose(ordered.read([0, 1], step=210), shuffled.read([0, 1], step=210), rtol=1e-6)


def test_many_worlds_at_once_are_fields_of_their_own() -> None:
    field, cells = MemoryField(5, worlds=(3, 2)), np.random.default_rng(0).integers(5, size=(3, 2, 7))
    field.deposit(cells, step=4)
    for i in range(3):
        for j in range(2):
            single = MemoryField(5)
            single.deposit(cells[i, j], step=4)
            np.testing.assert_allclose(field.everywhere(step=6)[i, j], single.everywhere(step=6))


def test_a_saved_field_goes_on_as_if_nothing_had_happened() -> None:
    field, again = MemoryField(3), MemoryField(3)
    field.deposit([0, 1], step=5)
    again.load_state_dict(field.state_dict())
    for each in (field, again):
        each.deposit([1], step=8)
    np.testing.assert_array_equal(field.everywhere(step=9), again.everywhere(step=9))
    refused(StateError, "cells", MemoryField(4).load_state_dict, field.state_dict())


def test_impossible_fields_and_cells_are_refused() -> None:
    refused(ConfigError, "alpha", Decay, alpha=1.5)
    refused(ConfigError, "beta", Decay, beta=-1.0)
    field = MemoryField(CELLS)
    for wrong in ([CELLS], [-1], [0.5]):
        refused(ConfigError, "cell", field.deposit, wrong, step=1)
    refused(ConfigError, "cells", MemoryField, 0)
