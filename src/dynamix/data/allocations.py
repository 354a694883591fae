"""The ledger of allocations: which batch sizes are in force at which micro-step."""

from __future__ import annotations

import sys
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError, StateError, UsageError
from dynamix.window import Ints


class Allocations:
    """Which allocation is in force at which micro-step, a counter over the whole job that never resets.

    `sizes` (W,) per rank hold from micro-step 0. All ranks hold equal ledgers, so all cut the same batches without
    talking. Where ranks may meet in two ways an allocation says which: with a `piece` each rank steps apart, on so many
    samples a step; with 0 their gradients meet.

    >>> ledger = Allocations([32, 32])
    >>> ledger.schedule(100, [16, 48])
    >>> ledger.at(99).tolist(), ledger.at(100).tolist(), ledger.since(250)
    ([32, 32], [16, 48], 100)
    """

    def __init__(self, sizes: ArrayLike) -> None:
        # Steps, sizes and pieces. Replaced as a whole, never changed: a thread may read ahead of the loop, and what was
        # planned by them stands while they are the same object.
        self.entries: tuple[list[int], list[Ints], list[int]] = [0], [_checked(sizes)], [0]

    @property
    def workers(self) -> int:
        """W, the number of ranks."""
        return int(self.entries[1][-1].size)

    @property
    def begin(self) -> int:
        """The first micro-step this ledger still knows."""
        return self.entries[0][0]

    def schedule(self, from_step: int, sizes: ArrayLike, piece: int = 0) -> None:
        """Put `sizes` (W,) in force from micro-step `from_step`; scheduling the same step again replaces.

        What is equal to those already in force there change nothing, and `since` then names the older step. Raises
        `ConfigError` for another W, for negative or all-zero sizes, and for a step before the last entry.
        """
        fresh = _checked(sizes)
        if fresh.size != self.workers:
            allowed = f"{self.workers} numbers, one per rank"
            raise ConfigError("sizes", fresh.tolist(), allowed, "pass one size per rank")
        steps, known, pieces = self.entries[0].copy(), self.entries[1].copy(), self.entries[2].copy()
        last = steps[-1]
        if from_step < last:
            allowed = f"{last} or later, the last step scheduled"
            raise ConfigError("from_step", from_step, allowed, "schedule in the order of steps")
        if from_step == last:
            del steps[-1], known[-1], pieces[-1]
        if not known or pieces[-1] != piece or not np.array_equal(known[-1], fresh):
            steps.append(from_step)
            known.append(fresh)
            pieces.append(piece)
        self.entries = steps, known, pieces

    def at(self, step: int) -> Ints:
        """Sizes (W,) in force at micro-step `step`; a read-only array."""
        return self.entries[1][self._find(step)]

    def piece_at(self, step: int) -> int:
        """Samples of a rank's own step at micro-step `step`, where ranks step apart then; 0 where they do not."""
        return self.entries[2][self._find(step)]

    def since(self, step: int) -> int:
        """The micro-step from which the allocation in force at `step` holds."""
        return self.entries[0][self._find(step)]

    def span(self, step: int) -> range:
        """The micro-steps in which the allocation in force at `step` holds, as far as is known."""
        steps, at = self.entries[0], self._find(step)
        return range(steps[at], steps[at + 1] if at + 1 < len(steps) else sys.maxsize)

    def reset(self, from_step: int, sizes: ArrayLike, piece: int = 0) -> None:
        """Start over: `sizes` of any W in force from micro-step `from_step`, nothing before it."""
        self.entries = [from_step], [_checked(sizes)], [piece]

    def forget(self, before_step: int) -> None:
        """Drop entries that no step from `before_step` on needs; the one in force there stays."""
        steps, sizes, pieces = self.entries
        keep = max(bisect_right(steps, before_step) - 1, 0)
        if keep:
            self.entries = steps[keep:], sizes[keep:], pieces[keep:]

    def from_on(self, step: int) -> dict[int, list[int]]:
        """The allocation in force at `step`, and those to come, by the micro-step from which they hold."""
        later = {s: sizes.tolist() for s, sizes in zip(*self.entries[:2], strict=True) if s > step}
        return {step: self.at(step).tolist()} | later

    def state_dict(self) -> dict[str, Any]:
        """Plain lists: `{"steps": [...], "sizes": [[...], ...]}`, and the `"pieces"` where ranks step apart in any."""
        steps, sizes, pieces = self.entries
        plain = {"steps": list(steps), "sizes": [s.tolist() for s in sizes]}
        return plain | ({"pieces": list(pieces)} if any(pieces) else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Raises `StateError` when it is of another W."""
        sizes = [_checked(s) for s in state["sizes"]]
        if not sizes or {s.size for s in sizes} != {self.workers} or len(sizes) != len(state["steps"]):
            raise StateError(
                f"allocations for {sizes[0].size if sizes else 0} ranks in the checkpoint, {self.workers} ranks in "
                "this job: at another world size start from a fresh Allocations instead"
            )
        pieces = [int(piece) for piece in state.get("pieces", [0] * len(sizes))]
        self.entries = [int(s) for s in state["steps"]], sizes, pieces

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Allocations:
        """The ledger of a checkpoint, whatever its W."""
        ledger = cls(state["sizes"][0])
        ledger.load_state_dict(state)
        return ledger

    def _find(self, step: int) -> int:
        """The number of the entry in force at `step`."""
        steps = self.entries[0]
        at = bisect_right(steps, step) - 1
        if at < 0:
            raise UsageError(f"micro-step {step} is forgotten: the ledger begins at {steps[0]}")
        return at


def _checked(sizes: ArrayLike) -> Ints:
    given = np.asarray(sizes)
    array = given.astype(np.int64)
    if array.ndim != 1 or array.size == 0 or not np.array_equal(array, given):
        raise ConfigError("sizes", given.tolist(), "whole numbers of shape (W,)", "pass one batch size per rank")
    if (array < 0).any() or not array.any():
        allowed = "0 or more, at least one above 0"
        raise ConfigError("sizes", array.tolist(), allowed, "use dynamix.project for valid sizes")
    array.flags.writeable = False
    return array
