"""The Count Sketch of LHC (arXiv 2402.07529): each item is added, with a sign, to one counter in each of three tables.

Sketches of different ranks add up to the sketch of the sum. Counters are int32 and wrap around, so sums are exact; an
item of width d (an embedding row) has counters of d integers.

Items are hashed singly, or in blocks of neighbouring lanes that move together and keep memory accesses in order. A
block's lanes are rotated by a hash of block and table, slot = (t + rot_j(block)) mod lanes: without the rotation lane t
of all blocks meets in the same counters, and structured gradients cannot be decoded at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamix.compression.checks import digest
from dynamix.compression.settings import check_lanes
from dynamix_homomorphic.checks import mix
from dynamix_homomorphic.kernels import compiled_for

# The peeling threshold is 1.222 counters per item; close to it decoding fails often and takes many rounds.
COUNTERS_PER_ITEM = 1.4
COUNTERS_PER_ITEM_SMALL = 1.5  # below SMALL items, where chance weighs more
SMALL = 10_000
SPARE = 12  # counters on top, for a handful of items


@dataclass(frozen=True)
class Hashing:
    """Where items go: three tables of `groups` * `lanes` counters, and the keys of three hash functions.

    keys  int64 (3, 2), a multiplier and an offset below 2^32 per table
    """

    keys: Tensor
    groups: int
    lane_bits: int

    @classmethod
    def of(
        cls, items: int, *seed: int, ratio: float | None = None, lanes: int = 1, device: torch.device | str = "cpu"
    ) -> Hashing:
        """Tables for `items` items at `ratio` counters each (1.4, or 1.5 for few), keyed by the integers of `seed`.

        `lanes` is the block size wished for, a power of two up to 1024; tables that would have fewer than 16 blocks
        get smaller ones.
        """
        check_lanes(lanes)
        usual = COUNTERS_PER_ITEM if items >= SMALL else COUNTERS_PER_ITEM_SMALL
        table = math.ceil((ratio or usual) * items / 3) + SPARE // 3
        lane_bits = max(0, min(lanes.bit_length() - 1, (table // 16).bit_length() - 1))
        raw = [int.from_bytes(digest("sketch", j, *seed), "little") for j in range(3)]
        keys = torch.tensor([[(r & 0xFFFFFFFF) | 1, r >> 32] for r in raw], dtype=torch.int64, device=device)
        return cls(keys, -(-table >> lane_bits), lane_bits)

    @property
    def counters(self) -> int:
        return 3 * self.groups << self.lane_bits


def slots(items: Tensor, hashing: Hashing) -> tuple[Tensor, Tensor]:
    """The three counters, int32 (k, 3), and signs, int8 (k, 3), of int64 `items` (k,)."""
    fast = compiled_for(items)
    if fast is not None:
        found: tuple[Tensor, Tensor] = fast.slots(items, hashing.keys, hashing.groups, hashing.lane_bits)
        return found
    lanes = 1 << hashing.lane_bits
    block, lane = items >> hashing.lane_bits, items & (lanes - 1)
    h = mix((block.unsqueeze(1) * hashing.keys[:, 0] + hashing.keys[:, 1]) & 0xFFFFFFFF)
    group = (h * hashing.groups) >> 32
    table = torch.arange(3, device=items.device) * hashing.groups
    where = ((table + group) << hashing.lane_bits) + ((lane.unsqueeze(1) + h) & (lanes - 1))
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
