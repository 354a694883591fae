"""The maximum of bytes over a wire that can only OR: each value becomes one set bit, and the highest in the union wins.

A byte's 256 places in one round cost 32 bytes a value. Longer buffers go in two rounds of 16 places, the upper four
bits first and then the lower four of those who hold the highest: 4 bytes a value in all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dynamix.compression.aggregator.protocol import Bytes

ONE_ROUND = 512  # values up to which a second round trip would cost more than the bytes: 16 KiB


def maximum_by_or(values: Bytes, union: Callable[[Bytes], None]) -> Bytes:
    """The maximum over ranks of uint8 (n,). `union` ORs its argument in place over ranks.

    >>> maximum_by_or(np.array([0, 7, 255], dtype=np.uint8), lambda bits: None).tolist()
    [0, 7, 255]
    """
    if values.size <= ONE_ROUND:
        places = np.zeros((values.size, 32), np.uint8)
        places[np.arange(values.size), values >> 3] = np.left_shift(1, values & 7)
        union(places.reshape(-1))
        bits = np.unpackbits(places, axis=1, bitorder="little")
        return np.asarray(255 - np.argmax(bits[:, ::-1], axis=1), np.uint8)
    high = np.right_shift(values, 4, dtype=np.uint8)
    top = _highest(high, np.ones(values.size, np.bool_), union)
    low = _highest(np.bitwise_and(values, 15, dtype=np.uint8), high == top, union)
    return np.asarray(top * 16 + low, np.uint8)


def _highest(nibbles: Bytes, taking_part: NDArray[np.bool_], union: Callable[[Bytes], None]) -> Bytes:
    places = np.where(taking_part, np.left_shift(np.uint16(1), nibbles, dtype=np.uint16), np.uint16(0))
    union(places.view(np.uint8))
    highest = np.frexp(places.astype(np.float32))[1] - 1
    return np.asarray(np.maximum(highest, 0), np.uint8)
