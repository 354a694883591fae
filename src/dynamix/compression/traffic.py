"""The traffic of a way: bytes through the busiest link direction, and messages in sequence ("hops"), by a model.

Each host has one full-duplex link to one switch. An all-reduce is gloo's ring: 2 (W-1)/W of its buffer through every
link, in 2 (W-1) hops. Messages from all to all take one hop; so does a small maximum.
"""

from __future__ import annotations

from dynamix.compression.gather import FLAT, Levels
from dynamix.compression.spread import Sent, Spread
from dynamix.compression.ways import registry

HEADER_BYTES = 40  # of a gather or blocks, to every other rank


def traffic(way: str, spread: Spread) -> Sent:
    """The traffic of one exchange by `way`, a way of the registry.

    >>> spread = Spread([1000] * 4, union_bytes=4000, dense_bytes=100_000)
    >>> traffic("dense", spread)
    Sent(bytes=150000.0, hops=6)
    >>> traffic("gather", spread)
    Sent(bytes=3120, hops=2)
    """
    return registry().of(way).traffic(spread)


def densely(spread: Spread) -> Sent:
    """The traffic of a ring all-reduce of the whole gradient."""
    workers = len(spread.sizes)
    return Sent(2 * (workers - 1) / workers * spread.dense_bytes, 2 * (workers - 1))


def blocked(spread: Spread) -> Sent:
    """The traffic of blocks: every index to every rank, then values to and from the rank that sums them."""
    workers, union = len(spread.sizes), spread.union_bytes
    ring = 2 * (workers - 1) / workers
    index = (workers - 1) * max(spread.sizes) * spread.index_bytes / max(union, 1)
    return Sent(ring * (union - spread.index_bytes) + index + HEADER_BYTES * (workers - 1), 4)


def gathered(spread: Spread) -> Sent:
    """The traffic of a gather from all to all, in one level or in two."""
    sizes, workers = spread.sizes, len(spread.sizes)
    header = HEADER_BYTES * (workers - 1)
    flat = max((workers - 1) * max(sizes), sum(sizes) - min(sizes))
    if workers <= FLAT:
        return Sent(flat + header, 2)
    groups = Levels.of(workers).groups
    near, others = len(groups[0]), len(groups) - 1
    brought, union = near * max(sizes), spread.union_bytes
    # Items that a group's ranks share are sent on once. Assume the same overlap as in the union of all ranks.
    shared = 1 - (union - max(sizes)) / max(sum(sizes) - max(sizes), 1)
    group = max(sizes) + (brought - max(sizes)) * min(max(1 - shared, 0.0), 1.0)
    return Sent((near - 1) * max(sizes) + others * group + 2 * header, 4)
