"""One bucket's exchange, from gradients to their mean: by its way, or densely if a check fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from dynamix.compression.blocks import add_blocks
from dynamix.compression.checks import Doubt, Statistics, digest
from dynamix.compression.gather import FLAT, Brought, Levels, gather, rows_not_zero, union_items, write_mean_
from dynamix.compression.layout import Layout
from dynamix.compression.rows import Rows, index_bytes
from dynamix.compression.settings import ExchangeSettings
from dynamix.compression.spread import Spread
from dynamix.compression.ways import registry
from dynamix.compression.wire import LocalWire, Wire
from dynamix.errors import ConfigError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # of gradients that are exchanged
VERSION = 3
OVERLAP = 0.9  # a second level of gathering pays if the union is smaller than this share of the ranks' sum
RELEARN = 8  # unions after which a bucket's overlap is measured again


class BucketMemory(Protocol):
    """A way's memory of a bucket between steps."""

    def forget(self, *, undecoded: bool) -> None:
        """Forget unions after a doubt: they may differ between ranks. `undecoded`: a sketch failed to decode."""


M = TypeVar("M", bound=BucketMemory)


class BucketExchange:
    """Codec and memory of one bucket on one rank. Ranks call `reduce_` in step, with the same way."""

    def __init__(self, layout: Layout, *, index: int = 0, settings: ExchangeSettings | None = None) -> None:
        self.layout, self.index, self.settings = layout, index, settings or ExchangeSettings()
        self.unions = 0  # since the last doubt
        self._levels = True
        self.memories: dict[type[Any], BucketMemory] = {}
        self.spread: Spread | None = None  # of the last exchange, the same on all ranks

    def reduce_(self, flat: Tensor, way: str, wire: Wire, *, step: int, statistics: Statistics) -> str | None:
        """Replace `flat`, a float tensor (elements,), by its mean over the wire's ranks.

        dense           as DDP does it, in floating point
        gather, blocks  the sum of x / W in floating point, in the order of ranks
        others          as registered

        If a sketch does not decode, the sums are not in doubt: the bucket takes the way named for that case. The loss
        of a wire does not change the sums either: the same way runs again, over the wire's reserve.

        Returns why the way was abandoned, one of `checks.REASONS` and the same on every rank; None if it was not.
        """
        known = registry()
        known.of(way)
        if flat.numel() != self.layout.elements:
            raise ConfigError("flat", flat.numel(), f"{self.layout.elements} elements", "give the layout's own bucket")
        taken, sent = way, 0
        reason: str | None = None
        while True:
            before = wire.payload_bytes
            try:
                known.of(taken).exchange(self, flat, wire, step)
                break
            except Doubt as doubt:  # on every rank, with `flat` unchanged
                sent += wire.payload_bytes - before
                instead = known.of(taken).instead if doubt.reason == "peel" else None  # the sketch holds too many items
                if doubt.reason != "nonfinite":  # knowledge from unions may now differ between ranks
                    self.unions, self._levels = 0, True
                    for memory in self.memories.values():
                        memory.forget(undecoded=instead is not None)
                if instead is not None:
                    taken = instead
                    statistics.count_undecoded()
                elif doubt.reason == "lost" and wire.reserve is not None:
                    wire, reason = wire.reserve, "lost"
                else:
                    taken, reason = "dense", doubt.reason
        sent += wire.payload_bytes - before
        statistics.count(taken, dense_bytes=flat.nbytes, payload_bytes=sent, doubt=reason)
        return reason

    def memory(self, kind: type[M]) -> M:
        """A way's memory of this bucket; made at its first exchange."""
        if kind not in self.memories:
            self.memories[kind] = kind()
        return cast(M, self.memories[kind])

    def gather(self, flat: Tensor, wire: Wire, step: int) -> None:
        """The way "gather"."""
        values, workers, tables = flat.detach(), wire.workers, self._tables(flat)
        if not tables:
            return
        ours = (VERSION, self.settings, self.index, step, "gather", self.layout, flat.dtype, self._levels)
        most = 2 * (workers - 1) / workers * flat.nbytes
        if self._levels and workers > FLAT:  # assume that ranks bring the same items; their overlap is still unknown
            groups = Levels.of(workers).groups
            most *= (workers - 1) / (len(groups[0]) + len(groups) - 2)
        try:
            brought = gather(tables, wire.messages, digest(*ours), levels=self._levels, most_bytes=most)
        except Doubt as doubt:
            if doubt.sizes:  # the union is at least as large as the largest rank's part
                self.spread = Spread(doubt.sizes, max(doubt.sizes), flat.nbytes)
            raise
        for place, (s, rows) in enumerate(zip(self.layout.segments, tables, strict=True)):
            write_mean_(values, s.start, rows.items, brought, place, workers)
        if self.unions % RELEARN == 0:
            self._look_at(brought, workers, flat)
        self.unions += 1

    def add_blocks(self, flat: Tensor, wire: Wire, step: int) -> None:
        """The way "blocks"."""
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
        if self.unions % RELEARN == 0:
            self.spread = self.spread_of(added.sizes, [rows.items for rows in added.sums], flat)
        self.unions += 1

    def _whole(self, flat: Tensor) -> list[Tensor]:
        return [flat.detach()[s.start : s.stop].view(-1, s.width) for s in self.layout.segments]

    def _tables(self, flat: Tensor) -> list[Rows]:
        values = flat.detach()
        return [rows_not_zero(values[s.start : s.stop], s.width) for s in self.layout.segments]

    def _look_at(self, brought: Brought, workers: int, flat: Tensor) -> None:
        self.spread = self.spread_of(brought.sizes, [union_items(parts) for parts in brought.parts], flat)
        if workers > FLAT:
            self._levels = self.spread.union_bytes < OVERLAP * sum(brought.sizes)

    def spread_of(self, sizes: Sequence[int], union: Sequence[Tensor], flat: Tensor) -> Spread:
        """The nonzero part of `flat`, from the bytes of each rank and the union's items by segment."""
        segments = self.layout.segments
        index = sum(index_bytes(items, s.items) for items, s in zip(union, segments, strict=True))
        values = sum(4 * s.width * items.numel() for items, s in zip(union, segments, strict=True))
        return Spread(sizes, values + index, flat.nbytes, index)


def warm_up() -> None:
    """Compile the kernels (seconds, once a machine), so that no step waits for it and no measurement includes it."""
    for dtype in (torch.float32, torch.float64):
        exchange = BucketExchange(Layout.of([(64, 1), (64, 4)]))
        wire, statistics = LocalWire.make(1)[0], Statistics()
        for step, way in enumerate(registry().names):
            exchange.reduce_(torch.ones(320, dtype=dtype), way, wire, step=step, statistics=statistics)
