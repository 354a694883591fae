"""Registers this distribution's parts with `dynamix.compression`, by entry point: ways in fixed point, and the
aggregator.

Traffic is modelled as in `dynamix.compression.traffic`: bytes through the busiest link direction, and hops.
"""

from __future__ import annotations

from torch import Tensor

from dynamix.compression.bucket import BucketExchange
from dynamix.compression.spread import Sent, Spread
from dynamix.compression.ways import AGGREGATED, Registry, Way
from dynamix.compression.wire import Wire
from dynamix_homomorphic.aggregator.link import AggregatorLink
from dynamix_homomorphic.exchange import FixedPoint

BLOCK_BYTES = 2048  # gradient bytes per exponent byte
COUNTERS = 1.45  # sketch counters per item
MARGIN = 1.2  # a predicted sketch over the size actually needed
LARGE = {"compaction": 1.0, "lhc": COUNTERS, "lhc-one-phase": MARGIN * COUNTERS}  # summed bytes over union bytes


def register(ways: Registry) -> None:
    """The entry point. `auto` tries compaction and lhc; with an aggregator it tries `AggregatorLink.candidates`."""
    ways.add(_way("fixed"))
    ways.add(_way("compaction", candidate=True))
    ways.add(_way("lhc", candidate=True, instead="compaction", beyond="compaction"))
    ways.add(_way("lhc-one-phase", instead="compaction"))
    ways.add(_way(f"{AGGREGATED}compaction"))
    ways.add(_way(f"{AGGREGATED}lhc", beyond=f"{AGGREGATED}compaction"))
    ways.add(_way(f"{AGGREGATED}lhc-one-phase"))
    ways.link = AggregatorLink


def _way(name: str, *, candidate: bool = False, instead: str | None = None, beyond: str | None = None) -> Way:
    way = name.removeprefix(AGGREGATED)

    def exchange(bucket: BucketExchange, flat: Tensor, wire: Wire, step: int) -> None:
        bucket.memory(FixedPoint).reduce_(bucket, flat, way, wire, step)

    def sent(spread: Spread) -> Sent:
        return through_aggregator(way, spread) if name != way else over_group(way, spread)

    return Way(name, traffic=sent, exchange=exchange, candidate=candidate, instead=instead, beyond=beyond)


def over_group(way: str, spread: Spread) -> Sent:
    """Traffic of all-reduces on a ring.

    >>> over_group("compaction", Spread([1000] * 4, union_bytes=4000, dense_bytes=100_000)).hops
    20
    """
    workers = len(spread.sizes)
    ring, round_trip = 2 * (workers - 1) / workers, 2 * (workers - 1)
    if way == "fixed":
        return Sent(ring * spread.dense_bytes, 2 * round_trip + 1)
    hops = 2 * round_trip + 1 if way == "lhc-one-phase" else 3 * round_trip + 2
    return Sent(ring * (_header(spread) + LARGE[way] * spread.union_bytes), hops)


def through_aggregator(way: str, spread: Spread) -> Sent:
    """Traffic through an aggregator: each buffer up once and down once. The vote goes over the group."""
    calls = 3 if way == "lhc-one-phase" else 5
    return Sent(4 * _header(spread) + LARGE[way] * spread.union_bytes, 2 * calls + 1)


def _header(spread: Spread) -> float:
    return spread.dense_bytes / BLOCK_BYTES + 16
