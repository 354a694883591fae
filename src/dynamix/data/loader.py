"""A `DataLoader` made anew so that its batches are the controller's: everything else about it stays."""

from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from dynamix.data.sampler import BatchSampler
from dynamix.errors import ConfigError, UsageError

OWN = "loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset, seed=...))"
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("prefetch_factor", "persistent_workers", "multiprocessing_context"),
)


class Loader(DataLoader[Any]):
    """A `DataLoader` over a `BatchSampler`; `set_epoch` is the sampler's, as frameworks look for it on both.

    Without a generator of the user's, what the loader's processes draw follows from the seed and the epoch. The global
    random state then does not depend on where an epoch was begun, and a resumed job draws as before.
    """

    def __init__(self, sampler: BatchSampler, dataset: Any, *, generator: torch.Generator | None, **kept: Any) -> None:
        self._drawn = generator is None
        super().__init__(dataset, batch_sampler=sampler, generator=generator or torch.Generator(), **kept)
        self.cut = sampler

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next iteration has."""
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
    """A loader for frameworks that count epochs and steps themselves: each iteration goes on where the last one ended.

    It has no `set_epoch`, so that no framework can leave samples out: what an iteration leaves is the next one's.

    steps   what `len()` says whenever it is asked, the batches of a whole epoch; where it says None there is no length
    place   done to each batch, such as moving it to a device
    """

    def __init__(
        self, loader: Loader, *, steps: Callable[[], int | None], place: Callable[[Any], Any] | None = None
    ) -> None:
        self.loader, self.dataset, self.sampler = loader, loader.dataset, None
        self._steps, self._place = steps, place

    def __len__(self) -> int:
        if (steps := self._steps()) is None:
            fix = "size schedules by samples: controller.scheduler(scheduler, nominal_batch_size=...)"
            raise TypeError(f"an epoch has no fixed number of steps while the global batch moves: {fix}")
        return steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader) if self._place is None else map(self._place, self.loader)


def order_of(loader: DataLoader[Any]) -> tuple[bool, int]:
    """(whether it shuffles, its seed) of a loader whose order can be kept.

    Raises `UsageError` for one that draws samples in another way, naming the line to write.

    >>> order_of(DataLoader(range(4), shuffle=True)), order_of(DataLoader(range(4)))
    ((True, 0), (False, 0))
    """
    if type(loader) is Loader:
        raise UsageError("this loader is the controller's already: iterate it as it is")
    if type(loader) is not DataLoader:
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        fix = "pass the plain DataLoader, before a framework prepares it"
        raise UsageError(
            f"controller.loader() makes torch's own DataLoader anew, and this is a {kind}: {fix}, or {OWN}"
        )
    if isinstance(loader.dataset, IterableDataset):
        fix = "for batch in controller.stream(dataset, collate_fn=...)"
        raise UsageError(f"an IterableDataset has no indices that could be dealt out: write {fix}")
    if not loader.in_order:
        raise UsageError("in_order=False gives batches out of turn, so weights would be wrong: leave it out")
    cut, drawn = loader.batch_sampler, loader.sampler
    if type(cut) is not torch_data.BatchSampler:
        what = "without batches (batch_size=None)" if cut is None else f"cut by a {type(cut).__name__}"
        raise UsageError(f"the loader's samples come {what}; the controller cuts batches itself: {OWN}")
    if isinstance(drawn, DistributedSampler):
        return bool(drawn.shuffle), int(drawn.seed)
    if type(drawn) is SequentialSampler:
        return False, 0
    if type(drawn) is RandomSampler and not drawn.replacement and drawn.num_samples == len(cast(Sized, loader.dataset)):
        return True, 0
    fix = "every sample comes once an epoch, in a shuffled order or as they lie: use shuffle=True, False or"
    raise UsageError(f"the order of a {type(drawn).__name__} cannot be kept: {fix} {OWN}")


def require_batch_size(loader: DataLoader[Any], allowed: dict[str, int]) -> None:
    """Raise `ConfigError` unless the loader's batches are of one of the sizes that the controller was told.

    allowed   by the name of the argument
    """
    if loader.batch_size not in allowed.values():
        told = " and ".join(f"{name}={value}" for name, value in allowed.items())
        fix = f"say Controller(batch_size={loader.batch_size}), or build the loader with the controller's"
        raise ConfigError("the loader's batch_size", loader.batch_size, f"the controller's, {told}", fix)


def made_anew(loader: DataLoader[Any], sampler: BatchSampler) -> Loader:
    """`loader` with its batches cut by `sampler`: same data, processes, collation, pinning and generator."""
    kept = {name: getattr(loader, name) for name in _KEPT}
    if loader.pin_memory_device:
        kept["pin_memory_device"] = loader.pin_memory_device
    return Loader(sampler, loader.dataset, generator=loader.generator, **kept)
