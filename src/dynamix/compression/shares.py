"""Sums over ranks by messages: each rank sums its share of the elements for all, in the order of ranks.

Two messages in sequence replace a ring's 2 (W-1), with the same bytes. All ranks get the same bits, because the order
of additions is that of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamix.compression.rows import block_of, padded, sum_of
from dynamix.compression.wire import Messages
from dynamix.errors import DynamixError

_SUM = 8  # bytes of the checksum at a message's end


def add_shares(
    flats: Sequence[Tensor], dtypes: Sequence[torch.dtype], wire: Messages, *, divisor: int = 1
) -> list[Tensor]:
    """The sums over ranks of `flats`, (n,) each, over `divisor`; added and sent back in `dtypes`.

    Lengths and types are the same on every rank. Raises `DynamixError` for a damaged message.
    """
    workers, own = wire.workers, wire.rank
    cuts = [[flat.numel() * rank // workers for rank in range(workers + 1)] for flat in flats]

    def share(of: Sequence[Tensor], rank: int) -> list[Tensor]:
        return [flat[cut[rank] : cut[rank + 1]] for flat, cut in zip(of, cuts, strict=True)]

    messages = [_sealed(share(flats, rank)) for rank in range(workers)]
    came = _swap(messages, [messages[own].numel()] * workers, wire)
    like = share(flats, own)
    sums = [torch.zeros_like(one, dtype=dtype) for one, dtype in zip(like, dtypes, strict=True)]
    for message in came:
        for total, values in zip(sums, _read(message, like), strict=True):
            wide = values.to(total.dtype)
            total.add_(wide if divisor == 1 else wide / divisor)
    whole = [flat.new_empty(flat.numel(), dtype=dtype) for flat, dtype in zip(flats, dtypes, strict=True)]
    parts = [share(whole, rank) for rank in range(workers)]
    sizes = [_SUM + sum(padded(one.nbytes) for one in of_rank) for of_rank in parts]
    came = _swap([_sealed(sums)] * workers, sizes, wire)
    for of_rank, message in zip(parts, came, strict=True):
        for into, values in zip(of_rank, _read(message, of_rank), strict=True):
            into.copy_(values)
    return whole


def _sealed(parts: Sequence[Tensor]) -> Tensor:
    """uint8: the parts unchanged, then their checksum."""
    body = torch.cat([block_of(part) for part in parts])
    seal = torch.tensor([sum_of(body)], dtype=torch.int64, device=body.device).view(torch.uint8)
    return torch.cat([body, seal])


def _swap(messages: Sequence[Tensor], sizes: Sequence[int], wire: Messages) -> list[Tensor]:
    """The messages that each rank sent here, including the own one. Raises `DynamixError` for a damaged message."""
    own, empty = wire.rank, messages[0].new_empty(0)
    sent = [empty if rank == own else message for rank, message in enumerate(messages)]
    came = wire.swap(sent, [0 if rank == own else size for rank, size in enumerate(sizes)])
    came[own] = messages[own]
    for rank, message in enumerate(came):
        if rank != own and sum_of(message[:-_SUM]) != int(message[-_SUM:].view(torch.int64)):
            raise damaged(rank)
    return came


def damaged(rank: int) -> DynamixError:
    """The error for a damaged message of `rank`."""
    return DynamixError(f"what rank {rank} sent was damaged on its way: nothing of it is applied")


def _read(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a message, with the sizes and types of `like`."""
    found, at = [], 0
    for one in like:
        found.append(message[at : at + one.nbytes].view(one.dtype))
        at += padded(one.nbytes)
    return found
