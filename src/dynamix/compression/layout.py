"""How a gradient bucket is divided: segments of items, and blocks of items that share an exponent.

An item has one bit in the index: it is one element, or a whole row of an embedding. Items are numbered within their
segment. 32 of them make one word of the bitmap, and a power of two of words makes a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynamix.errors import ConfigError

BLOCK_ELEMENTS = 512  # one exponent byte per 2 KiB of float32


@dataclass(frozen=True)
class Segment:
    """`items` items of `width` elements each, starting at element `start` of the bucket."""

    start: int
    items: int
    width: int
    shift: int  # log2 of the items in a block, at least 5
    first_block: int
    first_word: int

    @property
    def stop(self) -> int:
        return self.start + self.items * self.width

    @property
    def blocks(self) -> int:
        return -(-self.items >> self.shift)

    @property
    def words(self) -> int:
        return self.blocks << (self.shift - 5)

    @property
    def block_slice(self) -> slice:
        return slice(self.first_block, self.first_block + self.blocks)

    @property
    def word_slice(self) -> slice:
        return slice(self.first_word, self.first_word + self.words)


@dataclass(frozen=True)
class Layout:
    """The segments of one bucket, in order and without gaps.

    >>> layout = Layout.of([(700, 1), (40, 64)])
    >>> layout.elements, layout.blocks, layout.words
    (3260, 4, 34)
    """

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]]) -> Layout:
        """The layout of (items, width) pairs; adjacent widths of 1 are merged. Raises `ConfigError` for a width < 1."""
        merged: list[tuple[int, int]] = []
        for items, width in parts:
            if width < 1 or items < 0:
                fix = "give (number, length) of the rows"
                raise ConfigError("parts", (items, width), "items >= 0, width >= 1", fix)
            if merged and width == 1 and merged[-1][1] == 1:
                merged[-1] = (merged[-1][0] + items, 1)
            elif items:
                merged.append((items, width))
        segments: list[Segment] = []
        start = block = word = 0
        for items, width in merged:
            shift = max(5, (-(-BLOCK_ELEMENTS // width) - 1).bit_length())
            segments.append(s := Segment(start, items, width, shift, block, word))
            start, block, word = s.stop, block + s.blocks, word + s.words
        return cls(tuple(segments))

    @property
    def elements(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @property
    def blocks(self) -> int:
        return sum(s.blocks for s in self.segments)

    @property
    def words(self) -> int:
        return sum(s.words for s in self.segments)
