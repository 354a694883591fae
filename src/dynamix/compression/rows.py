"""Nonzero items of a gradient's tables, and their form in messages.

The index uses the shortest of three forms: four bytes an item, two numbers a run of adjacent items (an expert's
parameters, the head of a vocabulary), or one bit for every possible item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamix.compression.index import pack, positions
from dynamix.errors import DynamixError

_FEW = 64  # up to this many items they are written directly


@dataclass(frozen=True)
class Rows:
    """Items of one table of a gradient: int64 (k,), ascending, without duplicates, below `span`; and values (k, width).

    index_bytes   of the items in a message; 0: they were in none
    """

    items: Tensor
    values: Tensor
    span: int
    index_bytes: int = 0


@dataclass(frozen=True)
class Index:
    """The items of one table in written form: `bytes`, uint8, a multiple of eight.

    runs   number of runs written; 0: the items themselves; -1: one bit each
    """

    count: int
    runs: int
    bytes: Tensor

    @classmethod
    def of(cls, items: Tensor, span: int) -> Index:
        """The index of int64 (k,), ascending, without duplicates, below `span`."""
        count, kind = items.numel(), _index_type(span)
        if count > _FEW:
            ends = (items[1:] - items[:-1] != 1).nonzero().squeeze(1)
            runs = ends.numel() + 1
            least = kind.itemsize * min(count, 2 * runs)
            if span // 8 < least:
                marks = torch.zeros(span, dtype=torch.bool, device=items.device)
                marks[items] = True
                return cls(count, -1, block_of(pack(marks)))
            if 2 * runs < count:
                first = items.new_zeros(1)
                starts = torch.cat([first, ends + 1])
                lengths = torch.cat([ends + 1, first + count]) - starts
                return cls(count, runs, block_of(torch.cat([items[starts], lengths]).to(kind)))
        return cls(count, 0, block_of(items.to(kind)))

    @property
    def head(self) -> list[int]:
        """The two numbers needed to read it."""
        return [self.count, self.runs]


def index_bytes(items: Tensor, span: int) -> int:
    """The bytes of the index of `items` on the wire."""
    return Index.of(items, span).bytes.numel()


def read_items(message: Tensor, at: int, head: Sequence[int], span: int, rank: int) -> tuple[Tensor, int]:
    """The int64 items of one table in a message of `rank`, from byte `at` on, and where they end.

    Raises `DynamixError` for items that the table does not have.
    """
    count, runs = head
    kind = _index_type(span)
    size = 4 * -(-span // 32) if runs < 0 else (2 * runs or count) * kind.itemsize
    block = message[at : at + size]
    right = block.numel() == size and count >= 0
    items = message.new_empty(0, dtype=torch.int64)
    if right and runs < 0:
        items = positions(block.view(torch.int32))
    elif right and runs:
        starts, lengths = block.view(kind).long().view(2, -1)
        right = int(lengths.min()) > 0 and int(lengths.sum()) == count
        if right:
            skipped = starts - (lengths.cumsum(0) - lengths)
            items = torch.repeat_interleave(skipped, lengths) + torch.arange(count, device=message.device)
    elif right:
        items = block.view(kind).long()
    right = right and items.numel() == count
    if not right or (count and not 0 <= int(items.min()) <= int(items.max()) < span):
        raise DynamixError(f"rank {rank} sent items that the gradient does not have: do all ranks train one model?")
    return items, at + padded(size)


def _index_type(span: int) -> torch.dtype:
    return torch.int32 if span <= 1 << 31 else torch.int64


def padded(size: int) -> int:
    """The next multiple of eight."""
    return -(-size // 8) * 8


def block_of(values: Tensor) -> Tensor:
    """uint8, a multiple of eight bytes: the bytes of `values`, then zeros."""
    flat = values.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 8))


def heads_of(indices: Sequence[Index], device: torch.device) -> Tensor:
    """uint8: how to read each index, 16 bytes a table."""
    numbers = [number for index in indices for number in index.head]
    return torch.tensor(numbers, dtype=torch.int64, device=device).view(torch.uint8)


def sum_of(message: Tensor) -> int:
    """Checksum of uint8, a multiple of eight bytes: int64 sum, wrapping, of words with distinct odd weights.

    Every flipped bit changes it, and so does swapping words.
    """
    words = message.view(torch.int64)
    return int((words * (2 * torch.arange(len(words), device=words.device) + 1)).sum())


def union_of_rows(parts: Sequence[Tensor], span: int) -> Tensor:
    """int64, ascending: the items in any of `parts`."""
    every = torch.cat(list(parts))
    if span > 32 * every.numel():
        found: Tensor = torch.unique(every)
        return found
    marks = torch.zeros(span, dtype=torch.bool, device=every.device)
    marks[every] = True
    return marks.nonzero().squeeze(1)
