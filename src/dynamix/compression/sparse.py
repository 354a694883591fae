"""Sums of sparse gradients, as `nn.Embedding(sparse=True)` makes them: all of a backward pass at once.

DDP gives each such parameter its own bucket. Those of one pass wait for the last bucket and are sent together, so a
model with four tables pays for one exchange. The mean has the rows of the union, coalesced. A table whose ranks touch
mostly the same rows goes in blocks if that sends less than a gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dynamix.compression.checks import Doubt, Statistics
from dynamix.compression.rows import Rows
from dynamix.compression.rows_exchange import RowsExchange
from dynamix.compression.wire import Messages
from dynamix.errors import UsageError


def mean_of_sparse(
    gradients: Sequence[Tensor], wire: Messages, *, statistics: Statistics, memory: RowsExchange | None = None
) -> list[Tensor]:
    """The means over ranks of sparse COO `gradients`, the same parameters on every rank.

    memory   each rank's memory between passes, used to choose between gather and blocks

    Values over W are added in the order of ranks, so all ranks get the same bits, up to the sign of a zero.
    Raises `UsageError`, on every rank, if shapes or types differ.
    """
    shapes = [(tuple(g.shape), g.sparse_dim(), str(g.dtype)) for g in gradients]
    exchange = RowsExchange() if memory is None else memory
    tables = [rows_of(g) for g in gradients]
    dense_bytes = sum(g.numel() * g.element_size() for g in gradients)
    try:
        sums = exchange.add_up(
            tables, wire, "sparse", shapes, divisor=wire.workers, dense_bytes=dense_bytes, statistics=statistics
        )
    except Doubt as doubt:
        raise UsageError(f"ranks reduced different sparse gradients, here {shapes}: train one model") from doubt
    return [gradient_of(rows, like) for rows, like in zip(sums, gradients, strict=True)]


def rows_of(gradient: Tensor) -> Rows:
    """The rows of a sparse COO tensor; duplicate rows are added up."""
    gradient = gradient.detach().coalesce()
    sizes = gradient.shape[: gradient.sparse_dim()]
    items = torch.zeros_like(gradient.indices()[0])
    for index, size in zip(gradient.indices(), sizes, strict=True):
        items = items * size + index
    values = gradient.values()
    width = values[0].numel() if values.shape[0] else math.prod(gradient.shape[gradient.sparse_dim() :])
    return Rows(items, values.reshape(-1, width).contiguous(), math.prod(sizes))


def gradient_of(rows: Rows, like: Tensor) -> Tensor:
    """The sparse COO tensor with these rows, of `like`'s shape and type."""
    sizes = like.shape[: like.sparse_dim()]
    indices, rest = [], rows.items
    for size in reversed(sizes):
        indices.append(rest % size)
        rest = rest // size
    values = rows.values.to(like.dtype).view(-1, *like.shape[like.sparse_dim() :])
    index = torch.stack(indices[::-1])
    return torch.sparse_coo_tensor(index, values, like.shape, is_coalesced=True, check_invariants=False)
