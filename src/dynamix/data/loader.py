"""Rebuilds a `DataLoader` so that the controller sets its batches, and everything else stays as it was."""

from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.utils.data as torch_data
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dynamix.data.sampler import BatchSampler
from dynamix.data.selection import Indices, Weights
from dynamix.errors import ConfigError, UsageError

OWN = "loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset, seed=...))"
_SELECTED = (
    "Write DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset, seed=...)). That takes every sample "
    "once an epoch; say indices= if yours takes a part of them, weights= if it draws them by weight, lengths= and "
    "padded=True if it puts samples of like length together"
)
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("prefetch_factor", "persistent_workers", "multiprocessing_context"),
)


class Loader(DataLoader[Any]):
    """A `DataLoader` over a `BatchSampler`. It has the sampler's `set_epoch`, because frameworks look for it on both.

    If the user gives no generator, the seeds of the loader's processes follow from the seed and the epoch. The global
    random state then does not depend on where an epoch began, and a resumed job draws the same numbers.
    """

    def __init__(self, sampler: BatchSampler, dataset: Any, *, generator: torch.Generator | None, **kept: Any) -> None:
        self._drawn = generator is None
        super().__init__(dataset, batch_sampler=sampler, generator=generator or torch.Generator(), **kept)
        self.cut = sampler
        object.__setattr__(self, "sampler", sampler)  # for loops that call `loader.sampler.set_epoch(epoch)`

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration uses."""
        self.cut.set_epoch(epoch)

    def __iter__(self) -> Any:
        if self._drawn:
            self.generator.manual_seed(self.cut.seed + self.cut.epoch)
        batches = super().__iter__()
        return batches if self.cut.placeholder is None else self._masked(batches, self.cut.placeholder)

    def _masked(self, batches: Iterator[Any], mask: Callable[[Any], Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch if self.cut.handed_on().samples else mask(batch)


class Epochs:
    """A loader for frameworks that count epochs and steps themselves: each iteration continues where the last ended.

    It has no `set_epoch`, so that no framework can skip samples: those that an iteration leaves go to the next.

    steps   gives `len()`, the batches of a whole epoch, each time it is asked; if it returns None there is no length
    place   applied to each batch, for example to move it to a device
    """

    def __init__(
        self, loader: Loader, *, steps: Callable[[], int | None], place: Callable[[Any], Any] | None = None
    ) -> None:
        self.loader, self.dataset, self.sampler = loader, loader.dataset, None
        self._steps, self._place = steps, place

    def __len__(self) -> int:
        if (steps := self._steps()) is None:
            fix = "size schedules by samples: controller.scheduler(scheduler, nominal_batch_size=...)"
            raise TypeError(f"a rank has no fixed number of batches in an epoch here: {fix}")
        return steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader) if self._place is None else map(self._place, self.loader)


class LoaderOrder(NamedTuple):
    """The order of a loader's samples, in the arguments of `Controller.batch_sampler`."""

    shuffle: bool
    seed: int = 0
    indices: Indices | None = None
    weights: Weights | None = None
    num_samples: int | None = None


def order_of(loader: DataLoader[Any]) -> LoaderOrder:
    """The order of a loader's samples, if it can be kept.

    Raises `UsageError`, with the line to write, for a loader that draws samples in another way.

    >>> order_of(DataLoader(range(4), shuffle=True)).shuffle, order_of(DataLoader(range(4))).shuffle
    (True, False)
    >>> order_of(DataLoader(range(4), sampler=SubsetRandomSampler([0, 3]))).indices
    [0, 3]
    """
    if type(loader) is Loader:
        raise UsageError("controller.loader() has made this loader already: iterate it directly")
    if type(loader) is not DataLoader:
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        fix = "pass the plain DataLoader, before a framework prepares it"
        raise UsageError(f"controller.loader() takes torch's own DataLoader, but this is a {kind}: {fix}; or {OWN}")
    if isinstance(loader.dataset, IterableDataset):
        fix = "for batch in controller.stream(dataset, collate_fn=...)"
        raise UsageError(f"an IterableDataset has no indices that could be dealt out: write {fix}")
    if not loader.in_order:
        raise UsageError("in_order=False gives batches out of turn, so weights would be wrong: leave it out")
    cut = loader.batch_sampler
    if type(cut) is not torch_data.BatchSampler:
        what = "without batches (batch_size=None)" if cut is None else f"cut by a {type(cut).__name__}"
        raise UsageError(f"the loader's samples come {what}, and the controller cuts batches itself. {_SELECTED}")
    order = _order_of(cut.sampler, len(cast(Sized, loader.dataset)))
    if order is None:
        raise UsageError(f"the order of a {type(cut.sampler).__name__} cannot be kept. {_SELECTED}")
    return order


def _order_of(drawn: Any, samples: int) -> LoaderOrder | None:
    """The order that a sampler gives this many samples; None if it has no order that can be kept."""
    kind = type(drawn)
    if kind is SubsetRandomSampler:
        return LoaderOrder(True, indices=drawn.indices)
    if kind is WeightedRandomSampler and drawn.replacement:
        first = _first(len(drawn.weights), samples)
        return LoaderOrder(True, indices=first, weights=drawn.weights, num_samples=drawn.num_samples)
    if kind is RandomSampler and drawn.replacement:
        of = len(drawn.data_source)
        return LoaderOrder(True, indices=_first(of, samples), weights=np.ones(of), num_samples=drawn.num_samples)
    if isinstance(drawn, DistributedSampler):
        if kind.__iter__ is DistributedSampler.__iter__ or kind.__module__.startswith("torchdata."):
            return LoaderOrder(bool(drawn.shuffle), int(drawn.seed), _first(len(cast(Sized, drawn.dataset)), samples))
        if kind.__module__.startswith(("lightning.", "pytorch_lightning.")):  # a wrapper around the user's own
            return _order_of(getattr(drawn.dataset, "_sampler", None), samples)
    if kind is SequentialSampler or (kind is RandomSampler and drawn.num_samples == len(drawn.data_source)):
        return LoaderOrder(kind is RandomSampler, 0, _first(len(drawn.data_source), samples))
    return None


def _first(size: int, samples: int) -> Indices | None:
    """The samples of a data set that a sampler made for `size` samples draws."""
    return None if size == samples else np.arange(size)


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Samples of a batch, even if the loader has torch's own `BatchSampler`; None if batches differ."""
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is torch_data.BatchSampler else None


def require_batch_size(loader: DataLoader[Any], allowed: dict[str, int]) -> None:
    """Raise `ConfigError` unless the loader's batch size is one of those given to the controller.

    allowed   sizes by the name of the argument
    """
    if (size := batch_size_of(loader)) not in allowed.values():
        told = " and ".join(f"{name}={value}" for name, value in allowed.items())
        fix = f"write Controller(batch_size={size}), or give the loader the controller's"
        raise ConfigError("the loader's batch_size", size, f"the controller's, {told}", fix)


def made_anew(loader: DataLoader[Any], sampler: BatchSampler) -> Loader:
    """`loader` with its batches cut by `sampler`: same data, processes, collation, pinning and generator."""
    kept = {name: getattr(loader, name) for name in _KEPT}
    if loader.pin_memory_device:
        kept["pin_memory_device"] = loader.pin_memory_device
    return Loader(sampler, loader.dataset, generator=loader.generator, **kept)
