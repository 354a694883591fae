"""Which sizes are in force in which round, and how rounds are cut so that an epoch ends within bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.data import Allocations
from dynamix.data.cutting import next_group, whole_epoch
from dynamix.errors import ConfigError, StateError, UsageError
from tests.data.test_data import SETTINGS, sizes_of


def test_a_ledger_knows_what_is_in_force_and_since_when() -> None:
    ledger = Allocations([4, 4])
    ledger.schedule(10, [2, 6])
    ledger.schedule(20, [1, 7])
    ledger.schedule(20, [3, 5])
    ledger.schedule(30, [3, 5])
    assert [ledger.at(s).tolist() for s in (0, 9, 10, 19, 20, 99)] == [[4, 4], [4, 4], [2, 6], [2, 6], [3, 5], [3, 5]]
    assert [ledger.since(s) for s in (5, 15, 99)] == [0, 10, 20]
    again = Allocations.from_state(ledger.state_dict())
    assert again.state_dict() == ledger.state_dict()
    ledger.forget(15)
    assert ledger.at(15).tolist() == [2, 6]
    with pytest.raises(UsageError, match="forgotten"):
        ledger.at(9)
    with pytest.raises(ValueError, match="read-only"):
        ledger.at(15)[0] = 1


@pytest.mark.parametrize("sizes", [[1, 2, 3], [-1, 5], [0, 0], [1.5, 2], []])
def test_a_ledger_refuses_impossible_sizes(sizes) -> None:
    ledger = Allocations([4, 4])
    with pytest.raises(ConfigError):
        ledger.schedule(5, sizes)
    assert ledger.at(5).tolist() == [4, 4]


def test_a_ledger_refuses_the_past_and_another_world_size() -> None:
    ledger = Allocations([4, 4])
    ledger.schedule(10, [2, 6])
    with pytest.raises(ConfigError, match="from_step=9"):
        ledger.schedule(9, [1, 1])
    with pytest.raises(StateError, match="3 ranks"):
        ledger.load_state_dict(Allocations([1, 2, 3]).state_dict())


@SETTINGS
@given(sizes=sizes_of, accumulate=st.integers(1, 5), left=st.integers(1, 400), room=st.integers(0, 6))
def test_groups_end_an_epoch_within_bounds(sizes, accumulate, left, room) -> None:
    size = np.array(sizes)
    low, high = np.ones_like(size), size + room
    rest, groups = left, []
    while rest:
        group = next_group(rest, size, accumulate=accumulate, low=low, high=high)
        assert group.shape == (accumulate, size.size)
        assert 0 < group.sum() <= rest
        assert (group >= 0).all()
        assert (group <= high).all()
        assert (group[:, size == 0] == 0).all()
        rest -= int(group.sum())
        groups.append(group)
    steps, totals = whole_epoch(left, size, accumulate=accumulate, low=low, high=high)
    assert steps == len(groups)
    assert totals.tolist() == sum(g.sum(0) for g in groups).tolist()
    if left < 2 * accumulate or high.max() < 2 + accumulate:
        return  # bounds that leave no clean split are the next test's
    for group in groups:
        assert (group[0] == group[:-1]).all() or accumulate == 1
        changed = np.flatnonzero(group[-1] != group[0])
        assert changed.size <= 1
        assert (group[-1] >= group[0]).all()
        assert ((group > 0).all(0) | (group == 0).all(0)).all()
        assert (group[group > 0] >= np.minimum(2, np.broadcast_to(size, group.shape)[group > 0])).all()
    for group in groups[:-1]:
        assert (group == group[0]).all()
    if left >= accumulate * size.sum() >= 4 * accumulate:
        parts = 2 if room >= accumulate - 1 else 4  # a tail whose remainder has no room is halved too
        assert min(group.sum() for group in groups) >= accumulate * (size.sum() // parts - 1)


def test_caps_that_leave_no_clean_split_still_take_every_sample() -> None:
    size = high = np.ones(8, dtype=np.int64)
    for left in range(1, 400):
        rest = left
        while rest:
            group = next_group(rest, size, accumulate=16, low=size, high=high)
            assert group.max() <= 1
            assert group.sum() > 0
            rest -= int(group.sum())


@pytest.mark.parametrize(
    ("left", "sizes", "accumulate", "high", "group"),
    [
        (24, [8, 8], 1, 99, [[8, 8]]),  # leaves half a step
        (23, [8, 8], 1, 99, [[6, 6]]),  # would leave 7: halved
        (36, [16, 8, 8], 1, 99, [[9, 5, 4]]),
        (45, [8, 8], 2, 99, [[6, 6], [6, 6]]),  # leaves 21
        (17, [8], 2, 8, [[5], [5]]),
        (99, [9, 11], 5, 11, [[4, 6]] * 5),  # a step less one: [9, 10] and 4 more have no room
        (23, [4], 4, 4, [[4], [4], [4], [4]]),  # halves would end in a single sample
        (17, [8, 8], 1, 99, [[9, 8]]),  # one left over: it joins
        (17, [8, 8], 1, 8, [[5, 4]]),  # nobody has room: halved too
        (5, [8, 8], 1, 99, [[3, 2]]),
        (3, [8, 8, 8], 1, 99, [[3, 0, 0]]),
        (7, [4, 8, 8], 1, 99, [[2, 3, 2]]),
        (35, [8, 8], 2, 99, [[9, 8], [10, 8]]),
        (11, [8, 8], 2, 99, [[3, 2], [4, 2]]),
        (6, [0, 9], 1, 99, [[0, 6]]),
    ],
)
def test_examples_of_tails(left, sizes, accumulate, high, group) -> None:
    size = np.array(sizes)
    bounds = {"low": np.ones_like(size), "high": np.full_like(size, high)}
    assert next_group(left, size, accumulate=accumulate, **bounds).tolist() == group
