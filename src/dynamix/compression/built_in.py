"""The built-in ways, and the names of ways that another distribution provides."""

from __future__ import annotations

from torch import Tensor

from dynamix.compression.bucket import BucketExchange
from dynamix.compression.traffic import blocked, densely, gathered
from dynamix.compression.ways import ELSEWHERE, Registry, Way
from dynamix.compression.wire import Wire


def register(ways: Registry) -> None:
    """Adds dense, gather and blocks; the fixed-point ways count as missing without dynamix-homomorphic."""
    ways.add(Way("dense", traffic=densely, exchange=_mean))
    ways.add(Way("fixed", missing=ELSEWHERE))
    ways.add(Way("gather", traffic=gathered, exchange=_gather, candidate=True))
    ways.add(Way("blocks", traffic=blocked, exchange=_add_blocks, candidate=True))
    for name in ("compaction", "lhc", "lhc-one-phase"):
        ways.add(Way(name, missing=ELSEWHERE))


def _mean(bucket: BucketExchange, flat: Tensor, wire: Wire, step: int) -> None:
    del bucket, step
    wire.mean(flat)


def _gather(bucket: BucketExchange, flat: Tensor, wire: Wire, step: int) -> None:
    bucket.gather(flat, wire, step)


def _add_blocks(bucket: BucketExchange, flat: Tensor, wire: Wire, step: int) -> None:
    bucket.add_blocks(flat, wire, step)
