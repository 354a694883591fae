"""A thread that reads ahead of the loop, over the end of an epoch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dynamix.data import Allocations, BatchSampler, Stream
from dynamix.data.order import SampleOrder
from dynamix.errors import UsageError

pytestmark = pytest.mark.timeout(60)
SAMPLES = 42


def sampler_of(**options: Any) -> BatchSampler:
    return BatchSampler(SAMPLES, Allocations([4]), rank=0, world_size=1, seed=3, **options)


def order(epoch: int) -> list[int]:
    return [i for batch in _fresh(epoch) for i in batch]


def _fresh(epoch: int) -> BatchSampler:
    sampler = sampler_of()
    sampler.set_epoch(epoch)
    return sampler


class Reader:
    """Reads epochs in a thread of its own; the loop takes batches from `ready`, and None at the end."""

    def __init__(self, batches: Iterable[Any], epochs: int, *, names: SampleOrder | None = None) -> None:
        self.ready: queue.Queue[Any] = queue.Queue(5)
        self.error: Exception | None = None
        self._batches, self._epochs, self._names = batches, epochs, names
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for epoch in range(self._epochs):
                if self._names is not None:
                    self._names.set_epoch(epoch)
                for batch in self._batches:
                    self.ready.put(batch)
        except UsageError as error:
            self.error = error
        self.ready.put(None)


def consumed(reader: Reader, source: SampleOrder) -> list[tuple[int, list[int]]]:
    """(epoch, samples) of every step, slowly: the reader is ahead."""
    steps = []
    while (batch := reader.ready.get()) is not None:
        time.sleep(0.001)
        samples = batch[0].tolist() if isinstance(batch[0], torch.Tensor) else batch
        plan = source.consume()
        assert len(samples) == plan.counts[0]
        steps.append((plan.epoch, samples))
    return steps


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize(("workers", "persistent"), [(None, False), (2, False), (2, True)])
def test_every_epoch_follows_the_one_before(workers: int | None, persistent: bool, names: bool) -> None:
    sampler = sampler_of()
    batches: Any = sampler
    if workers is not None:
        data = TensorDataset(torch.arange(SAMPLES))
        batches = DataLoader(data, batch_sampler=sampler, num_workers=workers, persistent_workers=persistent)
    reader = Reader(batches, 4, names=sampler if names else None)
    steps = consumed(reader, sampler)
    assert reader.error is None
    for epoch in range(4):
        assert [i for of, samples in steps for i in samples if of == epoch] == order(epoch)
    assert (sampler.epoch, sampler.finished, sampler.issued) == (3, True, sampler.consumed)


def test_a_checkpoint_between_two_epochs_is_of_the_one_being_consumed() -> None:
    sampler = sampler_of()
    reader = Reader(sampler, 2)
    taken: list[int] = []
    for _ in range(9):  # of 10 or 11
        taken += reader.ready.get()
        sampler.consume()
    state = sampler.state_dict()
    assert (state["epoch"], state["position"], state["finished"]) == (0, len(taken), False)
    resumed = sampler_of()
    resumed.load_state_dict(state)
    assert taken + [i for batch in resumed for i in batch] == order(0)


def test_the_loop_may_name_the_epoch_that_its_reader_has_begun() -> None:
    sampler = sampler_of()
    reader = Reader(sampler, 2)
    seen: dict[int, list[int]] = {0: [], 1: []}
    for epoch, of in seen.items():
        sampler.set_epoch(epoch)
        while not (of and sampler.finished):
            time.sleep(0.001)
            of.extend(reader.ready.get())
            sampler.consume()
    assert seen == {0: order(0), 1: order(1)}


def _cut_short(batches: Iterable[Any], most: int) -> Any:
    class Some:
        def __iter__(self) -> Any:
            return (batch for _, batch in zip(range(most), batches, strict=False))

    return Some()


@pytest.mark.parametrize("kind", ["regions", "stream", "cut short"])
def test_what_cannot_be_known_is_refused_with_the_line_to_write(kind: str) -> None:
    options: dict[str, Any] = {"rank": 0, "world_size": 1}
    source: Any = Stream(range(SAMPLES), Allocations([4]), **options)
    if kind != "stream":
        source = sampler_of(partition="contiguous" if kind == "regions" else "stream")
    reader = Reader(_cut_short(source, 3) if kind == "cut short" else source, 2)
    steps = 0
    while reader.ready.get() is not None:
        time.sleep(0.02)
        source.consume()
        steps += 1
    assert isinstance(reader.error, UsageError)
    assert "join()" in str(reader.error)
    assert steps == (3 if kind == "cut short" else 11), "the loop goes on until it is told"


@pytest.mark.parametrize("kind", ["regions", "stream"])
def test_a_reader_that_waits_for_the_loop_is_right(kind: str) -> None:
    options: dict[str, Any] = {"rank": 0, "world_size": 1}
    source: Any = Stream(range(SAMPLES), Allocations([4]), **options)
    if kind == "regions":
        source = sampler_of(partition="contiguous")
    ready: queue.Queue[Any] = queue.Queue(5)

    def read() -> None:
        for _ in range(2):
            for batch in source:
                ready.put(batch)
            ready.join()
        ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    epochs = []
    while ready.get() is not None:
        epochs.append(source.consume().epoch)
        ready.task_done()
    assert epochs == [0] * 11 + [1] * 11


def test_a_thread_begun_for_an_epoch_goes_on_where_the_loop_stands() -> None:
    sampler = sampler_of()
    taken: list[int] = []
    for most in (3, 100):  # the first is left in the middle of the epoch, with batches in its queue
        reader = Reader(sampler, 1)
        for _ in range(most):
            if (batch := reader.ready.get()) is None:
                break
            taken += batch
            sampler.consume()
    assert taken == order(0)
