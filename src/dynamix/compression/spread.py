"""The nonzero part of a gradient, and what its exchange sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The nonzero part of a gradient, over ranks.

    sizes        bytes of each rank's index and values
    union_bytes  of index and values of the items that any rank holds
    dense_bytes  of the whole gradient
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
        """The time at these seconds per byte and per hop."""
        return self.bytes * byte_s + self.hops * hop_s
