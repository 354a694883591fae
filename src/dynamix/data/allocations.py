"""The ledger of allocations: the batch sizes of every round."""

from __future__ import annotations

import sys
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError, StateError, UsageError
from dynamix.window import Ints


class Allocations:
    """Records which allocation applies to which round; rounds are counted over the whole job and never reset.

    `sizes` (W,), samples of a round per rank, apply from round 0. All ranks hold equal ledgers, so all cut the same
    batches without communication. If ranks may synchronise in two ways, the allocation chooses: with a `piece` each
    rank takes local steps of that many samples; with 0 gradients are averaged, and a round is one optimizer step.

    >>> ledger = Allocations([32, 32])
    >>> ledger.schedule(100, [16, 48])
    >>> ledger.at(99).tolist(), ledger.at(100).tolist(), ledger.since(250)
    ([32, 32], [16, 48], 100)
    """

    def __init__(self, sizes: ArrayLike) -> None:
        # Rounds, sizes and pieces. Always replaced as a whole, because a thread may read ahead of the loop. So a plan
        # stays valid while this is the same object.
        self.entries: tuple[list[int], list[Ints], list[int]] = [0], [_checked(sizes)], [0]

    @property
    def workers(self) -> int:
        """W, the number of ranks."""
        return int(self.entries[1][-1].size)

    @property
    def begin(self) -> int:
        """The first round in this ledger."""
        return self.entries[0][0]

    def schedule(self, from_step: int, sizes: ArrayLike, piece: int = 0) -> None:
        """Apply `sizes` (W,) from round `from_step`; scheduling the same round again replaces the entry.

        If they equal the sizes already in force there, nothing changes, and `since` returns the older round. Raises
        `ConfigError` for another W, for negative or all-zero sizes, and for a round before the last entry.

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
        """Samples of a rank's local step in round `number`; 0 if the round has no local steps."""
        return self.entries[2][self._find(number)]

    def since(self, number: int) -> int:
        """The first round of the allocation in force in round `number`."""
        return self.entries[0][self._find(number)]

    def span(self, number: int) -> range:
        """The rounds of the allocation in force in round `number`, as scheduled so far."""
        steps, at = self.entries[0], self._find(number)
        return range(steps[at], steps[at + 1] if at + 1 < len(steps) else sys.maxsize)

    def reset(self, from_step: int, sizes: ArrayLike, piece: int = 0) -> None:
        """Start over: `sizes` of any W apply from round `from_step`; earlier entries are dropped."""
        self.entries = [from_step], [_checked(sizes)], [piece]

    def forget(self, before_step: int) -> None:
        """Drop entries that no round from `before_step` on needs. The entry in force there stays."""
        steps, sizes, pieces = self.entries
        keep = max(bisect_right(steps, before_step) - 1, 0)
        if keep:
            self.entries = steps[keep:], sizes[keep:], pieces[keep:]

    def from_on(self, number: int) -> dict[int, list[int]]:
        """The allocation in force in round `number` and the later ones, each by its first round."""
        later = {s: sizes.tolist() for s, sizes in zip(*self.entries[:2], strict=True) if s > number}
        return {number: self.at(number).tolist()} | later

    def state_dict(self) -> dict[str, Any]:
        """Plain lists: `{"steps": [...], "sizes": [[...], ...]}`, and `"pieces"` if any round has local steps."""
        steps, sizes, pieces = self.entries
        plain = {"steps": list(steps), "sizes": [s.tolist() for s in sizes]}
        return plain | ({"pieces": list(pieces)} if any(pieces) else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Raises `StateError` if the state has another W."""
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
        """The ledger of a checkpoint, with the checkpoint's W."""
        ledger = cls(state["sizes"][0])
        ledger.load_state_dict(state)
        return ledger

    def _find(self, number: int) -> int:
        """The index of the entry in force in round `number`."""
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
