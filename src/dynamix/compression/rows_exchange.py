"""Sums of rows over ranks. Each table takes the way that sends less: gather or blocks.

Ranks choose from figures that all have seen, so they choose alike without communication. Both ways add in the order of
ranks; with up to `gather.FLAT` ranks the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamix.compression.blocks import add_blocks
from dynamix.compression.checks import Doubt, Statistics, digest
from dynamix.compression.gather import add_up, gather
from dynamix.compression.rows import Rows
from dynamix.compression.wire import Messages

LOOK_EVERY = 8  # exchanges after which the choice for gathered tables is made again
HOP_BYTES = 16_384  # bytes that a hop is worth before it is measured; blocks take two hops more than a gather
GAIN = 0.9  # a way must take less than this share of the other's bytes to replace it
STAYS = 0.75  # the same for leaving blocks: a hop's worth in bytes is measured only roughly


@dataclass
class RowsExchange:
    """One rank's memory of one set of tables. Ranks call `add_up` in step, with the same tables."""

    in_blocks: frozenset[int] = frozenset()
    exchanges: int = 0
    _spans: list[tuple[int, int]] = field(default_factory=list)

    def add_up(
        self,
        tables: Sequence[Rows],
        wire: Messages,
        *parts: object,
        divisor: int,
        dense_bytes: float,
        statistics: Statistics,
    ) -> list[Rows]:
        """The sums over ranks of `tables`, each rank's over `divisor`.

        parts         must be equal on all ranks; otherwise all get `Doubt("mixed")`
        dense_bytes   of the same tables without an index
        """
        spans = [(rows.span, rows.values.shape[1]) for rows in tables]
        if spans != self._spans:
            self._spans, self.in_blocks, self.exchanges = spans, frozenset(), 0
        mark = digest("rows", parts, spans, sorted(self.in_blocks))
        ring = 2 * (wire.workers - 1) / wire.workers * dense_bytes
        gathered = [place for place in range(len(tables)) if place not in self.in_blocks]
        sums: dict[int, Rows] = {}
        if gathered:
            try:
                sums |= self._gather(gathered, tables, wire, mark, divisor, ring, statistics)
            except Doubt as doubt:
                if doubt.reason != "full":
                    raise
                self.in_blocks |= set(gathered)
        if waiting := [place for place in range(len(tables)) if place not in sums]:
            sums |= self._block(waiting, tables, wire, mark, divisor, statistics)
        self.exchanges += 1
        return [sums[place] for place in range(len(tables))]

    def _gather(
        self,
        places: Sequence[int],
        tables: Sequence[Rows],
        wire: Messages,
        mark: bytes,
        divisor: int,
        most: float,
        statistics: Statistics,
    ) -> dict[int, Rows]:
        before = wire.payload_bytes
        some = [tables[place] for place in places]
        brought = gather(some, wire, mark, levels=True, most_bytes=most, divisor=divisor)
        left = 1 if brought.divided else divisor
        sums = {place: add_up(found, left) for place, found in zip(places, brought.parts, strict=True)}
        if not brought.divided and self.exchanges % LOOK_EVERY == 0:
            for place, found in zip(places, brought.parts, strict=True):
                index = [rows.index_bytes for rows in found]
                own = [size + rows.values.nbytes for size, rows in zip(index, found, strict=True)]
                self._choose(place, sums[place], index, own, brought.hop_bytes)
        self._count("gather", some, wire.payload_bytes - before, statistics)
        return sums

    def _block(
        self,
        places: Sequence[int],
        tables: Sequence[Rows],
        wire: Messages,
        mark: bytes,
        divisor: int,
        statistics: Statistics,
    ) -> dict[int, Rows]:
        before = wire.payload_bytes
        some = [tables[place] for place in places]
        added = add_blocks(some, wire, mark, divisor=divisor, most_bytes=math.inf)
        for place, rows, index, own in zip(places, added.sums, added.index, added.own, strict=True):
            self._choose(place, rows, index, own, added.hop_bytes)
        self._count("blocks", some, wire.payload_bytes - before, statistics)
        return dict(zip(places, added.sums, strict=True))

    def _choose(self, place: int, union: Rows, index: Sequence[int], own: Sequence[int], hop_bytes: int) -> None:
        """Choose from byte counts that are the same on all ranks."""
        workers, hops = len(own), 2 * (hop_bytes or HOP_BYTES)
        gathered = (workers - 1) * max(own)
        blocks = (workers - 1) * max(index) + 2 * (workers - 1) / workers * union.values.nbytes + hops
        if place in self.in_blocks:
            if gathered < STAYS * blocks:
                self.in_blocks -= {place}
        elif blocks < GAIN * gathered:
            self.in_blocks |= {place}

    def _count(self, way: str, tables: Sequence[Rows], sent: int, statistics: Statistics) -> None:
        dense = sum(rows.span * rows.values.shape[1] * rows.values.element_size() for rows in tables)
        statistics.count(way, dense_bytes=dense, payload_bytes=sent, buckets=len(tables))
