"""Checks that must hold before a bucket is applied, and the count of those that did not.

Every check ends the same way on every rank. A bucket in doubt is reduced densely from its untouched values, or by the
way that stands behind its own.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# In order of precedence when ranks see different ones.
REASONS = ("none", "peel", "residual", "checksum", "superset", "union", "mixed", "nonfinite", "lost", "full")
_DIGEST = 8


class Doubt(Exception):
    """This bucket goes dense ("peel": by compaction; "lost": the same way by the reserve), for one of REASONS.

    Every rank raises it; users never see it.
    """

    def __init__(self, reason: str, sizes: Sequence[int] = ()) -> None:
        self.reason, self.sizes = reason, sizes  # bytes that ranks would have gathered, for "full"
        super().__init__(reason)


@dataclass
class Statistics:
    """Figures of an exchange: buckets by way taken, buckets that went dense by reason, bytes handed to collectives.

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


def marks_of(mine: bytes, device: torch.device) -> Tensor:
    """uint8 (16,): a digest and its complement, which both survive a maximum only if all ranks brought the same."""
    return torch.tensor([*mine, *(255 - b for b in mine)], dtype=torch.uint8, device=device)


def are_same(marks: Tensor) -> bool:
    """Whether all ranks' `marks_of` were, of which these are the maximum."""
    high, low = marks.cpu().view(2, -1).int()
    return bool((high == 255 - low).all())
