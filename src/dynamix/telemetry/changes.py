"""Changes of sizes in a run: how many there were, and the largest of them."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from dynamix.window import Window

LARGEST = 40  # changes that are kept


@dataclass(frozen=True)
class SizeChange:
    """A change of sizes between two windows; `moved` is the part of the round that went to other workers."""

    at_s: float
    window: int
    total: tuple[int, int]  # before, after
    moved: float
    most: tuple[int, int, int]  # the worker whose share changed most, its size before and after


class SizeChanges:
    """Counts the changes of a run's windows as they come, and keeps the largest."""

    def __init__(self) -> None:
        self.count = 0
        self._last: Window | None = None
        self._largest: list[tuple[float, int, SizeChange]] = []

    @property
    def largest(self) -> list[SizeChange]:
        """The largest changes, oldest first."""
        return [change for _, _, change in sorted(self._largest, key=lambda entry: entry[1])]

    def add(self, window: Window, at_s: float, index: int) -> None:
        """Take in the next window, which began at `at_s`."""
        before, self._last = self._last, window
        if before is None or before.workers != window.workers or (before.batch_size == window.batch_size).all():
            return
        self.count += 1
        old, new = before.batch_size, window.batch_size
        total = int(old.sum()), int(new.sum())
        shares = np.abs(new / max(total[1], 1) - old / max(total[0], 1))
        worker, moved = int(shares.argmax()), float(shares.sum() / 2)
        change = SizeChange(at_s, index, total, moved, (worker, int(old[worker]), int(new[worker])))
        size = moved + abs(math.log(max(total[1], 1) / max(total[0], 1)))
        heapq.heappush(self._largest, (size, self.count, change))
        if len(self._largest) > LARGEST:
            heapq.heappop(self._largest)
