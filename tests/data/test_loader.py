"""A loader made anew: the same data in the same order, the controller's batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import dynamix
from dynamix.errors import ConfigError, UsageError

DATA = TensorDataset(torch.arange(40))


def _loader(given: DataLoader[Any], **arguments: Any) -> DataLoader[Any]:
    return dynamix.Controller("static", **({"batch_size": 8} | arguments)).loader(given)


def _seen(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def _doubled(samples: list[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    return [2 * torch.stack([sample[0] for sample in samples])]


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class _Cut:
    def __iter__(self) -> Any:
        return iter([[0, 1]])

    def __len__(self) -> int:
        return 1


class _Other(DataLoader[Any]):
    pass


def test_order_and_everything_else_are_kept() -> None:
    assert _seen(_loader(DataLoader(DATA, batch_size=8))) == [list(range(i, i + 8)) for i in range(0, 40, 8)]
    sampler = DistributedSampler(DATA, num_replicas=1, rank=0, seed=3, drop_last=True)
    loader = _loader(
        DataLoader(DATA, batch_size=8, sampler=sampler, collate_fn=_doubled, num_workers=2, prefetch_factor=3)
    )
    assert (loader.num_workers, loader.prefetch_factor, loader.collate_fn) == (2, 3, _doubled)
    for given in (loader, loader.sampler):  # as loops write it that had a `DistributedSampler`
        sampler.set_epoch(sampler.epoch + 5)
        given.set_epoch(sampler.epoch)  # type: ignore[union-attr]
        assert [i for batch in _seen(loader) for i in batch] == [2 * i for i in sampler]


def test_every_sample_comes_once_also_where_a_tail_would_be_dropped() -> None:
    loader = _loader(DataLoader(DATA, batch_size=7, shuffle=True, drop_last=True), batch_size=7)
    assert sorted(i for batch in _seen(loader) for i in batch) == list(range(40))


def test_what_processes_draw_follows_from_seed_and_epoch() -> None:
    def drawn(epoch: int) -> list[int]:
        loader = _loader(DataLoader(_Random(), batch_size=8, shuffle=True, num_workers=1))
        loader.set_epoch(epoch)  # type: ignore[attr-defined]
        return [int(value) for batch in loader for value in batch]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drawn(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn(0) == first != drawn(1)


class _Random:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> int:
        return int(torch.randint(1 << 30, ()))


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        (lambda: DataLoader(_Stream(), batch_size=8), "controller.stream"),
        (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
        (lambda: DataLoader(DATA, batch_sampler=_Cut()), "cut by a _Cut"),  # type: ignore[arg-type]
        (lambda: DataLoader(DATA, batch_size=8, sampler=RandomSampler(DATA, num_samples=9)), "RandomSampler"),
        (lambda: DataLoader(DATA, batch_size=8, num_workers=1, in_order=False), "in_order=False"),
        (lambda: _Other(DATA, batch_size=8), "the plain DataLoader"),
        (lambda: _loader(DataLoader(DATA, batch_size=8)), "already"),
    ],
)
def test_what_cannot_be_kept_is_refused(loader: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line.replace("(", r"\(")):
        _loader(loader())


def test_another_batch_size_than_the_controllers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=8.*Controller\(batch_size=4\)"):
        _loader(DataLoader(DATA, batch_size=4))
    pieces = _loader(DataLoader(DATA, batch_size=4), batch_size=8, micro_batch=4)
    assert pieces.batch_sampler is not None
