"""What must hold before a decoded bucket is applied, and the count of what did not.

Every check ends the same way on every rank: what all ranks can see alike is judged on agreed numbers, and what one rank
might see alone is put to a vote. A bucket in doubt is reduced densely from its untouched values; one whose sketch held
too many items goes by compaction.
"""

import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynamix.compression.fixed_point import BEYOND
from dynamix.compression.kernels import compiled_for
from dynamix.compression.wire import Wire, WireLost

# In order of precedence when ranks see different ones.
REASONS = ("none", "peel", "residual", "checksum", "superset", "union", "mixed", "nonfinite", "lost", "full")
CHECKSUM_WORDS = 3
_DIGEST = 8
_MASK = 0xFFFFFFFF
_Found = TypeVar("_Found")


class Doubt(Exception):
    """This bucket goes dense ("peel": by compaction; "lost": the same way by the reserve), for one of REASONS.

    Every rank raises it; users never see it.
    """

    def __init__(self, reason: str, sizes: Sequence[int] = ()) -> None:
        self.reason, self.sizes = reason, sizes  # bytes that ranks would have gathered, for "full"
        super().__init__(reason)


@dataclass
class Statistics:
    """What the exchange did: buckets by way taken, buckets that went dense by reason, bytes handed to collectives.

    dense_after counts "nonfinite" (NaN or infinity, as a GradScaler expects), "mixed" (ranks disagree about seed, step
    or settings), "full" (a gather would have sent more), "union", "superset", "residual" and "checksum". `undecoded`
    counts sketches that held more items than would come out; their buckets went by compaction, and are counted there.
    `lost` counts losses of the aggregator, `rejoined` how often it was joined again; no bucket goes dense for those.
    """

    buckets: Counter[str] = field(default_factory=Counter)
    dense_after: Counter[str] = field(default_factory=Counter)
    undecoded: int = 0
    lost: int = 0
    rejoined: int = 0
    dense_bytes: int = 0  # what the same buckets would have handed over uncompressed
    payload_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(
        self, way: str, *, dense_bytes: int, payload_bytes: int, doubt: str | None = None, buckets: int = 1
    ) -> None:
        """One exchange, of one bucket or several; from any thread."""
        with self._lock:
            self.buckets[way] += buckets
            if doubt == "lost":
                self.lost += 1
            elif doubt is not None:
                self.dense_after[doubt] += 1
            self.dense_bytes += dense_bytes
            self.payload_bytes += payload_bytes

    def count_undecoded(self) -> None:
        """One sketch that did not decode; from any thread."""
        with self._lock:
            self.undecoded += 1

    def count_rejoined(self) -> None:
        """The aggregator was joined again; from any thread."""
        with self._lock:
            self.rejoined += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for logs and JSON."""
        counted = {"buckets": dict(self.buckets), "dense_after": dict(self.dense_after), "undecoded": self.undecoded}
        counted |= {"lost": self.lost, "rejoined": self.rejoined}
        return {**counted, "dense_bytes": self.dense_bytes, "payload_bytes": self.payload_bytes}


def digest(*parts: object) -> bytes:
    """Eight bytes that differ where any part does."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=_DIGEST).digest()


def agree(codes: Tensor, mine: bytes, wire: Wire) -> Tensor:
    """The exponents all ranks share, uint8 (blocks,), by one maximum that also carries each rank's digest.

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
    """All ranks hold the same union, and each finds its own items in it; else `Doubt` on all of them.

    What follows is as long as the union is large, so a rank with another one would hang the rest.
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
    """int64 (words,), odd and all different, for a sum that no two bitmaps are likely to share."""
    return torch.arange(words, device=device) * 0x1E3779B97F4A7C15 | 1


def marks_of(mine: bytes, device: torch.device) -> Tensor:
    """uint8 (16,): a digest and its complement, which both survive a maximum only if all ranks brought the same."""
    return torch.tensor([*mine, *(255 - b for b in mine)], dtype=torch.uint8, device=device)


def are_same(marks: Tensor) -> bool:
    """Whether all ranks' `marks_of` were, of which these are the maximum."""
    high, low = marks.cpu().view(2, -1).int()
    return bool((high == 255 - low).all())


def vote(reason: str, wire: Wire, device: torch.device) -> None:
    """`Doubt` on every rank if any rank has a reason other than "none"."""
    worst = torch.tensor([REASONS.index(reason)], dtype=torch.uint8, device=device)
    wire.maximum(worst)
    if bool(worst[0]):
        raise Doubt(REASONS[int(worst[0])])


def settle(work: Callable[[], tuple[_Found, str]], wire: Wire, device: torch.device) -> _Found:
    """Do `work`, which returns what it found and the check that failed ("none"), and agree over ranks how it went.

    Raises `Doubt` on every rank alike. Where the wire can be lost, ranks may have stopped at different points, also at
    doubts that all would have seen; so all of them vote, on what stands behind the wire.
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

    Both are linear, so the sum over ranks of their checksums is the checksum of their sum.
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
class Part:
    """One segment's share of a payload: int64 items (k,) and int32 values (k * width,)."""

    items: Tensor
    values: Tensor
    width: int


def checksums(parts: Sequence[Part], key: int, device: torch.device, *, ranks: int = 1) -> Tensor:
    """int32 (CHECKSUM_WORDS,), which end a payload: the two checksums of all parts, and `ranks` times a constant.

    Without the constant a payload that was counted twice throughout would fit its own checksums.
    """
    plain = weighted = 0
    for place, part in enumerate(parts):
        one, other = checksum(part.values, part.items, part.width, (key + place * 0x9E3779B1) & _MASK)
        plain, weighted = plain + one, weighted + other
    signed = [((v & _MASK) ^ 0x80000000) - 0x80000000 for v in (plain, weighted, ranks * (key | 1))]
    return torch.tensor(signed, dtype=torch.int32, device=device)
