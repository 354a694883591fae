"""Compaction: all ranks know the union of nonzero items, so they sum only the values of these items.

On an all-reduce this needs fewer bytes and far less arithmetic than a sketch, because a value's position in the vector
says which item it belongs to.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamix.compression.index import positions
from dynamix.compression.layout import Layout
from dynamix.compression.settings import ExchangeSettings
from dynamix.compression.wire import Wire
from dynamix_homomorphic.checks import CHECKSUM_WORDS, SegmentPart, checksums
from dynamix_homomorphic.fixed_point import Scales, quantise
from dynamix_homomorphic.union import clip_


@dataclass(frozen=True)
class AgreedBucket:
    """One bucket, after its ranks have agreed on exponents.

    values  float (elements,), this rank's; not changed
    codes   uint8 (blocks,), agreed
    key     for the checksums
    """

    values: Tensor
    layout: Layout
    codes: Tensor
    scales: Scales
    wire: Wire
    key: int
    settings: ExchangeSettings


def compact(bucket: AgreedBucket, union: Tensor) -> tuple[list[SegmentPart], str]:
    """Gather the items of `union`, int32 bitmap (words,), and sum them over ranks.

    Returns the sums by segment and the failed check ("none").
    """
    payload, parts = gather(bucket, union)
    payload[-CHECKSUM_WORDS:] = checksums(parts, bucket.key, payload.device)
    bucket.wire.total(payload)
    want = checksums(parts, bucket.key, payload.device, ranks=bucket.wire.workers)
    return parts, "none" if torch.equal(payload[-CHECKSUM_WORDS:], want) else "checksum"


def gather(bucket: AgreedBucket, words: Tensor) -> tuple[Tensor, list[SegmentPart]]:
    """int32 payload with space for the checksums, and its parts, whose values are views of it."""
    segments = bucket.layout.segments
    found = [positions(words[s.word_slice]) for s in segments]
    sizes = [items.numel() * s.width for items, s in zip(found, segments, strict=True)]
    payload = torch.empty(sum(sizes) + CHECKSUM_WORDS, dtype=torch.int32, device=bucket.values.device)
    outs = payload[: sum(sizes)].split(sizes)
    for s, items, out in zip(segments, found, outs, strict=True):
        quantise(bucket.values, s, items, bucket.codes, bucket.scales, out)
    return payload, [SegmentPart(items, out, s.width) for s, items, out in zip(segments, found, outs, strict=True)]


def everything(layout: Layout, device: torch.device) -> Tensor:
    """int32 (words,): the bitmap of all items. With it `compact` is a dense all-reduce in fixed point."""
    return clip_(torch.full((layout.words,), -1, dtype=torch.int32, device=device), layout)
