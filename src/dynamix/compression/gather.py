"""Gather: every rank sends the nonzero items of its gradient to all, and adds those of all ranks in their order.

It needs no fixed point and no common index: a small header says how much each rank sends, then index and values go from
all to all. The sum is in floating point in a fixed order, so it is the same on every rank and in every run. A rank
sends its own items W - 1 times; a ring sends those of the union about twice. Above `FLAT` ranks there are two levels,
and items that several ranks of a group hold are sent on once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dynamix.compression.checks import Doubt
from dynamix.compression.kernels import compiled_for
from dynamix.compression.rows import Index, Rows, block_of, heads_of, padded, read_items, sum_of, union_of_rows
from dynamix.compression.shares import damaged
from dynamix.compression.wire import Messages

FLAT = 8  # up to this many ranks, all send directly to all
_HEADER = 5  # int64: a digest, bytes that follow, their sum, bytes that a hop is worth, and the sum of these four
CROWDED = 0.12  # assumed part of the time that large messages lose if all send directly to all, not around a ring
SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # types in which half types are added


@dataclass(frozen=True)
class Levels:
    """The plan of a two-level gather: first within groups of neighbours, then with one rank of each other group.

    >>> levels = Levels.of(10)
    >>> levels.groups
    (range(0, 4), range(4, 7), range(7, 10))
    >>> levels.beyond(9)
    [2, 6]
    """

    groups: tuple[range, ...]

    @classmethod
    def of(cls, workers: int) -> Levels:
        count = math.ceil(workers / math.ceil(math.sqrt(workers)))
        least, more = divmod(workers, count)
        starts = [group * least + min(group, more) for group in range(count + 1)]
        return cls(tuple(range(a, b) for a, b in itertools.pairwise(starts)))

    def mine(self, rank: int) -> range:
        """The ranks of `rank`'s group."""
        return next(group for group in self.groups if rank in group)

    def beyond(self, rank: int) -> list[int]:
        """The ranks whose sums `rank` receives in the second level, one of each other group."""
        place, own = rank - self.mine(rank).start, self.mine(rank)
        return [group[place % len(group)] for group in self.groups if group is not own]

    def followers(self, rank: int) -> list[int]:
        """The ranks that receive `rank`'s sums in the second level."""
        ranks = range(self.groups[-1].stop)
        return [other for other in ranks if other not in self.mine(rank) and rank in self.beyond(other)]


@dataclass(frozen=True)
class Brought:
    """The rows to add up, by table and in the order of ranks; already divided if `divided`.

    sizes       bytes that each rank sent at first
    hop_bytes   as in `Heads`
    """

    parts: list[list[Rows]]
    divided: bool
    sizes: list[int]
    hop_bytes: int


@dataclass(frozen=True)
class Heads:
    """The headers that ranks send before their rows.

    sizes       bytes that each will send
    sums        checksums of these bytes
    hop_bytes   bytes that a link carries in the time of a hop, the median over ranks; 0: not measured
    """

    sizes: list[int]
    sums: list[int]
    hop_bytes: int

    @property
    def ring(self) -> bool:
        """Whether large messages are faster around a ring than sent directly to all.

        The busiest link carries the same bytes in both; a ring has more hops.
        """
        others = len(self.sizes) - 1
        return self.hop_bytes > 0 and CROWDED * others * max(self.sizes) > (others - 1) * self.hop_bytes


def gather(
    tables: Sequence[Rows],
    wire: Messages,
    mark: bytes,
    *,
    levels: bool,
    most_bytes: float,
    divisor: int | None = None,
) -> Brought:
    """All rows needed for the mean over ranks of `tables`, the same tables on every rank.

    mark         eight bytes; if they differ between ranks, all ranks get `Doubt("mixed")`
    levels       use two levels if there are more ranks than `FLAT`
    most_bytes   if some rank would have to send or receive more, every rank gets `Doubt("full")`
    divisor      of the sums of the first of two levels; None: the number of ranks

    Raises `DynamixError` for a damaged message: nothing is applied, and the job ends.
    """
    ranks, own = range(wire.workers), wire.rank
    if not levels or wire.workers <= FLAT:
        found, heads = _swap(tables, wire, mark, to=ranks, of=ranks, most_bytes=most_bytes)
        return Brought(_by_table(found), False, heads.sizes, heads.hop_bytes)
    plan = Levels.of(wire.workers)
    near = plan.mine(own)
    found, heads = _swap(tables, wire, mark, to=near, of=near, most_bytes=most_bytes)
    sums = [add_up(parts, divisor or wire.workers) for parts in _by_table(found)]
    far, _ = _swap(sums, wire, mark, to=plan.followers(own), of=plan.beyond(own), most_bytes=math.inf)
    return Brought(_by_table(far), True, heads.sizes, heads.hop_bytes)


def _by_table(found: Sequence[Sequence[Rows]]) -> list[list[Rows]]:
    return [list(parts) for parts in zip(*found, strict=True)]


def _swap(
    tables: Sequence[Rows], wire: Messages, mark: bytes, *, to: Sequence[int], of: Sequence[int], most_bytes: float
) -> tuple[list[list[Rows]], Heads]:
    """The tables of the ranks `of` and the own ones, in the order of ranks; and the headers of all ranks."""
    payload, written = _pack(tables)
    ranks, own = range(wire.workers), wire.rank
    heads = exchange_headers(payload, wire, mark)
    sizes = heads.sizes
    if busiest(sizes) > most_bytes:
        raise Doubt("full", sizes)
    if all(size == 16 * len(tables) for size in sizes):  # all ranks have only counts, and all of them are zero
        return [written], heads
    came = send_to(payload, wire, heads, to=to, of=of)
    return [written if rank == own else _unpack(came[rank], tables, rank) for rank in ranks if rank in came], heads


def exchange_headers(payload: Tensor, wire: Messages, mark: bytes) -> Heads:
    """Exchange headers: what each rank will send.

    `Doubt("mixed")`, on every rank, if marks differ. Raises `DynamixError` for a damaged header.
    """
    device, ranks, own = payload.device, range(wire.workers), wire.rank
    mine = [int.from_bytes(mark, "little", signed=True), payload.numel(), sum_of(payload), wire.hop_bytes]
    header = torch.tensor(mine, dtype=torch.int64)
    header = torch.cat([header, torch.tensor([sum_of(header)])]).to(device).view(torch.uint8)
    empty = header.new_empty(0)
    others = [8 * _HEADER * (rank != own) for rank in ranks]
    heads = wire.swap([header if size else empty for size in others], others)
    heads[own] = header
    every = torch.stack([head.view(torch.int64) for head in heads]).cpu()
    for rank, head in enumerate(every):
        if sum_of(head[:-1]) != int(head[-1]):
            raise damaged(rank)
    marks, sizes, sums, worth, _ = every.T.tolist()
    if len(set(marks)) > 1:
        raise Doubt("mixed")
    known = sorted(hop_bytes for hop_bytes in worth if hop_bytes > 0)
    return Heads(sizes, sums, known[len(known) // 2] if known else 0)


def send_to(
    payload: Tensor, wire: Messages, heads: Heads, *, to: Sequence[int], of: Sequence[int]
) -> dict[int, Tensor]:
    """The rows received from the ranks `of`, by rank, and the own `payload`; raises `DynamixError` for damaged rows."""
    ranks, own, empty = range(wire.workers), wire.rank, payload.new_empty(0)
    wanted = [heads.sizes[rank] if rank in of and rank != own else 0 for rank in ranks]
    if heads.ring and len(to) == len(of) == wire.workers:
        came = wire.pass_on(payload, heads.sizes)
    else:
        came = wire.swap([payload if rank in to and rank != own else empty for rank in ranks], wanted)
    for rank in ranks:
        if wanted[rank] and sum_of(came[rank]) != heads.sums[rank]:
            raise damaged(rank)
    return {rank: payload if rank == own else came[rank] for rank in ranks if rank == own or wanted[rank]}


def busiest(sizes: Sequence[int]) -> int:
    """The most bytes that one rank sends or receives if all send to all."""
    return max((len(sizes) - 1) * max(sizes), sum(sizes) - min(sizes))


def _pack(tables: Sequence[Rows]) -> tuple[Tensor, list[Rows]]:
    """uint8, a multiple of eight bytes: how to read each table's index, then each table's index and values.

    Also returns the tables with the length of their index filled in.
    """
    indices = [Index.of(rows.items, rows.span) for rows in tables]
    blocks = [heads_of(indices, tables[0].items.device)]
    for rows, index in zip(tables, indices, strict=True):
        blocks += [index.bytes, block_of(rows.values)]
    written = [
        dataclasses.replace(rows, index_bytes=index.bytes.numel()) for rows, index in zip(tables, indices, strict=True)
    ]
    return torch.cat(blocks), written


def _unpack(payload: Tensor, like: Sequence[Rows], rank: int) -> list[Rows]:
    heads = payload[: 16 * len(like)].view(torch.int64).view(-1, 2).tolist()
    found, at = [], 16 * len(like)
    for head, rows in zip(heads, like, strict=True):
        begin = at
        items, at = read_items(payload, at, head, rows.span, rank)
        width = rows.values.shape[1]
        size = items.numel() * width * rows.values.element_size()
        values = payload[at : at + size].view(rows.values.dtype).view(-1, width)
        found.append(Rows(items, values, rows.span, at - begin))
        at += padded(size)
    return found


def rows_not_zero(part: Tensor, width: int) -> Rows:
    """The rows of `part`, (items * width,), with a nonzero element. Values are copied.

    >>> rows_not_zero(torch.tensor([0.0, 0.0, 0.0, 3.0]), 2).items.tolist()
    [1]
    """
    table = part.view(-1, width)
    fast = compiled_for(part) if part.dtype == torch.float32 else None
    if fast is not None:
        items: Tensor = fast.rows_not_zero(part, width)
    elif part.device.type == "cpu" and width == 1 and part.dtype != torch.bfloat16:
        items = torch.from_numpy(np.flatnonzero(part.numpy()))
    else:
        items = (table != 0).any(1).nonzero().squeeze(1)
    return Rows(items, table.index_select(0, items), table.shape[0])


def add_up(parts: Sequence[Rows], workers: int = 1) -> Rows:
    """The sum of `parts`, each divided by `workers`, in the order given. Half types are added in float32."""
    first = parts[0]
    dtype, span = SUMMED_IN.get(first.values.dtype, first.values.dtype), first.span
    items = union_items(parts)
    sums = first.values.new_zeros((items.numel(), first.values.shape[1]), dtype=dtype)
    for rows in parts:
        add_rows_(sums, torch.searchsorted(items, rows.items), rows.values.to(dtype), workers)
    return Rows(items, sums, span)


def union_items(parts: Sequence[Rows]) -> Tensor:
    """int64, ascending: the items in any of `parts`."""
    return union_of_rows([rows.items for rows in parts], parts[0].span)


def add_rows_(table: Tensor, items: Tensor, values: Tensor, workers: int) -> None:
    """Add `values`, (k, width) of the type of `table`, over `workers` to the rows `items` (all different) of it."""
    fast = compiled_for(table) if table.dtype in (torch.float32, torch.float64) else None
    if fast is not None:
        fast.add_rows_(table.view(-1), items, values.view(-1), table.shape[1], workers)
    else:
        table[items] = table[items] + values / workers


def write_mean_(flat: Tensor, start: int, own: Tensor, brought: Brought, place: int, workers: int) -> None:
    """Write the mean of table `place` over its rows in `flat`, from element `start` on. `own`: nonzero rows here."""
    parts = brought.parts[place]
    span, width = parts[0].span, parts[0].values.shape[1]
    table = flat[start : start + span * width].view(span, width)
    divisor = 1 if brought.divided else workers
    if table.dtype in SUMMED_IN:
        sums = add_up(parts, divisor)
        table[sums.items] = sums.values.to(table.dtype)
        return
    table[own] = 0.0
    for rows in parts:
        add_rows_(table, rows.items, rows.values, divisor)
