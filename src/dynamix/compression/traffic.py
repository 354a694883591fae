"""What a way sends: bytes through the busiest link direction, and messages in sequence ("hops"), by a model.

Hosts have a link each to one switch, full duplex. An all-reduce is gloo's ring: 2 (W-1)/W of its buffer through every
link, in 2 (W-1) hops. Messages from all to all take one hop. A small maximum goes from all to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamix.compression.gather import FLAT, Levels

HEADER_BYTES = 40  # of a gather or blocks, to every other rank
BLOCK_BYTES = 2048  # gradient bytes an exponent byte stands for
COUNTERS = 1.45  # of a sketch, an item
MARGIN = 1.2  # of a predicted sketch over what it turns out to need
AGGREGATED = "aggregator-"  # before the name of a way: its sums are formed by an aggregator


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
        """At so many seconds a byte and a hop."""
        return self.bytes * byte_s + self.hops * hop_s


def traffic(way: str, spread: Spread) -> Sent:
    """What one exchange by `way` takes: a way of `BucketExchange`, or "aggregator-" before one.

    >>> spread = Spread([1000] * 4, union_bytes=4000, dense_bytes=100_000)
    >>> traffic("dense", spread)
    Sent(bytes=150000.0, hops=6)
    >>> traffic("gather", spread)
    Sent(bytes=3120, hops=2)
    >>> traffic("compaction", spread).hops
    20
    """
    workers, union = len(spread.sizes), spread.union_bytes
    ring, round_trip = 2 * (workers - 1) / workers, 2 * (workers - 1)
    header = spread.dense_bytes / BLOCK_BYTES + 16
    if way.startswith(AGGREGATED):  # each buffer up once and down once; the vote goes over the group
        sent = {"compaction": union, "lhc": COUNTERS * union, "lhc-one-phase": MARGIN * COUNTERS * union}
        calls = 3 if way.endswith("one-phase") else 5
        return Sent(4 * header + sent[way.removeprefix(AGGREGATED)], 2 * calls + 1)
    if way == "gather":
        return _gathered(spread)
    if way == "blocks":  # everybody's index to everybody, then values to and from the rank that adds them up
        index = (workers - 1) * max(spread.sizes) * spread.index_bytes / max(union, 1)
        return Sent(ring * (union - spread.index_bytes) + index + HEADER_BYTES * (workers - 1), 4)
    if way in ("dense", "fixed"):
        return Sent(ring * spread.dense_bytes, round_trip if way == "dense" else 2 * round_trip + 1)
    large = {"compaction": union, "lhc": COUNTERS * union, "lhc-one-phase": MARGIN * COUNTERS * union}[way]
    hops = 2 * round_trip + 1 if way == "lhc-one-phase" else 3 * round_trip + 2
    return Sent(ring * (header + large), hops)


def _gathered(spread: Spread) -> Sent:
    sizes, workers = spread.sizes, len(spread.sizes)
    header = HEADER_BYTES * (workers - 1)
    flat = max((workers - 1) * max(sizes), sum(sizes) - min(sizes))
    if workers <= FLAT:
        return Sent(flat + header, 2)
    groups = Levels.of(workers).groups
    near, others = len(groups[0]), len(groups) - 1
    brought, union = near * max(sizes), spread.union_bytes
    # What a group's ranks have in common travels on once: as the union does, from none in common to everything.
    shared = 1 - (union - max(sizes)) / max(sum(sizes) - max(sizes), 1)
    group = max(sizes) + (brought - max(sizes)) * min(max(1 - shared, 0.0), 1.0)
    return Sent((near - 1) * max(sizes) + others * group + 2 * header, 4)
