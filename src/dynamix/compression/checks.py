"""Checks before a bucket is applied, and counts of failed ones.

Every check has the same result on every rank. A bucket in doubt is reduced densely from its unchanged values, or by
the fallback of its way.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# In order of precedence if ranks see different ones.
REASONS = ("none", "peel", "residual", "checksum", "superset", "union", "mixed", "nonfinite", "lost", "full")
_DIGEST = 8


class Doubt(Exception):
    """This bucket goes dense ("peel": by compaction; "lost": by the same way over the reserve), for one of REASONS.

    Every rank raises it; it never reaches users.
    """

    def __init__(self, reason: str, sizes: Sequence[int] = ()) -> None:
        self.reason, self.sizes = reason, sizes  # bytes that ranks would have gathered, for "full"
        super().__init__(reason)


@dataclass
class Statistics:
    """Figures of an exchange: buckets by way, buckets that went dense by reason, bytes passed to collectives.

    dense_after counts "nonfinite" (NaN or infinity, as a GradScaler expects), "mixed" (ranks disagree about seed, step
    or settings), "full" (a gather would have sent more), "union", "superset", "residual" and "checksum". `undecoded`
    counts sketches that held too many items to decode; their buckets went by compaction, and are counted there.
    `lost` counts losses of the aggregator, `rejoined` how often it was joined again; neither makes a bucket dense.
    """

    buckets: Counter[str] = field(default_factory=Counter)
    dense_after: Counter[str] = field(default_factory=Counter)
    undecoded: int = 0
    lost: int = 0
    rejoined: int = 0
    dense_bytes: int = 0  # of the same buckets without compression
    payload_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(
        self, way: str, *, dense_bytes: int, payload_bytes: int, doubt: str | None = None, buckets: int = 1
    ) -> None:
        """Count one exchange, of one bucket or several; from any thread."""
        with self._lock:
            self.buckets[way] += buckets
            if doubt == "lost":
                self.lost += 1
            elif doubt is not None:
                self.dense_after[doubt] += 1
            self.dense_bytes += dense_bytes
            self.payload_bytes += payload_bytes

    def count_undecoded(self) -> None:
        """Count one sketch that did not decode; from any thread."""
        with self._lock:
            self.undecoded += 1

    def count_rejoined(self) -> None:
        """Count that the aggregator was joined again; from any thread."""
        with self._lock:
            self.rejoined += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for logs and JSON."""
        counted = {"buckets": dict(self.buckets), "dense_after": dict(self.dense_after), "undecoded": self.undecoded}
        counted |= {"lost": self.lost, "rejoined": self.rejoined}
        return {**counted, "dense_bytes": self.dense_bytes, "payload_bytes": self.payload_bytes}


def digest(*parts: object) -> bytes:
    """Eight bytes that differ if any part differs."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=_DIGEST).digest()


def marks_of(mine: bytes, device: torch.device) -> Tensor:
    """uint8 (16,): a digest and its complement. Both survive a maximum only if all ranks have the same."""
    return torch.tensor([*mine, *(255 - b for b in mine)], dtype=torch.uint8, device=device)


def are_same(marks: Tensor) -> bool:
    """Whether all ranks had the same `marks_of`, given their maximum."""
    high, low = marks.cpu().view(2, -1).int()
    return bool((high == 255 - low).all())
