"""The Count Sketch of LHC (arXiv 2402.07529): each item is added, with a sign, to one counter in each of three tables.

Sketches of different ranks add up to the sketch of the sum. Counters are int32 and wrap around, so sums are exact. An
item of width d (an embedding row) has counters of d integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamix.compression.checks import digest
from dynamix_homomorphic.checks import mix
from dynamix_homomorphic.kernels import compiled_for

# The peeling threshold is 1.222 counters per item; near it decoding fails often and takes many rounds.
COUNTERS_PER_ITEM = 1.4
COUNTERS_PER_ITEM_SMALL = 1.5  # below SMALL items, where chance matters more
SMALL = 10_000
SPARE = 12  # extra counters, for a handful of items


@dataclass(frozen=True)
class Hashing:
    """The hashes of items: three tables of `table` counters, and the keys of three hash functions.

    keys  int64 (3, 2), a multiplier and an offset below 2^32 per table
    """

    keys: Tensor
    table: int

    @classmethod
    def of(cls, items: int, *seed: int, ratio: float | None = None, device: torch.device | str = "cpu") -> Hashing:
        """Tables for `items` items with `ratio` counters each (1.4, or 1.5 for few), keyed by the integers `seed`."""
        usual = COUNTERS_PER_ITEM if items >= SMALL else COUNTERS_PER_ITEM_SMALL
        table = math.ceil((ratio or usual) * items / 3) + SPARE // 3
        raw = [int.from_bytes(digest("sketch", j, *seed), "little") for j in range(3)]
        keys = torch.tensor([[(r & 0xFFFFFFFF) | 1, r >> 32] for r in raw], dtype=torch.int64, device=device)
        return cls(keys, table)

    @property
    def counters(self) -> int:
        return 3 * self.table


def slots(items: Tensor, hashing: Hashing) -> tuple[Tensor, Tensor]:
    """The three counters, int32 (k, 3), and signs, int8 (k, 3), of int64 `items` (k,)."""
    fast = compiled_for(items)
    if fast is not None:
        found: tuple[Tensor, Tensor] = fast.slots(items, hashing.keys, hashing.table)
        return found
    h = mix((items.unsqueeze(1) * hashing.keys[:, 0] + hashing.keys[:, 1]) & 0xFFFFFFFF)
    where = torch.arange(3, device=items.device) * hashing.table + ((h * hashing.table) >> 32)
    return where.to(torch.int32), (1 - 2 * ((h >> 11) & 1)).to(torch.int8)


def insert_(table: Tensor, where: Tensor, signs: Tensor, values: Tensor, width: int) -> None:
    """Add int32 `values` (k * width,) to `table`, int32 (counters * width,), in place."""
    fast = compiled_for(table)
    if fast is not None:
        fast.insert_(table, where, signs, values, width)
        return
    rows, added = table.view(-1, width), values.view(-1, width)
    for j in range(3):
        rows.index_add_(0, where[:, j], added * signs[:, j : j + 1])
