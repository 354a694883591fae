"""Every sample once, in one order, on equally many steps - whatever the allocations do."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from dynamix.data import Allocations, BatchSampler, StepPlan
from dynamix.data.computed_order import ComputedOrder
from dynamix.errors import ConfigError, StateError, UsageError

SETTINGS = settings(max_examples=60, deadline=None)


class Job:
    """All ranks of a job in one process; each has a ledger and a sampler of its own, as in real life."""

    def __init__(self, size: int, sizes: list[int], state: dict | None = None, **options) -> None:
        begin = 0 if state is None else state["consumed"]
        self.world = len(sizes)
        self.accumulate = options.get("accumulate", 1)
        self.ledgers = [Allocations(sizes) for _ in sizes]
        for ledger in self.ledgers:
            ledger.reset(begin // self.accumulate, self.accumulate * np.array(sizes))
        self.samplers = [
            BatchSampler(size, ledger, rank=i, world_size=self.world, **options)
            for i, ledger in enumerate(self.ledgers)
        ]
        if state is not None:
            for sampler in self.samplers:
                sampler.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def schedule(self, number: int, sizes: list[int]) -> None:
        """From round `number` on, samples of each micro-step."""
        for ledger in self.ledgers:
            ledger.schedule(number, self.accumulate * np.array(sizes))

    def step(self, iterators) -> tuple[StepPlan, list[list[int]]] | None:
        """One micro-step of all ranks: the plan and the samples each really used; None at the end."""
        batches = [next(iterator, None) for iterator in iterators]
        if any(batch is None for batch in batches):
            assert all(batch is None for batch in batches), "ranks took unequal numbers of steps"
            return None
        plans = [sampler.consume() for sampler in self.samplers]
        for plan in plans[1:]:
            assert plan.index == plans[0].index
            assert plan.start == plans[0].start
            assert (plan.counts == plans[0].counts).all()
        used = []
        for rank, batch in enumerate(batches):
            count = int(plans[0].counts[rank])
            assert len(batch) == (count or 2)
            used.append(batch if count else [])
        return plans[0], used

    def run(self, steps: int | None = None) -> list[tuple[StepPlan, list[list[int]]]]:
        """Iterate until the epoch ends or `steps` are done."""
        iterators = [iter(sampler) for sampler in self.samplers]
        done = []
        while (steps is None or len(done) < steps) and (result := self.step(iterators)) is not None:
            done.append(result)
        return done


def seen(results) -> list[int]:
    """Sample indices in union-batch order."""
    return [index for _, used in results for batch in used for index in batch]


def expected_order(size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    sampler = DistributedSampler(range(size), num_replicas=1, rank=0, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


sizes_of = st.integers(1, 5).flatmap(lambda w: st.lists(st.integers(0, 9), min_size=w, max_size=w)).filter(any)


def another(draw, workers: int) -> list[int]:
    return draw(st.lists(st.integers(0, 9), min_size=workers, max_size=workers).filter(any))


def test_regions_cut_by_other_rules_are_refused_before_anything_is_loaded() -> None:
    def made() -> BatchSampler:
        return BatchSampler(47, Allocations([16, 3, 1]), rank=0, world_size=3, partition="contiguous")

    sampler = made()
    next(iter(sampler))
    sampler.consume()
    state = sampler.state_dict()
    del state["regions"]["rules"]
    fresh = made()
    with pytest.raises(StateError, match="rules of version 1"):
        fresh.load_state_dict(state)
    assert fresh.consumed == 0


# ---------------------------------------------------------------- exactly once


def _with_breaks(draw, job: Job) -> list[tuple[StepPlan, list[list[int]]]]:
    """An epoch whose iterations are left and begun anew; what a loader had asked for ahead is never consumed."""
    results: list[tuple[StepPlan, list[list[int]]]] = []
    while not (results and results[-1][0].last):
        iterators = [iter(sampler) for sampler in job.samplers]
        for _ in range(draw(st.integers(1, 40))):
            if (result := job.step(iterators)) is None:
                break
            results.append(result)
        for iterator in iterators:  # ranks differ
            for _ in range(draw(st.integers(0, 3))):
                next(iterator, None)
    return results


@SETTINGS
@given(
    data=st.data(),
    sizes=sizes_of,
    accumulate=st.integers(1, 3),
    size=st.integers(140, 300),
    partition=st.sampled_from(["stream", "contiguous"]),
    seed=st.integers(0, 3),
)
def test_every_sample_once_whatever_is_scheduled_and_abandoned(data, sizes, accumulate, size, partition, seed) -> None:
    job, begun = Job(size, sizes, accumulate=accumulate, partition=partition, seed=seed), 0
    for epoch in range(2):
        step = max(job.samplers[0].begun, job.ledgers[0].state_dict()["steps"][-1])
        for _ in range(data.draw(st.integers(0, 4))):
            step += data.draw(st.integers(1, 12))
            job.schedule(step, another(data.draw, job.world))
        results = _with_breaks(data.draw, job)
        assert [plan.index for plan, _ in results] == list(range(begun, begun + len(results)))
        begun += len(results)
        order = seen(results)
        assert sorted(order) == list(range(size))
        if partition == "stream":
            assert order == expected_order(size, seed=seed, epoch=epoch)
        assert len(results) % accumulate == 0
        assert [plan.last for plan, _ in results].count(True) == 1
        assert results[-1][0].last
        for first in range(0, len(results), accumulate):
            group = [plan for plan, _ in results[first : first + accumulate]]
            assert [plan.micro for plan in group] == list(range(accumulate))
            assert all(plan.round is group[0].round for plan in group)
            assert [plan.counts.tolist() for plan in group] == group[0].round.counts.tolist()


@SETTINGS
@given(
    data=st.data(),
    sizes=sizes_of,
    accumulate=st.integers(1, 3),
    size=st.integers(140, 300),
    partition=st.sampled_from(["stream", "contiguous"]),
    computed=st.booleans(),
)
def test_stops_and_resumes_at_other_world_sizes_lose_and_repeat_nothing(
    data, sizes, accumulate, size, partition, computed
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if computed:  # an order, whatever the size
            patched.setattr("dynamix.data.sampler.LARGE", 1)
        order = _over_resumes(data, sizes, accumulate, size, partition)
    assert sorted(order) == list(range(size))
    if partition == "stream":
        assert order == (ComputedOrder(size, 0, 0)[0:size].tolist() if computed else expected_order(size))


def _over_resumes(data, sizes, accumulate, size, partition) -> list[int]:
    """The samples of an epoch in which the job ends and goes on at other world sizes."""
    state, order, steps = None, [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        job = Job(size, sizes, state, accumulate=accumulate, partition=partition)
        job.set_epoch(0)
        job.schedule(-(-steps // accumulate) + data.draw(st.integers(0, 9)), another(data.draw, job.world))
        results = job.run(data.draw(st.integers(0, 12)))
        whole = len(results) - len(results) % accumulate  # gradients of an unfinished optimizer step are not saved
        if results and results[-1][0].last:
            whole = len(results)
        order += seen(results[:whole])
        states = [sampler.state_dict() for sampler in job.samplers]
        assert all(s == states[0] for s in states)
        state = states[0]
        steps += whole
        assert state["consumed"] == steps
        assert state["position"] == len(order)
        if data.draw(st.booleans()):
            sizes = data.draw(sizes_of)
        if state["finished"]:
            break
    if not state["finished"]:
        order += seen(Job(size, sizes, state, accumulate=accumulate, partition=partition).run())
    return order


def test_contiguous_gives_each_rank_one_region_cut_anew_each_epoch() -> None:
    job = Job(100, [10, 30], partition="contiguous", shuffle=False)
    job.schedule(1, [30, 10])  # applies at the next epoch only
    results = job.run()
    assert [plan.counts.tolist() for plan, _ in results] == [[10, 30], [10, 30], [5, 15]]
    assert [i for _, used in results for i in used[0]] == list(range(25))
    assert [i for _, used in results for i in used[1]] == list(range(25, 100))
    again = job.run()
    assert [i for _, used in again for i in used[0]] == list(range(75))
    assert [plan.epoch for plan, _ in again] == [1, 1, 1]


# ---------------------------------------------------------------- epochs, counters, states


def test_breaking_out_and_setting_the_next_epoch_starts_it_cleanly() -> None:
    job = Job(100, [4, 6])
    job.run(3)
    iterator = iter(job.samplers[0])
    for _ in range(4):
        next(iterator)
    assert (job.samplers[0].issued, job.samplers[0].consumed) == (7, 3)
    job.set_epoch(1)
    assert (job.samplers[0].issued, job.samplers[0].consumed) == (3, 3)
    with pytest.raises(UsageError, match="out of date"):
        next(iterator)
    results = job.run()
    assert seen(results) == expected_order(100, epoch=1)
    assert [plan.index for plan, _ in results] == list(range(3, 13))


def test_set_epoch_keeps_the_position_of_a_resumed_epoch() -> None:
    job = Job(100, [4, 6])
    first = job.run(3)
    state = job.samplers[0].state_dict()
    resumed = Job(100, [5, 5], state)
    assert len(resumed.samplers[0]) == 7
    resumed.set_epoch(0)
    assert seen(first) + seen(resumed.run()) == expected_order(100)
    assert seen(resumed.run()) == expected_order(100, epoch=1)


def test_a_checkpoint_of_a_finished_epoch_goes_on_with_the_next() -> None:
    job = Job(100, [4, 6])
    job.run()
    state = job.samplers[0].state_dict()
    asked = Job(100, [4, 6], state)
    asked.set_epoch(0)  # a loop that counts from the epoch it saved
    assert asked.run() == []
    asked.set_epoch(1)
    assert seen(asked.run()) == expected_order(100, epoch=1)
    assert seen(Job(100, [4, 6], state).run()) == expected_order(100, epoch=1)


def test_running_an_epoch_again_by_name_repeats_its_order() -> None:
    job = Job(100, [4, 6])
    once = job.run()
    job.set_epoch(0)
    assert seen(job.run()) == seen(once)


def test_length_is_exact_while_the_allocation_stays() -> None:
    for size in (90, 91, 99, 100):
        for accumulate in (1, 3):
            job = Job(size, [4, 6], accumulate=accumulate)
            total = len(job.samplers[0])
            assert total == len(job.run())
            assert len(job.samplers[0]) == total
            job.run(4)
            assert len(job.samplers[0]) == total - 4


def test_bounds_that_are_found_later_hold_from_the_next_round_on() -> None:
    sampler = BatchSampler(31, Allocations([4, 6]), rank=1, world_size=2)  # in the last round there is one over
    assert [len(batch) for batch in sampler] == [6, 6, 7]
    batches = iter(sampler)
    next(batches)
    sampler.limit_pieces(3)
    sampler.limit([5, 6])
    assert [len(batch) for batch in batches] == [3, 3, 3, 3]


def test_consuming_without_a_batch_says_what_to_do() -> None:
    sampler = BatchSampler(100, Allocations([10]), rank=0, world_size=1)
    with pytest.raises(UsageError, match="iterate the loader"):
        sampler.consume()
    with pytest.raises(UsageError, match="iterate the loader"):
        sampler.plan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset_size": 30}, "samples per optimizer step=40"),
        ({"rank": 2}, "rank=2"),
        ({"world_size": 3}, "allocations"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"partition": "blocks"}, "partition='blocks'"),
        ({"low": 5, "high": 4}, "low="),
    ],
)
def test_bad_input_names_the_value(change, message) -> None:
    options = {"dataset_size": 100, "rank": 0, "world_size": 2, "accumulate": 4} | change
    with pytest.raises(ConfigError, match=message):
        BatchSampler(allocations=Allocations([16, 24]), **options)


def test_a_checkpoint_of_another_order_is_refused() -> None:
    state = Job(100, [4, 6], seed=1).samplers[0].state_dict()
    for options, name in (({"seed": 2}, "seed"), ({"seed": 1, "shuffle": False}, "shuffle")):
        with pytest.raises(StateError, match=f"{name}="):
            Job(100, [4, 6], **options).samplers[0].load_state_dict(state)


# ---------------------------------------------------------------- real loaders


def test_planning_is_cheap_for_a_thousand_ranks() -> None:
    world, steps = 1024, 300
    ledger = Allocations(np.full(world, 8))
    sampler = BatchSampler(world * 8 * steps, ledger, rank=700, world_size=world)
    iterator = iter(sampler)
    next(iterator)
    sampler.consume()
    spent = []
    for _ in range(steps - 2):
        begin = time.perf_counter()
        next(iterator)
        sampler.consume()
        spent.append(time.perf_counter() - begin)
    assert float(np.median(spent)) < 2e-3  # ten times what it takes, for busy machines
