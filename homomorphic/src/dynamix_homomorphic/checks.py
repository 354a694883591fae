"""Checks that must hold before a decoded bucket is applied.

Every check ends alike on every rank. Quantities that all ranks hold are judged on agreed numbers. If one rank alone may
see a problem, the ranks vote. A doubtful bucket is reduced densely from its unchanged values. A bucket whose sketch
held too many items goes by compaction.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dynamix.compression.checks import REASONS, Doubt, are_same, digest, marks_of
from dynamix.compression.wire import Wire, WireLost
from dynamix_homomorphic.fixed_point import BEYOND
from dynamix_homomorphic.kernels import compiled_for

CHECKSUM_WORDS = 3
_MASK = 0xFFFFFFFF
_Found = TypeVar("_Found")


def agree(codes: Tensor, mine: bytes, wire: Wire) -> Tensor:
    """The exponents agreed over ranks, uint8 (blocks,), by one maximum that also compares each rank's digest.

    Raises `Doubt`.
    """
    header = torch.cat([codes, marks_of(mine, codes.device)])
    wire.maximum(header)
    agreed, marks = header[: codes.numel()], header[codes.numel() :]
    if not are_same(marks):
        raise Doubt("mixed")
    if bool((agreed == BEYOND).any()):
        raise Doubt("nonfinite")
    return agreed


def confirm_union(union: Tensor, mine_included: bool, wire: Wire) -> None:
    """Check that all ranks hold the same union, and that each finds its own items in it. Else `Doubt` on all of them.

    The length of the next exchange depends on the union, so a rank with a different one would block the others.
    """
    mine = digest(int((union.long() * _weights(union.numel(), union.device)).sum()))
    header = torch.nn.functional.pad(marks_of(mine, union.device), (0, 1), value=not mine_included)
    wire.maximum(header)
    if bool(header[-1]):
        raise Doubt("superset")
    if not are_same(header[:-1]):
        raise Doubt("union")


@functools.lru_cache(maxsize=64)
def _weights(words: int, device: torch.device) -> Tensor:
    """int64 (words,), odd and all different: weights of a sum that two bitmaps are unlikely to share."""
    return torch.arange(words, device=device) * 0x1E3779B97F4A7C15 | 1


def vote(reason: str, wire: Wire, device: torch.device) -> None:
    """Raise `Doubt` on every rank if any rank has a reason other than "none"."""
    worst = torch.tensor([REASONS.index(reason)], dtype=torch.uint8, device=device)
    wire.maximum(worst)
    if bool(worst[0]):
        raise Doubt(REASONS[int(worst[0])])


def settle(work: Callable[[], tuple[_Found, str]], wire: Wire, device: torch.device) -> _Found:
    """Do `work`, and agree over ranks on its outcome. `work` returns its result and the failed check ("none").

    Raises `Doubt` on every rank alike. If the wire can be lost, ranks may have stopped at different points, even at
    doubts that all would have seen. So all of them vote, over the wire's fallback.
    """
    found: _Found | None = None
    try:
        found, reason = work()
    except (Doubt, WireLost) as error:
        if wire.reserve is None:
            raise
        reason = error.reason if isinstance(error, Doubt) else "lost"
    vote(reason, wire.reserve or wire, device)
    assert found is not None
    return found


def mix(values: Tensor) -> Tensor:
    """Murmur3's 32-bit finaliser on int64 values below 2^32."""
    h = ((values ^ (values >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def checksum(totals: Tensor, items: Tensor, width: int, key: int) -> tuple[int, int]:
    """Two sums modulo 2^32 over int32 (k * width,): plain, and weighted by odd numbers that differ by item and column.

    Both are linear, so the checksums of all ranks add up to the checksum of their sum.
    """
    fast = compiled_for(totals)
    if fast is not None:
        plain, weighted = fast.checksum(totals, items, width, key)
        return int(plain), int(weighted)
    columns = torch.arange(width, device=items.device) * 0x85EBCA6B
    weights = (((items * 0x9E3779B1 + key).unsqueeze(1) + columns) & _MASK) | 1
    wide = totals.view(-1, width).long()
    return int(wide.sum()) & _MASK, int((wide * weights).sum()) & _MASK


@dataclass
class SegmentPart:
    """One segment's part of a payload: int64 items (k,) and int32 values (k * width,)."""

    items: Tensor
    values: Tensor
    width: int


def checksums(parts: Sequence[SegmentPart], key: int, device: torch.device, *, ranks: int = 1) -> Tensor:
    """int32 (CHECKSUM_WORDS,), the end of a payload: the two checksums of all parts, and `ranks` times a constant.

    Without the constant, a payload whose every part was counted twice would match its own checksums.
    """
    plain = weighted = 0
    for place, part in enumerate(parts):
        one, other = checksum(part.values, part.items, part.width, (key + place * 0x9E3779B1) & _MASK)
        plain, weighted = plain + one, weighted + other
    signed = [((v & _MASK) ^ 0x80000000) - 0x80000000 for v in (plain, weighted, ranks * (key | 1))]
    return torch.tensor(signed, dtype=torch.int32, device=device)
