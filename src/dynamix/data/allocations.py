"""The ledger of allocations: which batch sizes are in force in which round."""

from __future__ import annotations

import sys
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError, StateError, UsageError
from dynamix.window import Ints


class Allocations:
    """Which allocation is in force in which round, a counter over the whole job that never resets.

    `sizes` (W,), samples of a round per rank, hold from round 0. All ranks hold equal ledgers, so all cut the same
    batches without talking. If ranks may meet in two ways, an allocation says which: with a `piece` each rank steps
    apart, on so many samples a step; with 0 their gradients meet. A round is an optimizer step.

    >>> ledger = Allocations([32, 32])
    >>> ledger.schedule(100, [16, 48])
    >>> ledger.at(99).tolist(), ledger.at(100).tolist(), ledger.since(250)
    ([32, 32], [16, 48], 100)
    """

    def __init__(self, sizes: ArrayLike) -> None:
        # Rounds, sizes and pieces. Replaced as a whole, never changed: a thread may read ahead of the loop, and what
        # was planned by them stands while they are the same object.
        self.entries: tuple[list[int], list[Ints], list[int]] = [0], [_checked(sizes)], [0]

    @property
    def workers(self) -> int:
        """W, the number of ranks."""
        return int(self.entries[1][-1].size)

    @property
    def begin(self) -> int:
        """The first round that this ledger still knows."""
        return self.entries[0][0]

    def schedule(self, from_step: int, sizes: ArrayLike, piece: int = 0) -> None:
        """Put `sizes` (W,) in force from round `from_step`; scheduling the same round again replaces.

        Allocations that are equal to those already in force there change nothing, and `since` then names the older
        round. Raises `ConfigError` for another W, for negative or all-zero sizes, and for a round before the last
        entry.
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

    def at(self, number: int) -> Ints:
        """Sizes (W,) in force in round `number`; a read-only array."""
        return self.entries[1][self._find(number)]

    def piece_at(self, number: int) -> int:
        """Samples of a rank's own step in round `number`, where ranks step apart then; 0 where they do not."""
        return self.entries[2][self._find(number)]

    def since(self, number: int) -> int:
        """The round from which the allocation in force in round `number` holds."""
        return self.entries[0][self._find(number)]

    def span(self, number: int) -> range:
        """The rounds in which the allocation in force in round `number` holds, as far as is known."""
        steps, at = self.entries[0], self._find(number)
        return range(steps[at], steps[at + 1] if at + 1 < len(steps) else sys.maxsize)

    def reset(self, from_step: int, sizes: ArrayLike, piece: int = 0) -> None:
        """Start over: `sizes` of any W in force from round `from_step`, nothing before it."""
        self.entries = [from_step], [_checked(sizes)], [piece]

    def forget(self, before_step: int) -> None:
        """Drop entries that no round from `before_step` on needs; the one in force there stays."""
        steps, sizes, pieces = self.entries
        keep = max(bisect_right(steps, before_step) - 1, 0)
        if keep:
            self.entries = steps[keep:], sizes[keep:], pieces[keep:]

    def from_on(self, number: int) -> dict[int, list[int]]:
        """The allocation in force in round `number`, and those to come, by the round from which they hold."""
        later = {s: sizes.tolist() for s, sizes in zip(*self.entries[:2], strict=True) if s > number}
        return {number: self.at(number).tolist()} | later

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

    def _find(self, number: int) -> int:
        """The place of the entry in force in round `number`."""
        steps = self.entries[0]
        at = bisect_right(steps, number) - 1
        if at < 0:
            raise UsageError(f"round {number} is forgotten: the ledger begins at {steps[0]}")
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
