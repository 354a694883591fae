"""Lossless homomorphic compression (arXiv 2402.07529): sketches that are added, an index that is ORed.

Two-phase: the union is known first, its structure is peeled, and only a sketch that will decode is sent. One-phase: the
sketch's size is predicted from earlier unions, and sketch and index travel together; what does not decode goes by
compaction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamix.compression.checks import CHECKSUM_WORDS, Doubt, Part, checksums
from dynamix.compression.compaction import gather
from dynamix.compression.fixed_point import Scales
from dynamix.compression.index import clip_, is_superset, live_words, positions, spread
from dynamix.compression.layout import Layout
from dynamix.compression.peeling import Peeling, extract, peel
from dynamix.compression.sketch import Hashing, insert_, slots
from dynamix.compression.wire import Wire

ATTEMPTS = 8  # seeds tried before a structure counts as not decodable
CLASS_STEP = 1.125  # predicted sizes are rounded up to powers of this, so that they seldom change
MARGIN = 1.1  # a predicted union is taken to be this much larger
SPARE = 16  # and by so many items, for small ones
MEMORY = 0.8  # weight of the past in the prediction


@dataclass
class Sketches:
    """One payload: the segments' sketches behind each other, then the checksums."""

    hashings: list[Hashing]
    payload: Tensor
    tables: list[Tensor]

    @classmethod
    def empty(cls, hashings: list[Hashing], layout: Layout, device: torch.device) -> Sketches:
        sizes = [h.counters * s.width for h, s in zip(hashings, layout.segments, strict=True)]
        payload = torch.zeros(sum(sizes) + CHECKSUM_WORDS, dtype=torch.int32, device=device)
        return cls(hashings, payload, list(payload[: sum(sizes)].split(sizes)))


def two_phase(
    values: Tensor,
    layout: Layout,
    union: Tensor,
    codes: Tensor,
    scales: Scales,
    wire: Wire,
    *,
    seed: tuple[int, ...],
    key: int,
    ratio: float | None = None,
    lanes: int = 1,
) -> tuple[list[Part], str]:
    """As `compaction.compact`, by sketch. Raises `Doubt("peel")`, on every rank alike, when no seed will decode."""
    _, parts = gather(values, layout, union, codes, scales)
    found = [_decodable(part, (*seed, place), ratio, lanes, values.device) for place, part in enumerate(parts)]
    sketches = Sketches.empty([hashing for hashing, *_ in found], layout, values.device)
    for table, part, (_, where, signs, _) in zip(sketches.tables, parts, found, strict=True):
        insert_(table, where, signs, part.values, part.width)
    sketches.payload[-CHECKSUM_WORDS:] = checksums(parts, key, values.device)
    wire.total(sketches.payload)
    decoded = [
        Part(part.items, extract(table, where, signs, peeling, part.width), part.width)
        for table, part, (_, where, signs, peeling) in zip(sketches.tables, parts, found, strict=True)
    ]
    return decoded, _verdict(sketches, decoded, key, wire.workers)


def _decodable(
    part: Part, seed: tuple[int, ...], ratio: float | None, lanes: int, device: torch.device
) -> tuple[Hashing, Tensor, Tensor, Peeling]:
    for attempt in range(ATTEMPTS):
        hashing = Hashing.of(part.items.numel(), *seed, attempt, ratio=ratio, lanes=lanes, device=device)
        where, signs = slots(part.items, hashing)
        peeling = peel(where, hashing.counters)
        if peeling.complete:
            return hashing, where, signs, peeling
    raise Doubt("peel")


def one_phase(
    values: Tensor,
    layout: Layout,
    words: Tensor,
    codes: Tensor,
    scales: Scales,
    wire: Wire,
    *,
    expected: list[int],
    seed: tuple[int, ...],
    key: int,
    ratio: float | None = None,
    lanes: int = 1,
) -> tuple[list[Part], str, Tensor]:
    """Send sketches for `expected` items a segment together with this rank's bitmap `words`.

    Returns the sums by segment, the check that failed ("peel" when the union was larger than expected), and the union.
    """
    device = values.device
    hashings = [
        Hashing.of(k, *seed, place, ratio=ratio, lanes=lanes, device=device) for place, k in enumerate(expected)
    ]
    sketches = Sketches.empty(hashings, layout, device)
    _, own = gather(values, layout, words, codes, scales)
    for table, part, hashing in zip(sketches.tables, own, hashings, strict=True):
        where, signs = slots(part.items, hashing)
        insert_(table, where, signs, part.values, part.width)
    sketches.payload[-CHECKSUM_WORDS:] = checksums(own, key, device)

    live = live_words(codes, layout)
    sent = words.clone() if live is None else words.index_select(0, live)
    wire.union(sent.view(torch.uint8), beside=sketches.payload)
    union = sent if live is None else spread(sent, live, words)
    clip_(union, layout)
    if not is_superset(union, words):
        return [], "superset", union

    decoded = []
    for s, table, hashing in zip(layout.segments, sketches.tables, hashings, strict=True):
        items = positions(union[s.word_slice])
        where, signs = slots(items, hashing)
        peeling = peel(where, hashing.counters)
        if not peeling.complete:
            return [], "peel", union
        decoded.append(Part(items, extract(table, where, signs, peeling, s.width), s.width))
    return decoded, _verdict(sketches, decoded, key, wire.workers), union


def _verdict(sketches: Sketches, decoded: list[Part], key: int, ranks: int) -> str:
    if any(bool(table.any()) for table in sketches.tables):
        return "residual"
    want = checksums(decoded, key, sketches.payload.device, ranks=ranks)
    return "none" if torch.equal(sketches.payload[-CHECKSUM_WORDS:], want) else "checksum"


class UnionForecast:
    """How many items the next union will have, by segment: smoothed, with a margin, in size classes.

    Fed with unions that all ranks know, so all ranks predict alike.

    >>> prediction = UnionForecast()
    >>> prediction.expected() is None
    True
    >>> prediction.observe([1000])
    >>> prediction.expected()
    [1173]
    """

    def __init__(self) -> None:
        self._smooth: list[float] | None = None
        self.attempt = 0

    def observe(self, items: list[int]) -> None:
        """A union larger than expected counts in full at once; shrinking is followed slowly."""
        if self._smooth is None or len(self._smooth) != len(items):
            self._smooth = [float(k) for k in items]
            return
        self._smooth = [
            max(float(k), MEMORY * old + (1 - MEMORY) * k) for k, old in zip(items, self._smooth, strict=True)
        ]

    def expected(self) -> list[int] | None:
        """None before the first union: two-phase then."""
        if self._smooth is None:
            return None
        return [size_class(MARGIN * k + SPARE) for k in self._smooth]

    def forget(self, *, next_seed: bool) -> None:
        """After a doubt: two-phase, unless another union is observed first. A seed that decoded is kept, as unions
        resemble each other; one that did not is left, or twin items would fail at every step."""
        self._smooth, self.attempt = None, self.attempt + 1 if next_seed else 0


def size_class(items: float) -> int:
    """`items` rounded up to a power of CLASS_STEP.

    >>> [size_class(k) for k in (0, 1, 100, 1_000_000)]
    [1, 1, 112, 1086420]
    """
    return math.ceil(CLASS_STEP ** math.ceil(math.log(max(items, 1.0)) / math.log(CLASS_STEP) - 1e-9))
