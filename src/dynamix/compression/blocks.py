"""Blocks: ranks exchange the indices of their nonzero items, and each sums its share of the union's values for all.

After OmniReduce (Fei et al., SIGCOMM 2021), without aggregators: a block is an item, such as a row of an embedding. The
sum is in floating point in the order of ranks, so it has the same bits as a one-level gather's. A link carries an index
W - 1 times and the union's values 2 (W-1)/W times; in a gather it carries a rank's own values W - 1 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamix.compression.checks import Doubt
from dynamix.compression.gather import SUMMED_IN, Heads, busiest, exchange_headers, send_to
from dynamix.compression.rows import Index, Rows, heads_of, read_items, union_of_rows
from dynamix.compression.shares import add_shares
from dynamix.compression.wire import Messages


@dataclass(frozen=True)
class Added:
    """Sums over ranks by table, in float32 at least, and the bytes exchanged.

    index   bytes of each rank's index, by table: [table][rank]
    own     bytes of index and values that each rank held, by table
    hop_bytes   as in `gather.Heads`
    """

    sums: list[Rows]
    index: list[list[int]]
    own: list[list[int]]
    hop_bytes: int

    @property
    def sizes(self) -> list[int]:
        """Bytes of index and values that each rank held."""
        return [sum(of_rank) for of_rank in zip(*self.own, strict=True)]


def add_blocks(
    tables: Sequence[Rows],
    wire: Messages,
    mark: bytes,
    *,
    divisor: int,
    most_bytes: float,
    whole: Sequence[Tensor] | None = None,
) -> Added:
    """The sums over ranks of `tables` over `divisor`, the same tables on every rank.

    mark         eight bytes; if they differ between ranks, all ranks get `Doubt("mixed")`
    most_bytes   if some rank would have to send or receive more, every rank gets `Doubt("full")`
    whole        the tables themselves, (span, width), if available: the union's values are then read from them

    Raises `DynamixError` for a damaged message: nothing is applied, and the job ends.
    """
    theirs, index, heads = _exchange_items(tables, wire, mark, most_bytes)
    own = [
        [bytes_ + items.numel() * _row_bytes(rows) for bytes_, items in zip(of_table, found, strict=True)]
        for of_table, found, rows in zip(index, theirs, tables, strict=True)
    ]
    unions = [union_of_rows(found, rows.span) for found, rows in zip(theirs, tables, strict=True)]
    sizes = [sum(of_rank) for of_rank in zip(*own, strict=True)]
    values = sum(union.numel() * _row_bytes(rows) for union, rows in zip(unions, tables, strict=True))
    indices = [sum(of_rank) for of_rank in zip(*index, strict=True)]
    if 2 * (wire.workers - 1) / wire.workers * values + busiest(indices) > most_bytes:
        raise Doubt("full", sizes)
    if not values:
        return Added([_nothing(rows) for rows in tables], index, own, heads.hop_bytes)
    if whole is None:
        spread = [_spread_over(union, rows) for union, rows in zip(unions, tables, strict=True)]
    else:
        spread = [table.index_select(0, union).view(-1) for union, table in zip(unions, whole, strict=True)]
    sums = _add_up(tables, unions, spread, wire, divisor)
    return Added(sums, index, own, heads.hop_bytes)


def _row_bytes(rows: Rows) -> int:
    return rows.values.shape[1] * rows.values.element_size()


def _nothing(rows: Rows) -> Rows:
    dtype = SUMMED_IN.get(rows.values.dtype, rows.values.dtype)
    return Rows(rows.items[:0], rows.values[:0].to(dtype), rows.span)


def _exchange_items(
    tables: Sequence[Rows], wire: Messages, mark: bytes, most_bytes: float
) -> tuple[list[list[Tensor]], list[list[int]], Heads]:
    """The nonzero items, by table and rank, and the bytes of their index, from the headers of all ranks."""
    mine = [Index.of(rows.items, rows.span) for rows in tables]
    payload = torch.cat([heads_of(mine, tables[0].items.device), *(index.bytes for index in mine)])
    heads = exchange_headers(payload, wire, mark)
    if busiest(heads.sizes) > most_bytes:
        raise Doubt("full", heads.sizes)
    came = send_to(payload, wire, heads, to=range(wire.workers), of=range(wire.workers))
    found: list[list[Tensor]] = [[] for _ in tables]
    bytes_: list[list[int]] = [[] for _ in tables]
    for rank in range(wire.workers):
        message, at = came[rank], 16 * len(tables)
        read = message[:at].view(torch.int64).view(-1, 2).tolist()
        for table, (rows, head) in enumerate(zip(tables, read, strict=True)):
            items, end = read_items(message, at, head, rows.span, rank)
            found[table].append(items)
            bytes_[table].append(end - at)
            at = end
    return found, bytes_, heads


def _add_up(
    tables: Sequence[Rows], unions: Sequence[Tensor], spread: Sequence[Tensor], wire: Messages, divisor: int
) -> list[Rows]:
    sums = add_shares(spread, [SUMMED_IN.get(flat.dtype, flat.dtype) for flat in spread], wire, divisor=divisor)
    return [
        Rows(union, flat.view(-1, rows.values.shape[1]), rows.span)
        for union, flat, rows in zip(unions, sums, tables, strict=True)
    ]


def _spread_over(union: Tensor, rows: Rows) -> Tensor:
    """The values of `rows` at their places in `union`, other places zero; flat."""
    if rows.items.numel() == union.numel():
        return rows.values.reshape(-1)
    out = rows.values.new_zeros(union.numel(), rows.values.shape[1])
    out[torch.searchsorted(union, rows.items)] = rows.values
    return out.view(-1)
