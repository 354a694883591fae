"""A bucket in fixed point: agree on exponents, exchange an index with integers or a sketch, decode, check."""

from __future__ import annotations

import torch
from torch import Tensor

from dynamix.compression.bucket import RELEARN, VERSION, BucketExchange
from dynamix.compression.checks import digest
from dynamix.compression.layout import Layout
from dynamix.compression.wire import Wire
from dynamix_homomorphic.checks import SegmentPart, agree, confirm_union, settle
from dynamix_homomorphic.compaction import AgreedBucket, compact, everything
from dynamix_homomorphic.fixed_point import Scales, scan, working, write_mean_
from dynamix_homomorphic.lhc import UnionForecast, one_phase, two_phase
from dynamix_homomorphic.union import best_depth, is_superset, union_of


class FixedPoint:
    """Codec and state of one bucket on one rank, for all ways of exchanging in fixed point.

    fixed          densely: the reference that the others equal bit for bit
    compaction, lhc (two-phase), lhc-one-phase
    """

    def __init__(self) -> None:
        self._depth, self._prediction = 0, UnionForecast()
        self._scales: Scales | None = None

    def forget(self, *, undecoded: bool) -> None:
        self._depth = 0
        self._prediction.forget(next_seed=undecoded)

    def reduce_(self, bucket: BucketExchange, flat: Tensor, way: str, wire: Wire, step: int) -> None:
        """Replace `flat` by its mean. Raises `Doubt` and then leaves `flat` unchanged."""
        scales = self._scales_for(wire.workers, flat.device)
        union, codes, parts = settle(lambda: self._exchange(bucket, flat, way, wire, step, scales), wire, flat.device)
        self.learn(bucket, union, codes, parts, way, flat)
        for segment, part in zip(bucket.layout.segments, parts, strict=True):
            write_mean_(flat, segment, part.items, codes, scales, part.values)

    def _exchange(
        self, bucket: BucketExchange, flat: Tensor, way: str, wire: Wire, step: int, scales: Scales
    ) -> tuple[tuple[Tensor, Tensor, list[SegmentPart]], str]:
        """The union, the exponents, the sums, and the failed check ("none"). Leaves `flat` unchanged."""
        values, layout, settings = working(flat), bucket.layout, bucket.settings
        expected = self._prediction.expected() if way == "lhc-one-phase" else None
        codes, words = scan(values, layout)
        attempt = self._prediction.attempt
        ours = (VERSION, settings, bucket.index, step, way, layout, flat.dtype, self._depth, expected, attempt)
        codes = agree(codes, digest(*ours), wire)
        key = int.from_bytes(digest("checksum", settings.seed, bucket.index, step)[:4], "little")
        one = AgreedBucket(values, layout, codes, scales, wire, key, settings)
        if expected is not None:
            parts, doubt, union = one_phase(one, words, expected, (settings.seed, bucket.index, attempt))
            return (union, codes, parts), doubt
        union = self._union(words, codes, way, wire, layout)
        if way in ("lhc", "lhc-one-phase"):
            parts, doubt = two_phase(one, union, (settings.seed, bucket.index, step))
        else:
            parts, doubt = compact(one, union)
        return (union, codes, parts), doubt

    def _union(self, words: Tensor, codes: Tensor, way: str, wire: Wire, layout: Layout) -> Tensor:
        if way == "fixed":
            return everything(layout, words.device)
        union = union_of(words, codes, layout, wire, self._depth)
        confirm_union(union, is_superset(union, words), wire)
        return union

    def learn(
        self, bucket: BucketExchange, union: Tensor, codes: Tensor, parts: list[SegmentPart], way: str, flat: Tensor
    ) -> None:
        """Update predictions from a union that all ranks know."""
        if way == "fixed":
            return
        if bucket.unions % RELEARN == 0:
            self._depth = best_depth(union, codes, bucket.layout)
            if bucket.spread is not None:
                bucket.spread = bucket.spread_of(bucket.spread.sizes, [part.items for part in parts], flat)
        bucket.unions += 1
        self._prediction.observe([part.items.numel() for part in parts])

    def _scales_for(self, workers: int, device: torch.device) -> Scales:
        if self._scales is None or self._scales.workers != workers or self._scales.up.device != device:
            self._scales = Scales.of(workers, device)
        return self._scales
