"""Streams cut unequal batches from iterables: each sample once, equally many steps, also when shards run dry."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from dynamix.data import Allocations, StepPlan, Stream
from dynamix.errors import ConfigError, StateError, UsageError
from dynamix.runtime.ranks.threads import ThreadGroup, ThreadWatch, ThreadWire

SETTINGS = settings(max_examples=60, deadline=None)
Result = list[tuple[StepPlan, list[int]]]


class Numbers(IterableDataset):
    """begin .. end-1; counts what was read, and remembers the epoch it was told."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end, self.read, self.epoch = begin, end, 0, None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.begin, self.end):
            self.read += 1
            yield number


class Stateful(Numbers):
    """As Numbers, but able to go on where it stood, as Hugging Face's and torchdata's iterables are."""

    at = begins = 0

    def __iter__(self):
        begin, self.begins = self.begins, 0
        self.at = begin
        for number in range(self.begin + begin, self.end):
            self.read += 1
            self.at = number + 1 - self.begin
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["at"]


def streams(sources, sizes, schedule=(), states=None, **options) -> list[Stream]:
    wire, made = ThreadWire(len(sizes)), []
    for rank, source in enumerate(sources):
        accumulate = options.get("accumulate", 1)
        ledger = Allocations(accumulate * np.array(sizes))
        begin = 0 if states is None else states[rank]["consumed"] // accumulate
        ledger.reset(begin, accumulate * np.array(sizes))
        for step, later in schedule:
            ledger.schedule(begin + step, accumulate * np.array(later))
        group = ThreadGroup(wire, ThreadWatch(wire, rank))
        agree = lambda vector, group=group: group.all_sum(vector.clone(), vector)  # noqa: E731
        made.append(Stream(source, ledger, rank=rank, world_size=len(sizes), agree=agree, **options))
        if states is not None:
            made[-1].load_state_dict(states[rank])
    return made


def run(stream: Stream, steps: int | None = None) -> Result:
    done: Result = []
    iterator = iter(stream)
    while steps is None or len(done) < steps:
        batch = next(iterator, None)
        if batch is None:
            break
        plan = stream.consume()
        count = int(plan.counts[stream.rank])
        assert len(batch) == (count or 2)
        done.append((plan, batch[:count].tolist()))
    return done


def run_all(made: list[Stream], steps: int | None = None) -> list[Result]:
    """All ranks, each in a thread; they must take the same steps by the same plans."""
    with ThreadPoolExecutor(len(made)) as pool:
        results = list(pool.map(lambda stream: run(stream, steps), made))
    for other in results[1:]:
        assert [(p.index, p.counts.tolist(), p.last) for p, _ in other] == [
            (p.index, p.counts.tolist(), p.last) for p, _ in results[0]
        ]
    return results


def union(results: list[Result]) -> list[int]:
    """Samples in union-batch order."""
    return [i for step in zip(*results, strict=True) for _, used in step for i in used]


sizes_of = st.integers(1, 4).flatmap(lambda w: st.lists(st.integers(0, 9), min_size=w, max_size=w)).filter(any)


def history(draw, workers: int) -> list[tuple[int, list[int]]]:
    sizes = st.lists(st.integers(0, 9), min_size=workers, max_size=workers).filter(any)
    steps = draw(st.lists(st.integers(1, 40), max_size=3, unique=True))
    return [(step, draw(sizes)) for step in sorted(steps)]


def last_of(plans: Result) -> list[int]:
    return [number for number, (plan, _) in enumerate(plans) if plan.last]


@SETTINGS
@given(data=st.data(), sizes=sizes_of, accumulate=st.integers(1, 3), size=st.integers(0, 200), kind=st.booleans())
def test_a_global_stream_keeps_its_order_whatever_the_split_and_resumes_at_another_world_size(
    data, sizes, accumulate, size, kind
) -> None:
    source = Stateful if kind else Numbers
    shares = history(data.draw, len(sizes))
    made = streams([source(0, size) for _ in sizes], sizes, shares, accumulate=accumulate)
    first = run_all(made, data.draw(st.none() | st.integers(0, 8)))
    whole = len(first[0]) // accumulate * accumulate
    state = made[0].state_dict()
    assert state["consumed"] == whole
    fewer = data.draw(sizes_of)
    sources = [source(0, size) for _ in fewer]
    shares = history(data.draw, len(fewer))
    resumed = streams(sources, fewer, shares, [state] * len(fewer), accumulate=accumulate)
    order = union([rank[:whole] for rank in first])
    if not state["finished"]:
        order += union(run_all(resumed))
    assert order == list(range(size))
    results = run_all(resumed)
    assert union(results) == order
    assert len(results[0]) % accumulate == 0
    assert last_of(results[0]) == [len(results[0]) - 1] * (size > 0)
    assert all(plan.epoch == 1 for plan, _ in results[0])
    assert size == 0 or sources[0].epoch == 1


@SETTINGS
@given(data=st.data(), sizes=sizes_of, accumulate=st.integers(1, 3), kind=st.booleans())
def test_shards_of_unequal_length_are_each_read_once_and_resume_where_each_rank_stood(
    data, sizes, accumulate, kind
) -> None:
    source = Stateful if kind else Numbers
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=len(sizes), max_size=len(sizes)))

    def sources():
        return [source(1000 * rank, 1000 * rank + n) for rank, n in enumerate(lengths)]

    made = streams(sources(), sizes, history(data.draw, len(sizes)), accumulate=accumulate, sharded=True)
    first = run_all(made, data.draw(st.none() | st.integers(0, 8)))
    whole = len(first[0]) // accumulate * accumulate
    states = [stream.state_dict() for stream in made]
    shares = history(data.draw, len(sizes))
    resumed = streams(sources(), sizes, shares, states, accumulate=accumulate, sharded=True)
    rest = [[] for _ in sizes] if states[0]["finished"] else run_all(resumed)
    again = run_all(resumed)
    assert len(again[0]) % accumulate == 0
    assert last_of(again[0]) == [len(again[0]) - 1]
    for rank, length in enumerate(lengths):
        own = list(range(1000 * rank, 1000 * rank + length))
        assert [i for _, batch in first[rank][:whole] + rest[rank] for i in batch] == own
        assert [i for _, batch in again[rank] for i in batch] == own


def test_shards_keep_whole_batches_until_their_own_tail() -> None:
    made = streams([Numbers(0, 40), Numbers(1000, 1021)], [4, 4], sharded=True)
    results = run_all(made)
    assert [plan.counts.tolist() for plan, _ in results[0]] == [[4, 4]] * 4 + [[4, 5]] + [[4, 0]] * 5


def test_a_dry_rank_gets_its_last_samples_as_placeholders() -> None:
    made = streams([Numbers(0, 40), Numbers(1000, 1008)], [4, 4], sharded=True)

    def batches(stream: Stream) -> list[list[int]]:
        out = []
        for batch in stream:
            stream.consume()
            out.append(batch.tolist())
        return out

    with ThreadPoolExecutor(2) as pool:
        _, dry = pool.map(batches, made)
    assert dry[:2] == [[1000, 1001, 1002, 1003], [1004, 1005, 1006, 1007]]
    assert dry[2:] == [[1006, 1007]] * 8


def test_a_rank_without_any_sample_is_named_on_every_rank() -> None:
    made = streams([Numbers(0, 40), Numbers(0, 0)], [4, 4], sharded=True)

    def error(stream: Stream) -> str:
        with pytest.raises(ConfigError) as caught:
            run(stream)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert all("rank 1" in message for message in pool.map(error, made))


@pytest.mark.parametrize("sharded", [False, True])
def test_stopping_early_and_iterating_again_goes_on(sharded: bool) -> None:
    source = Numbers(0, 50)
    stream = streams([source], [4], sharded=sharded)[0]
    first = run(stream, 3)
    iterator = iter(stream)
    next(iterator)
    next(iterator)
    assert (stream.issued, stream.consumed) == (5, 3)
    rest = run(stream)
    assert union([first]) + union([rest]) == list(range(50))
    run(stream, 2)
    stream.set_epoch(7)
    again = run(stream)
    assert union([again]) == list(range(50))
    assert again[0][0].epoch == source.epoch == 7
    with pytest.raises(UsageError, match="out of date"):
        next(iterator)


def test_an_iterable_with_a_state_is_not_read_again() -> None:
    stream = streams([Stateful(0, 5000)], [10])[0]
    run(stream, 200)
    source = Stateful(0, 5000)
    resumed = streams([source], [10], states=[stream.state_dict()])[0]
    assert union([run(resumed, 1)]) == list(range(2000, 2010))
    assert source.read < 100


def test_memory_holds_what_is_not_consumed_and_little_more() -> None:
    source = Numbers(0, 100_000)
    stream = streams([source], [10])[0]
    assert len(run(stream, 500)) == 500
    assert source.read <= 5000 + 24
    with pytest.raises(UsageError, match="none consumed"):
        for _ in stream:
            pass


def test_reading_in_the_background_through_a_loader() -> None:
    loader = DataLoader(Numbers(0, 101), batch_size=None, num_workers=1)
    made = [Stream(loader, Allocations([3, 5]), rank=rank, world_size=2) for rank in range(2)]
    assert union([run(stream) for stream in made]) == list(range(101))


def test_what_cannot_work_is_said() -> None:
    once = Stream(iter(range(20)), Allocations([5]), rank=0, world_size=1)
    run(once)
    with pytest.raises(UsageError, match="only once"):
        run(once)
    with pytest.raises(ConfigError, match="agree"):
        Stream([1], Allocations([1, 1]), rank=0, world_size=2, sharded=True)
    with pytest.raises(ConfigError, match="batch_size=None"):
        Stream(DataLoader(Numbers(0, 9), batch_size=3), Allocations([1]), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="iterable"):
        Stream(3, Allocations([1]), rank=0, world_size=1)  # type: ignore[arg-type]
    made = streams([Numbers(0, 40), Numbers(40, 80)], [4, 4], sharded=True)
    run_all(made, 2)
    state = made[0].state_dict()
    with pytest.raises(StateError, match="shards belong to the ranks"):
        Stream([1], Allocations([1]), rank=0, world_size=1, sharded=True).load_state_dict(state)
    with pytest.raises(StateError, match="sharded="):
        Stream([1], Allocations([1]), rank=0, world_size=1).load_state_dict(state)
    shorter = streams([Numbers(0, 5), Numbers(40, 45)], [4, 4], sharded=True, states=[state] * 2)[0]
    with pytest.raises(StateError, match="ended after 5 samples"):
        next(iter(shorter))
