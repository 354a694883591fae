"""Which part of a gradient is not zero, and what an exchange of it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Which part of a gradient is not zero, over ranks.

    sizes        bytes of index and values that each rank holds
    union_bytes  of index and values of the items that some rank holds
    dense_bytes  of all of it
    index_bytes  the index's part of union_bytes
    """

    sizes: Sequence[int]
    union_bytes: int
    dense_bytes: int
    index_bytes: int = 0


@dataclass(frozen=True)
class Sent:
    """Bytes through the busiest direction of a link, and hops."""

    bytes: float
    hops: int

    def seconds(self, *, byte_s: float, hop_s: float) -> float:
        """The time at so many seconds a byte and a hop."""
        return self.bytes * byte_s + self.hops * hop_s
