"""A loader with a state of its own, torchdata's or one like it: the place in the data is the controller's."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.union import Script

DATA = TensorDataset(torch.arange(150.0))


class Likewise(DataLoader[Any]):
    """What torchdata's `StatefulDataLoader` (0.11) does with a sampler that has a state, without its processes.

    It reads as far ahead as workers would, and keeps what the sampler said of itself whenever it asked for a batch.
    """

    def __init__(self, *given: Any, snapshot_every_n_steps: int = 1, **named: Any) -> None:
        super().__init__(*given, **named)
        self.every, self.next_iter_state, self.reading = snapshot_every_n_steps, None, None

    def __iter__(self) -> Any:
        self.reading = self._made()
        if self.reading.finished:
            self.reading = self._made()
        return self.reading

    def _made(self) -> _Reading:
        made = _Reading(self, self.next_iter_state)
        self.next_iter_state = None
        return made

    def state_dict(self) -> dict[str, Any]:
        return self.reading.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_iter_state = state


class _Reading:
    def __init__(self, loader: Likewise, state: dict[str, Any] | None) -> None:
        self._index_sampler, self.loader = loader.batch_sampler, loader
        self._sampler_iter = iter(self._index_sampler)
        self._num_yielded, self.finished = 0, False
        self._sampler_iter = iter(self._index_sampler)  # one with workers does so once they are there
        self._asked: deque[tuple[list[int], Any]] = deque()
        self._kept: tuple[int, Any] = 0, self._index_sampler.state_dict()
        if state is not None:
            self._restore(state)
        for _ in range(loader.num_workers * (loader.prefetch_factor or 0)):
            self._ask()
        if state is not None:
            for _ in range(state["_steps_since_snapshot"]):
                next(self)
            self.finished = state["_iterator_finished"]

    def _restore(self, state: dict[str, Any]) -> None:
        self._kept = self._num_yielded, _ = state["kept"]
        _deserialized(self._index_sampler, self._kept[1])
        self._sampler_iter = iter(self._index_sampler)

    def _ask(self) -> None:
        if (batch := next(self._sampler_iter, None)) is not None:
            self._asked.append((batch, self._index_sampler.state_dict()))

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> Any:
        self._ask()
        if not self._asked:
            self.finished = True
            raise StopIteration
        batch, state = self._asked.popleft()
        self._num_yielded += 1
        if self._num_yielded % self.loader.every == 0:
            self._kept = self._num_yielded, state
        return self.loader.collate_fn([self.loader.dataset[i] for i in batch])

    def state_dict(self) -> dict[str, Any]:
        kept = self._kept if self.loader.num_workers else (self._num_yielded, self._index_sampler.state_dict())
        skipped = self._num_yielded - kept[0]
        return {"kept": kept, "_steps_since_snapshot": skipped, "_iterator_finished": self.finished}


def _deserialized(sampler: Any, state: Any) -> None:
    sampler.load_state_dict(state)


def _torchdatas(*given: Any, **named: Any) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(*given, **named)


class Job:
    """A loop on rank `rank`; it goes on from what `save` gave of the controller and of the loader."""

    def __init__(self, kind: Any, workers: int, *, sizes: tuple[int, ...] = (6,), **options: Any) -> None:
        torch.manual_seed(0)
        net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        self.controller = dynamix.Controller(Script([sizes, sizes[::-1]]), sum(sizes) // len(sizes), interval=2)
        self.model = self.controller.wrap(DDP(net) if len(sizes) > 1 else net, self.optimizer)
        self.sampler = self.controller.batch_sampler(DATA)
        self.loader = kind(DATA, batch_sampler=self.sampler, num_workers=workers, **options)

    def go_on(self, controllers: Any, loaders: Any) -> None:
        if controllers is not None:
            self.controller.load_state_dict(controllers)
        if loaders is not None:
            self.loader.load_state_dict(loaders)

    def train(self, batches: int | None = None) -> list[int]:
        seen = []
        for (x,) in itertools.islice(self.loader, batches):
            assert self.sampler.received()[0] == self.sampler.batches_consumed + 1
            self.model(x[:, None]).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.controller.step()
            seen += x.int().tolist()
        return seen


@pytest.fixture(params=[Likewise, _torchdatas], ids=["likewise", "torchdata"])
def kind(request: pytest.FixtureRequest, recwarn: pytest.WarningsRecorder) -> Any:
    return request.param  # `recwarn`: torchdata 0.11 calls what torch has done away with


@pytest.mark.parametrize(
    ("workers", "batches", "loaders"), [(0, 10, True), (2, 10, True), (2, 10, False), (2, 25, True), (2, None, False)]
)
def test_the_controllers_place_holds(kind: Any, workers: int, batches: int | None, loaders: bool) -> None:
    job = Job(kind, workers)
    seen = job.train(batches)
    state, of_loader = job.controller.state_dict(), job.loader.state_dict()
    again = Job(kind, workers)
    again.go_on(state, of_loader if loaders else None)
    again.sampler.set_epoch(0)  # of an epoch that is done nothing is left
    seen += again.train()
    assert sorted(seen) == list(range(150))
    again.sampler.set_epoch(1)
    assert sorted(again.train()) == list(range(150))


def test_a_loaders_state_alone_is_refused_if_it_reads_ahead(kind: Any) -> None:
    job = Job(kind, 2)
    job.train(10)
    again = Job(kind, 2)
    again.go_on(None, job.loader.state_dict())
    with pytest.raises(UsageError, match=r"dealt again: write controller\.load_state_dict\(state\) before the loop"):
        again.train()


def test_a_loaders_state_alone_is_exact_if_it_does_not(kind: Any) -> None:
    job, again = Job(kind, 0), Job(kind, 0)
    seen = job.train(10)
    again.go_on(None, job.loader.state_dict())
    assert sorted(seen + again.train()) == list(range(150))


def test_a_loader_that_would_skip_batches_is_refused(kind: Any) -> None:
    job, again = (Job(kind, 2, snapshot_every_n_steps=4) for _ in range(2))
    job.train(10)
    again.go_on(job.controller.state_dict(), job.loader.state_dict())
    with pytest.raises(UsageError, match=r"snapshot_every_n_steps=1"):
        again.train()


def _on_ranks(rank: int, saved: list[Any] | None) -> tuple[list[int], Any]:
    job = Job(Likewise, 2, sizes=(4, 8))
    if saved is not None:
        job.go_on(*saved[rank])
    seen = job.train(None if saved else 5)
    state = job.controller.state_dict(), job.loader.state_dict()
    job.controller.close()
    return seen, state


@pytest.mark.multiproc
def test_ranks_repeat_and_lose_nothing() -> None:
    first = run_ranks(_on_ranks, 2, None)
    rest = run_ranks(_on_ranks, 2, [state for _, state in first])
    seen = Counter(i for of_rank in (*first, *rest) for i in of_rank[0])
    assert seen == Counter(range(150))
