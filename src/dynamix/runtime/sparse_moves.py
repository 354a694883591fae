"""Moves whose rows are mostly zero, on their way: rows that nobody has moved do not travel.

An embedding moves in the rows that a round's samples touch, as long as its optimizer leaves the others alone (SGD
without momentum and weight decay, Adagrad, SparseAdam).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynamix.compression.checks import Doubt, Statistics
from dynamix.compression.gather import rows_not_zero
from dynamix.compression.rows import Rows
from dynamix.compression.rows_exchange import RowsExchange
from dynamix.compression.wire import GroupWire
from dynamix.errors import UsageError
from dynamix.runtime.averaging import Payload, Workers
from dynamix.runtime.ending import wait_for

DENSE_FOR = 8  # meetings after one whose moves were not sparse, before they are looked at again


class SparseMoves:
    """Sums payloads over `workers`, each by rows or densely: whichever sends less, the same on all workers.

    `statistics` counts payloads' tables by way, and bytes.
    """

    def __init__(self, workers: Workers) -> None:
        self.workers, self.statistics = workers, Statistics()
        self._memories: dict[int, RowsExchange] = {}
        self._dense_for: dict[int, int] = {}
        assert workers.group is not None
        # Waited for where the job's end is looked for.
        self._wire = GroupWire(workers.group, "bor", wait=lambda work: wait_for(work, workers.ending))

    def add(self, payloads: Sequence[Payload]) -> None:
        """A collective call. Rows have been summed at its end; what goes densely is begun, as by `Workers.add`."""
        dense = [payload for number, payload in enumerate(payloads) if not self._by_rows(number, payload)]
        for payload in dense:
            size = payload.flat.nbytes
            self.statistics.count("dense", dense_bytes=size, payload_bytes=size)
            self.workers.add(payload.flat)

    def _by_rows(self, number: int, payload: Payload) -> bool:
        left = self._dense_for.get(number, 0)
        if left:
            self._dense_for[number] = left - 1
            return False
        memory = self._memories.setdefault(number, RowsExchange())
        size, statistics = payload.flat.nbytes, self.statistics
        try:
            sums = memory.add_up(
                tables_of(payload),
                self._wire,
                "moves",
                number,
                divisor=1,
                dense_bytes=size,
                statistics=statistics,
                always=False,
            )
        except Doubt as doubt:
            if doubt.reason != "full":
                raise UsageError("workers are about to average different moves: train one model") from doubt
            self._dense_for[number] = DENSE_FOR
            return False
        take(payload, sums)
        return True


def tables_of(payload: Payload) -> list[Rows]:
    """What of it is not zero: rows of each tensor that has some, single entries of one without, the weight last."""
    parts, shapes = payload.flat.split([*payload.sizes, 1]), [*payload.shapes, torch.Size([1])]
    widths = [shape[1:].numel() if len(shape) > 1 else 1 for shape in shapes]
    return [rows_not_zero(part, width) for part, width in zip(parts, widths, strict=True) if part.numel()]


def take(payload: Payload, sums: Sequence[Rows]) -> None:
    """The sums over workers of `tables_of` have come; in float32 at least."""
    wide = torch.promote_types(payload.flat.dtype, torch.float32)
    payload.flat = torch.zeros_like(payload.flat, dtype=wide)
    parts = [part for part in payload.flat.split([*payload.sizes, 1]) if part.numel()]
    for part, rows in zip(parts, sums, strict=True):
        part.view(rows.span, -1)[rows.items] = rows.values.to(wide)
