"""Counter-based random numbers: a draw depends only on its key and counter, never on earlier draws.

So two policies on the same clusters see the same disturbances and the same measurement noise, whatever they do.
"""

import numpy as np
from numpy.typing import NDArray

from dynamix.window import Floats, Ints

Bits = NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Bits) -> Bits:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class RandomStream:
    """One family of draws for an array of entities (clusters, or cluster x worker), keyed by seed and purpose.

    >>> a, b = RandomStream(1, "jitter", (2, 3)), RandomStream(1, "jitter", (2, 3))
    >>> bool((a.uniform(np.uint64(7)) == b.uniform(np.uint64(7))).all())
    True
    """

    def __init__(self, seed: int, purpose: str, shape: tuple[int, ...], *, group: Ints | None = None) -> None:
        """`group` (C, W): entities of a row with equal numbers, below W, draw the same."""
        root = np.array([seed], dtype=np.uint64)
        for letter in purpose.encode():
            root = _mix(root * _STEP + np.uint64(letter))
        entity = np.arange(int(np.prod(shape)), dtype=np.uint64).reshape(shape)
        self.key = _mix(entity * _STEP + root)
        if group is not None:
            self.key = np.take_along_axis(self.key, group, 1)

    def bits(self, counter: Bits | np.uint64, at: NDArray[np.bool_] | None = None) -> Bits:
        """64 random bits per entity (or only for those `at`)."""
        key = self.key if at is None else self.key[at]
        return _mix(key + np.asarray(counter, dtype=np.uint64) * _STEP)

    def uniform(self, counter: Bits | np.uint64, at: NDArray[np.bool_] | None = None) -> Floats:
        """A number in (0, 1), never 0."""
        return ((self.bits(counter, at) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53

    def normal(self, counter: Bits | np.uint64) -> Floats:
        """Standard normal (Box-Muller on two halves of one draw)."""
        bits = self.bits(counter)
        first = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32
        second = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2.0**32
        return np.asarray(np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second))
