"""The order of an epoch's samples: drawn, or computed for each index if a drawn one would take too much memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dynamix.window import Ints

LARGE = 1 << 24  # with this many samples or more the order is computed: a drawn one takes 8 bytes a sample
COMPUTED = "computed"  # this order's name in a state; a changed order needs a new name
_ROUNDS = 8
_MIX = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)  # of splitmix64
_HALF, _LESS = np.array([32, 29], dtype=np.uint64)


class Order(Protocol):
    """The indices of an epoch, in their order; used like an array."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, at: slice | Ints, /) -> Ints: ...


class ComputedOrder:
    """A permutation of `range(size)`, computed from a seed and an epoch; the identity without a seed.

    A Feistel network: a position is two digits in a base near the square root of `size`, and each round adds a mixture
    of one digit to the other. A result outside of the range goes through the network again until it is inside (cycle
    walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    >>> sorted(ComputedOrder(10, 3, 0)[0:10].tolist()), ComputedOrder(10)[2:5].tolist()
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 4])
    """

    def __init__(self, size: int, seed: int | None = None, epoch: int = 0) -> None:
        self.size = size
        low = math.isqrt(max(size - 1, 0)) + 1
        self._low, self._high = np.uint64(low), np.uint64(-(-size // low))
        entropy = None if seed is None else np.random.SeedSequence([int(seed) % 2**64, epoch])
        self._keys = () if entropy is None else tuple(entropy.generate_state(_ROUNDS, np.uint64))

    def __getitem__(self, at: slice | Ints) -> Ints:
        found = self._through(_positions(at, self.size).astype(np.uint64))
        while (outside := found >= self.size).any():  # about one of every sqrt(`size`) positions
            found[outside] = self._through(found[outside])
        return found.astype(np.int64)

    def _through(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass through the network: a permutation of all pairs of digits."""
        high, low = np.divmod(positions, self._low)
        for number, key in enumerate(self._keys):
            mixed = ((low if number % 2 else high) + key) * _MIX[0]
            mixed ^= mixed >> _HALF
            mixed *= _MIX[1]
            mixed ^= mixed >> _LESS
            if number % 2:
                high = (high + mixed % self._high) % self._high
            else:
                low = (low + mixed % self._low) % self._low
        return high * self._low + low


def order_of_epoch(epoch: int, size: int, seed: int | None, *, computed: bool) -> Order:
    """A permutation of `range(size)`, computed, or drawn as torch's `DistributedSampler` does; sorted without a seed.

    >>> order_of_epoch(1, 4, 7, computed=False).tolist()
    [3, 2, 0, 1]
    """
    if computed:
        return ComputedOrder(size, seed, epoch)
    if seed is None:
        return np.arange(size, dtype=np.int64)
    drawn: Ints = torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)).numpy()
    return drawn


class Spliced:
    """Intervals of an order, joined: what remains of it after part of it was cut by another allocation.

    >>> Spliced(np.arange(10), [(1, 3), (5, 5), (7, 9)])[0:3].tolist()
    [1, 2, 7]
    """

    def __init__(self, order: Order, intervals: Sequence[tuple[int, int]]) -> None:
        if isinstance(order, Spliced):
            intervals = [own for begin, end in intervals for own in order._within(begin, end)]
            order = order._order
        self._order: Order = order
        begins, ends = np.asarray(intervals, dtype=np.int64).reshape(-1, 2).T
        self._begins, self._upto = begins, np.cumsum(ends - begins)
        self._shift = ends - self._upto  # from a position here to one in `order`
        self.size = int(self._upto[-1]) if begins.size else 0

    def __getitem__(self, at: slice | Ints) -> Ints:
        positions = _positions(at, self.size)
        there = positions + self._shift[np.searchsorted(self._upto, positions, side="right")]
        return self._order[there]

    def _within(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The intervals of the underlying order for positions `begin` to `end` of this one."""
        first, last = np.searchsorted(self._upto, [begin, end], side="left")
        for i in range(first, min(last + 1, self._upto.size)):
            low, high = begin + self._shift[i], end + self._shift[i]
            low, high = max(low, self._begins[i]), min(high, self._upto[i] + self._shift[i])
            if low < high:
                yield int(low), int(high)


def _positions(at: slice | Ints, size: int) -> Ints:
    return np.arange(*at.indices(size), dtype=np.int64) if isinstance(at, slice) else np.asarray(at)
