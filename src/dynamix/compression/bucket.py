"""One bucket's exchange, from gradients to their mean: agree, send, decode, check; dense at any doubt."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from dynamix.compression.blocks import add_blocks
from dynamix.compression.checks import Doubt, Part, Statistics, agree, confirm_union, digest, settle
from dynamix.compression.compaction import Round, compact, everything
from dynamix.compression.fixed_point import Scales, scan, working, write_mean_
from dynamix.compression.gather import FLAT, Brought, Levels, gather, rows_not_zero, union_items
from dynamix.compression.gather import write_mean_ as write_gathered_
from dynamix.compression.index import best_depth, is_superset, union_of
from dynamix.compression.layout import Layout
from dynamix.compression.lhc import UnionForecast, one_phase, two_phase
from dynamix.compression.rows import Rows, index_bytes
from dynamix.compression.sketch import ExchangeSettings
from dynamix.compression.traffic import Spread
from dynamix.compression.wire import LocalWire, Wire
from dynamix.errors import ConfigError

Way = Literal["dense", "fixed", "gather", "blocks", "compaction", "lhc", "lhc-one-phase"]
WAYS: tuple[Way, ...] = get_args(Way)
VERSION = 3
OVERLAP = 0.9  # a union smaller than this share of what ranks bring makes a second level of gathering pay
RELEARN = 8  # unions after which the depth of the index is chosen anew


class BucketExchange:
    """Codec and memory of one bucket on one rank. Ranks call `reduce_` in step, with the same way."""

    def __init__(self, layout: Layout, *, index: int = 0, settings: ExchangeSettings | None = None) -> None:
        self.layout, self.index, self.settings = layout, index, settings or ExchangeSettings()
        self._depth, self._unions, self._prediction = 0, 0, UnionForecast()
        self._scales: Scales | None = None
        self._levels = True
        self.spread: Spread | None = None  # what the last exchange saw, alike on all ranks

    def reduce_(self, flat: Tensor, way: Way, wire: Wire, *, step: int, statistics: Statistics) -> str | None:
        """Replace `flat`, a float tensor (elements,), by its mean over the wire's ranks.

        dense          as DDP does it, in floating point
        gather, blocks the sum of x / W in floating point, in the order of ranks
        fixed          densely in fixed point: the reference the next three equal bit for bit
        compaction, lhc (two-phase), lhc-one-phase

        A sketch that did not decode is no doubt about the sums: its bucket goes by compaction, equal bit for bit. A
        wire that is lost does not change them either: the same way goes once more, over its reserve.

        Returns why the way was left, one of `checks.REASONS` and the same on every rank; None if it was not.
        """
        if way not in WAYS:
            raise ConfigError("way", way, ", ".join(WAYS), "pick one")
        if flat.numel() != self.layout.elements:
            raise ConfigError("flat", flat.numel(), f"{self.layout.elements} elements", "give the layout's own bucket")
        taken, sent = way, 0
        reason: str | None = None
        while True:
            before = wire.payload_bytes
            try:
                if taken == "dense":
                    wire.mean(flat)
                elif taken == "gather":
                    self._gather(flat, wire, step)
                elif taken == "blocks":
                    self._add_blocks(flat, wire, step)
                else:
                    self._reduce(flat, taken, wire, step)
                break
            except Doubt as doubt:  # on every rank alike, and with `flat` untouched
                sent += wire.payload_bytes - before
                undecoded = doubt.reason == "peel" and taken != "compaction"  # the sketch holds too many items
                if doubt.reason != "nonfinite":  # what was learned from unions may differ between ranks
                    self._depth, self._unions, self._levels = 0, 0, True
                    self._prediction.forget(next_seed=undecoded)
                if undecoded:
                    taken = "compaction"
                    statistics.count_undecoded()
                elif doubt.reason == "lost" and wire.reserve is not None:
                    wire, reason = wire.reserve, "lost"
                else:
                    taken, reason = "dense", doubt.reason
        sent += wire.payload_bytes - before
        statistics.count(taken, dense_bytes=flat.nbytes, payload_bytes=sent, doubt=reason)
        return reason

    def _gather(self, flat: Tensor, wire: Wire, step: int) -> None:
        values, workers, tables = flat.detach(), wire.workers, self._tables(flat)
        if not tables:
            return
        ours = (VERSION, self.settings, self.index, step, "gather", self.layout, flat.dtype, self._levels)
        most = 2 * (workers - 1) / workers * flat.nbytes
        if self._levels and workers > FLAT:  # if ranks bring the same; what that is has not been seen yet
            groups = Levels.of(workers).groups
            most *= (workers - 1) / (len(groups[0]) + len(groups) - 2)
        try:
            brought = gather(tables, wire.messages, digest(*ours), levels=self._levels, most_bytes=most)
        except Doubt as doubt:
            if doubt.sizes:  # the union holds at least what the fullest rank does
                self.spread = Spread(doubt.sizes, max(doubt.sizes), flat.nbytes)
            raise
        for place, (s, rows) in enumerate(zip(self.layout.segments, tables, strict=True)):
            write_gathered_(values, s.start, rows.items, brought, place, workers)
        if self._unions % RELEARN == 0:
            self._spread_of(brought, workers, flat)
        self._unions += 1

    def _add_blocks(self, flat: Tensor, wire: Wire, step: int) -> None:
        tables = self._tables(flat)
        if not tables:
            return
        mark = digest(VERSION, self.settings, self.index, step, "blocks", self.layout, flat.dtype)
        most = 2 * (wire.workers - 1) / wire.workers * flat.nbytes
        try:
            added = add_blocks(
                tables, wire.messages, mark, divisor=wire.workers, most_bytes=most, whole=self._whole(flat)
            )
        except Doubt as doubt:
            if doubt.sizes:
                self.spread = Spread(doubt.sizes, max(doubt.sizes), flat.nbytes)
            raise
        for table, rows in zip(self._whole(flat), added.sums, strict=True):
            table[rows.items] = rows.values.to(flat.dtype)
        if self._unions % RELEARN == 0:
            self.spread = self._spread(added.sizes, [rows.items for rows in added.sums], flat)
        self._unions += 1

    def _whole(self, flat: Tensor) -> list[Tensor]:
        return [flat.detach()[s.start : s.stop].view(-1, s.width) for s in self.layout.segments]

    def _tables(self, flat: Tensor) -> list[Rows]:
        values = flat.detach()
        return [rows_not_zero(values[s.start : s.stop], s.width) for s in self.layout.segments]

    def _spread_of(self, brought: Brought, workers: int, flat: Tensor) -> None:
        self.spread = self._spread(brought.sizes, [union_items(parts) for parts in brought.parts], flat)
        if workers > FLAT:
            self._levels = self.spread.union_bytes < OVERLAP * sum(brought.sizes)

    def _spread(self, sizes: Sequence[int], union: Sequence[Tensor], flat: Tensor) -> Spread:
        """From what each rank brought, and the union's items by segment."""
        segments = self.layout.segments
        index = sum(index_bytes(items, s.items) for items, s in zip(union, segments, strict=True))
        values = sum(4 * s.width * items.numel() for items, s in zip(union, segments, strict=True))
        return Spread(sizes, values + index, flat.nbytes, index)

    def _reduce(self, flat: Tensor, way: Way, wire: Wire, step: int) -> None:
        scales = self._scales_for(wire.workers, flat.device)
        union, codes, parts = settle(lambda: self._exchange(flat, way, wire, step, scales), wire, flat.device)
        self._learn(union, codes, parts, way, flat)
        for segment, part in zip(self.layout.segments, parts, strict=True):
            write_mean_(flat, segment, part.items, codes, scales, part.values)

    def _exchange(
        self, flat: Tensor, way: Way, wire: Wire, step: int, scales: Scales
    ) -> tuple[tuple[Tensor, Tensor, list[Part]], str]:
        """The union, the exponents and the sums, and the check that failed ("none"). Leaves `flat` alone."""
        values = working(flat)
        expected = self._prediction.expected() if way == "lhc-one-phase" else None
        codes, words = scan(values, self.layout)
        settings, attempt = self.settings, self._prediction.attempt
        ours = (VERSION, settings, self.index, step, way, self.layout, flat.dtype, self._depth, expected, attempt)
        codes = agree(codes, digest(*ours), wire)
        key = int.from_bytes(digest("checksum", settings.seed, self.index, step)[:4], "little")
        bucket = Round(values, self.layout, codes, scales, wire, key, settings)
        if expected is not None:
            parts, doubt, union = one_phase(bucket, words, expected, (settings.seed, self.index, attempt))
            return (union, codes, parts), doubt
        union = self._union(words, codes, way, wire)
        if way in ("lhc", "lhc-one-phase"):
            parts, doubt = two_phase(bucket, union, (settings.seed, self.index, step))
        else:
            parts, doubt = compact(bucket, union)
        return (union, codes, parts), doubt

    def _union(self, words: Tensor, codes: Tensor, way: Way, wire: Wire) -> Tensor:
        if way == "fixed":
            return everything(self.layout, words.device)
        union = union_of(words, codes, self.layout, wire, self._depth)
        confirm_union(union, is_superset(union, words), wire)
        return union

    def _learn(self, union: Tensor, codes: Tensor, parts: list[Part], way: Way, flat: Tensor) -> None:
        if way == "fixed":
            return
        if self._unions % RELEARN == 0:
            self._depth = best_depth(union, codes, self.layout)
            if self.spread is not None:
                self.spread = self._spread(self.spread.sizes, [part.items for part in parts], flat)
        self._unions += 1
        self._prediction.observe([part.items.numel() for part in parts])

    def _scales_for(self, workers: int, device: torch.device) -> Scales:
        if self._scales is None or self._scales.workers != workers or self._scales.up.device != device:
            self._scales = Scales.of(workers, device)
        return self._scales


def warm_up() -> None:
    """Compile the kernels (seconds, once a machine), so that no step waits for it and no measurement contains it."""
    for dtype in (torch.float32, torch.float64):
        exchange = BucketExchange(Layout.of([(64, 1), (64, 4)]))
        wire, statistics = LocalWire.make(1)[0], Statistics()
        for step, way in enumerate(WAYS):
            exchange.reduce_(torch.ones(320, dtype=dtype), way, wire, step=step, statistics=statistics)
