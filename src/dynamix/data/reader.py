"""Finds out who reads a sampler. A `DataLoader`'s iterator shows how many batches the loop has received."""

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader

from dynamix.errors import UsageError

LOOK = 4  # stack frames from the first line of an iteration up to the loader's own


class BatchReader:
    """The reader of a sampler: a loader's iterator, or (None) something unknown.

    iterator returns the loader's iterator while it exists; else None
    known    whether it is a loader's iterator, even if it is used up or was abandoned
    before   batches that the iterator counts as handed on, but that belong to an earlier process
    asked    how often it has asked for a batch in this iteration, including after the last one
    ahead    whether it asks for batches before the loop needs them
    resumes  the state that torchdata's StatefulDataLoader resumes from, if it has one to load; else empty
    """

    def __init__(self, iterator: Any = None, loader: DataLoader[Any] | None = None) -> None:
        self.known = iterator is not None
        self.iterator: Callable[[], Any] = weakref.ref(iterator) if self.known else lambda: None
        self._at_first = 0 if loader is None else loader.num_workers * (loader.prefetch_factor or 0)
        self.asked = self.before = 0
        self.ahead = loader is not None and loader.num_workers > 0
        resumes = getattr(loader, "next_iter_state", None)
        self.resumes: dict[str, Any] = resumes if isinstance(resumes, dict) else {}

    def begin(self) -> None:
        """Call before it asks for the first batch."""
        self.before += self.handed_on or 0

    @property
    def handed_on(self) -> int | None:
        """Batches that it has handed on; None if unknown."""
        iterator = self.iterator()
        return None if iterator is None else int(iterator._num_yielded) - self.before

    @property
    def has_handed_on(self) -> int:
        """A lower bound of the batches handed on, even if the iterator is gone. A loader with workers asks ahead, and
        then once with every batch that it hands on, even after the last batch."""
        known = self.handed_on
        return max(self.asked - self._at_first, 0) if known is None else known


def reader_of(sampler: object) -> BatchReader:
    """The reader of `sampler`. Call it at the start of an iteration.

    A `DataLoader` with workers reads ahead, so the loop has received fewer batches than it asked for. Raises
    `UsageError` for loaders that would misread the batches: `sampler=` with a batch size, or `in_order=False`.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(LOOK):
        if (frame := frame.f_back if frame is not None else None) is None:
            break
        told = frame.f_locals
        caller, loader = told.get("self"), told.get("loader")
        if isinstance(caller, TorchBatchSampler) and getattr(caller, "batch_sampler", None) is sampler:
            kind = type(caller).__name__
            if kind == "SkipBatchSampler":
                fix = "a loaded controller goes on where it was, so iterate the loader without skip_first_batches"
                raise UsageError(f"{kind} would leave samples out that the controller has not dealt yet: {fix}")
            fix = "leave it out of prepare(), or write dynamix.integrations.accelerate.prepare(...)"
            raise UsageError(f"prepare() would split this loader's batches among the ranks a second time: {fix}")
        if isinstance(caller, TorchBatchSampler) and getattr(caller, "sampler", None) is sampler:
            fix = "write DataLoader(dataset, batch_sampler=sampler, ...), without batch_size, shuffle and drop_last"
            raise UsageError(f"DataLoader(sampler=...) would make batches of whole batches: {fix}")
        if isinstance(loader, DataLoader) and hasattr(caller, "_num_yielded"):
            if loader.num_workers and not getattr(loader, "in_order", True):
                why = "a batch would be weighted and counted as if it were another one"
                raise UsageError(f"DataLoader(in_order=False) hands batches on in any order, so {why}: leave it out")
            return BatchReader(caller, loader)
    return BatchReader()
