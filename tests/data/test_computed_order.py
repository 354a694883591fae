"""Orders that are computed: permutations that take no memory, in states of their own name."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.data import Allocations, BatchSampler
from dynamix.data.computed_order import COMPUTED, LARGE, ComputedOrder, Spliced
from dynamix.errors import StateError
from dynamix.integrations.replicas import ReplicaShares
from tests.data.test_data import Job, expected_order, seen
from tests.runtime.jobs import order_of

SETTINGS = settings(max_examples=100, deadline=None)
HUGE = 1 << 33


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders are computed whatever the size."""
    for module in ("dynamix.data.sampler", "dynamix.integrations.replicas"):
        monkeypatch.setattr(f"{module}.LARGE", 1)


# the permutation


@SETTINGS
@given(size=st.integers(1, 3000), seed=st.sampled_from([0, 1, -1, 2**63, 2**64 - 1, 12345]), epoch=st.integers(0, 5))
def test_each_index_comes_once(size: int, seed: int, epoch: int) -> None:
    order = ComputedOrder(size, seed, epoch)
    whole = order[0:size]
    assert whole.dtype == np.int64
    assert sorted(whole.tolist()) == list(range(size))
    assert order[np.arange(size)[::-1]].tolist() == whole[::-1].tolist()
    assert order[size // 3 : size // 2 + 1].tolist() == whole[size // 3 : size // 2 + 1].tolist()


def test_orders_of_large_sizes_stay_in_range_and_hit_nothing_twice() -> None:
    for size in (LARGE, LARGE + 1, HUGE + 3, 2**52):
        order = ComputedOrder(size, 3, 1)
        found = np.concatenate([order[0:50_000], order[size // 2 : size // 2 + 50_000], order[size - 50_000 : size]])
        assert 0 <= found.min() <= found.max() < size
        assert np.unique(found).size == found.size


def _off(counts: np.ndarray, expected: float) -> float:
    """Chi-square's distance from its mean, in standard deviations."""
    free = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free))


def test_over_seeds_and_epochs_every_position_has_every_index_alike() -> None:
    size, draws = 200, 6000
    orders = np.array([ComputedOrder(size, n % 60, n // 60)[0:size] for n in range(draws)])
    for position in range(0, size, 7):
        assert abs(_off(np.bincount(orders[:, position], minlength=size), draws / size)) < 5
    steps = np.diff(orders, axis=1) % size  # from one index to the next: anything but 0
    assert abs(_off(np.bincount(steps.ravel(), minlength=size)[1:], steps.size / (size - 1))) < 5


@pytest.mark.parametrize("size", [LARGE, HUGE, 10**9 + 7])
def test_neighbours_and_remainders_look_drawn(size: int) -> None:
    found = ComputedOrder(size, 5, 2)[size // 3 : size // 3 + 400_000]
    cells = found * 128 // size
    assert abs(_off(np.bincount(cells, minlength=128), cells.size / 128)) < 5
    for apart in (1, 2, 64):
        pairs = cells[:-apart] * 128 + cells[apart:]
        assert abs(_off(np.bincount(pairs, minlength=128**2), pairs.size / 128**2)) < 5
    for divisor in (2, 3, 16, 257):
        assert abs(_off(np.bincount(found % divisor, minlength=divisor), found.size / divisor)) < 5


def test_the_order_is_what_states_were_saved_with() -> None:
    """It may not change under its name, on any machine."""
    assert ComputedOrder(HUGE, 7, 3)[1000:1004].tolist() == [6943821199, 4720830953, 854692698, 1140493082]


# what is left of an order


@SETTINGS
@given(data=st.data(), size=st.integers(1, 300))
def test_intervals_of_intervals_are_what_arrays_would_be(data: st.DataObject, size: int) -> None:
    whole = np.random.default_rng(size).permutation(size)
    order: Any = whole
    for _ in range(data.draw(st.integers(1, 4))):
        ends = sorted(
            data.draw(st.lists(st.integers(0, whole.size), min_size=2, max_size=8).filter(lambda e: len(e) % 2 == 0))
        )
        intervals = list(zip(ends[::2], ends[1::2], strict=True))
        intervals = data.draw(st.permutations(intervals))
        order, whole = Spliced(order, intervals), np.concatenate([whole[a:b] for a, b in intervals])
        assert order.size == whole.size
        assert order[0 : order.size].tolist() == whole.tolist()
        assert order[1:3].tolist() == whole[1:3].tolist()
    if whole.size:
        at = np.array(data.draw(st.lists(st.integers(0, whole.size - 1), max_size=9)), dtype=np.int64)
        assert order[at].tolist() == whole[at].tolist()


# under a sampler


def test_it_begins_at_a_size_and_below_all_is_as_it_ever_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(size: int) -> tuple[str, list[int]]:
        sampler = BatchSampler(size, Allocations([6]), rank=0, world_size=1, seed=2)
        return sampler.state_dict()["order"], next(iter(sampler))

    assert first(LARGE) == (COMPUTED, ComputedOrder(LARGE, 2, 0)[0:6].tolist())
    monkeypatch.setattr("dynamix.data.sampler.LARGE", 1000)
    assert first(1000) == (COMPUTED, ComputedOrder(1000, 2, 0)[0:6].tolist())
    assert first(999) == ("", order_of(999, 0, 2)[:6].tolist())
    in_order = BatchSampler(HUGE, Allocations([2, 3]), rank=1, world_size=2, shuffle=False)
    assert next(iter(in_order)) == [2, 3, 4]


def test_each_job_goes_on_with_the_order_that_it_was_saved_with(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(100, [4, 6])
    order = seen(job.run(3))
    drawn = job.samplers[0].state_dict()
    monkeypatch.setattr("dynamix.data.sampler.LARGE", 1)
    assert order + seen(Job(100, [4, 6], drawn).run()) == expected_order(100)
    job = Job(100, [4, 6])
    order = seen(job.run(3))
    computed = job.samplers[0].state_dict()
    monkeypatch.undo()
    goes_on = Job(100, [10], computed)
    assert order + seen(goes_on.run()) == ComputedOrder(100, 0, 0)[0:100].tolist()
    assert seen(goes_on.run()) == ComputedOrder(100, 0, 1)[0:100].tolist()
    with pytest.raises(StateError, match=r"order is called 'computed 2'.*the version of dynamix that saved it"):
        Job(100, [10], {**computed, "order": "computed 2"})


@pytest.mark.usefixtures("small")
def test_replicas_deal_it_and_go_on_with_the_order_of_a_state() -> None:
    def trained(shares: ReplicaShares, rounds: int) -> list[int]:
        picked = []
        for _ in range(rounds):
            shares.meet(0, 1, average=lambda told: None)
            picked += shares.deal()
            shares.done(committed=True)
        return picked

    shares = ReplicaShares(40, 8, seed=3)
    assert trained(shares, 5) == ComputedOrder(40, 3, 0)[0:40].tolist()
    other = ReplicaShares(40, 8, seed=3)
    other.load_state_dict(shares.state_dict())
    assert trained(other, 5) == ComputedOrder(40, 3, 1)[0:40].tolist()
    before = {name: value for name, value in shares.state_dict().items() if name != "order"}  # as 0.2 wrote it
    other.load_state_dict(before)
    assert trained(other, 5) == order_of(40, 1, 3).tolist()
    with pytest.raises(StateError, match="order is called 'computed 2'"):
        other.load_state_dict({**before, "order": "computed 2"})


# 2**33 samples


def test_an_epoch_of_8_billion_samples_takes_no_memory_on_resume_either() -> None:
    process, state = psutil.Process(), None
    ComputedOrder(HUGE, 0, 0)[0:10]  # what is loaded once
    before = process.memory_info().rss
    tracemalloc.start()
    for partition in ("stream", "contiguous"):
        state = None
        for sizes in ([300, 100, 200], [256, 512], [4096]):
            job = Job(HUGE, sizes, state, partition=partition)
            job.set_epoch(0)
            indices = seen(job.run(20))
            assert len(set(indices)) == len(indices)
            state = job.samplers[0].state_dict()
            assert len(str(state)) < 1000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
    assert process.memory_info().rss - before < 50e6
