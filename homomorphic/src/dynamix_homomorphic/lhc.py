"""Lossless homomorphic compression (arXiv 2402.07529): sketches are added, an index is ORed.

Two-phase: the ranks first exchange the union, peel its structure, and send only a sketch that will decode. One-phase:
the sketch's size is predicted from earlier unions, and sketch and index are sent together. What does not decode goes by
compaction.
"""

import math

import torch
from torch import Tensor

from dynamix.compression.checks import Doubt
from dynamix.compression.index import positions
from dynamix_homomorphic.checks import CHECKSUM_WORDS, SegmentPart, checksums
from dynamix_homomorphic.compaction import AgreedBucket, gather
from dynamix_homomorphic.peeling import Peeling, extract, peel
from dynamix_homomorphic.sketch import Hashing, insert_, slots
from dynamix_homomorphic.union import exchange_union, is_superset

ATTEMPTS = 8  # seeds to try before a structure counts as undecodable
CLASS_STEP = 1.125  # predicted sizes are rounded up to powers of this, so that they rarely change
MARGIN = 1.1  # factor on a predicted union
SPARE = 16  # items added to a predicted union, which matters for small ones
MEMORY = 0.8  # weight of the past in the prediction


def two_phase(bucket: AgreedBucket, union: Tensor, seed: tuple[int, ...]) -> tuple[list[SegmentPart], str]:
    """As `compaction.compact`, by sketch. Raises `Doubt("peel")`, on every rank alike, if no seed decodes."""
    _, parts = gather(bucket, union)
    found = [_decodable(bucket, part.items, (*seed, place)) for place, part in enumerate(parts)]
    payload, tables = _sketches([hashing for hashing, *_ in found], bucket)
    for table, part, (_, where, signs, _) in zip(tables, parts, found, strict=True):
        insert_(table, where, signs, part.values, part.width)
    payload[-CHECKSUM_WORDS:] = checksums(parts, bucket.key, payload.device)
    bucket.wire.total(payload)
    decoded = [
        SegmentPart(part.items, extract(table, where, signs, peeling, part.width), part.width)
        for table, part, (_, where, signs, peeling) in zip(tables, parts, found, strict=True)
    ]
    return decoded, _verdict(bucket, payload, decoded)


def _sketches(hashings: list[Hashing], bucket: AgreedBucket) -> tuple[Tensor, list[Tensor]]:
    """One payload of zeros, the segments' sketches and then the checksums; and the sketches as views."""
    sizes = [h.counters * s.width for h, s in zip(hashings, bucket.layout.segments, strict=True)]
    payload = torch.zeros(sum(sizes) + CHECKSUM_WORDS, dtype=torch.int32, device=bucket.values.device)
    return payload, list(payload[: sum(sizes)].split(sizes))


def _hashing(bucket: AgreedBucket, items: int, *seed: int) -> Hashing:
    return Hashing.of(items, *seed, ratio=bucket.settings.ratio, device=bucket.values.device)


def _decodable(bucket: AgreedBucket, items: Tensor, seed: tuple[int, ...]) -> tuple[Hashing, Tensor, Tensor, Peeling]:
    for attempt in range(ATTEMPTS):
        hashing = _hashing(bucket, items.numel(), *seed, attempt)
        where, signs = slots(items, hashing)
        peeling = peel(where, hashing.counters)
        if peeling.complete:
            return hashing, where, signs, peeling
    raise Doubt("peel")


def one_phase(
    bucket: AgreedBucket, words: Tensor, expected: list[int], seed: tuple[int, ...]
) -> tuple[list[SegmentPart], str, Tensor]:
    """Send sketches for `expected` items per segment together with this rank's bitmap `words`.

    Returns the sums by segment, the failed check ("peel" if the union was larger than expected), and the union.
    """
    hashings = [_hashing(bucket, k, *seed, place) for place, k in enumerate(expected)]
    payload, tables = _sketches(hashings, bucket)
    _, own = gather(bucket, words)
    for table, part, hashing in zip(tables, own, hashings, strict=True):
        insert_(table, *slots(part.items, hashing), part.values, part.width)
    payload[-CHECKSUM_WORDS:] = checksums(own, bucket.key, payload.device)

    def send(bits: Tensor) -> Tensor:
        bucket.wire.union(bits, beside=payload)
        return bits

    union = exchange_union(words, bucket.codes, bucket.layout, send)
    if not is_superset(union, words):
        return [], "superset", union

    decoded = []
    for s, table, hashing in zip(bucket.layout.segments, tables, hashings, strict=True):
        items = positions(union[s.word_slice])
        where, signs = slots(items, hashing)
        peeling = peel(where, hashing.counters)
        if not peeling.complete:
            return [], "peel", union
        decoded.append(SegmentPart(items, extract(table, where, signs, peeling, s.width), s.width))
    return decoded, _verdict(bucket, payload, decoded), union


def _verdict(bucket: AgreedBucket, payload: Tensor, decoded: list[SegmentPart]) -> str:
    """The failed check of a payload from which all items have been extracted."""
    if bool(payload[:-CHECKSUM_WORDS].any()):
        return "residual"
    want = checksums(decoded, bucket.key, payload.device, ranks=bucket.wire.workers)
    return "none" if torch.equal(payload[-CHECKSUM_WORDS:], want) else "checksum"


class UnionForecast:
    """Predicts how many items the next union will have, by segment: smoothed, with a margin, in size classes.

    It is updated with unions that all ranks know, so all ranks predict alike.

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
        """Record a union. A larger one than expected counts in full at once; smaller ones count gradually."""
        before = items if self._smooth is None or len(self._smooth) != len(items) else self._smooth
        pairs = zip(items, before, strict=True)
        self._smooth = [max(float(k), MEMORY * old + (1 - MEMORY) * k) for k, old in pairs]

    def expected(self) -> list[int] | None:
        """Predicted items by segment. None before the first union, which then goes two-phase."""
        return None if self._smooth is None else [size_class(MARGIN * k + SPARE) for k in self._smooth]

    def forget(self, *, next_seed: bool) -> None:
        """After a doubt: use two-phase until another union is observed. Keep a seed that decoded, as unions resemble
        each other. Change one that did not, because items with equal hashes would fail at every step."""
        self._smooth, self.attempt = None, self.attempt + 1 if next_seed else 0


def size_class(items: float) -> int:
    """`items` rounded up to a power of CLASS_STEP.

    >>> [size_class(k) for k in (0, 1, 100, 1_000_000)]
    [1, 1, 112, 1086420]
    """
    return math.ceil(CLASS_STEP ** math.ceil(math.log(max(items, 1.0)) / math.log(CLASS_STEP) - 1e-9))
