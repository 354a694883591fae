"""Which items are nonzero on any rank: the union of packed bitmaps.

The exponents already show which blocks are zero everywhere, so only words of other blocks are sent. The bitmap can be
sent in levels: first which of its bytes are nonzero, then only those bytes. At 5 % of random items that takes 0.46 bits
an item instead of 1 (entropy 0.29); at 1 % two levels take 0.15 (0.08).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dynamix.compression.index import pack, positions
from dynamix.compression.layout import Layout
from dynamix.compression.wire import Wire

LEVEL_BYTES = 4096  # a level costs a round trip, so it must save at least this much


def is_superset(union: Tensor, words: Tensor) -> bool:
    """Whether every bit of `words` is in `union`."""
    return not bool((words & ~union).any())


def union_of(words: Tensor, codes: Tensor, layout: Layout, wire: Wire, depth: int) -> Tensor:
    """The OR of all ranks' `words`, int32 (words,). `codes`: agreed exponents; `depth`: levels above the bits."""
    return exchange_union(words, codes, layout, lambda bits: _ladder(bits, wire, depth))


def exchange_union(words: Tensor, codes: Tensor, layout: Layout, send: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `send` to the bytes, uint8, of the live `words`, and put the result in place. Words of zero blocks and bits
    past the last item are zero."""
    live = live_words(codes, layout)
    bits = words.clone() if live is None else words.index_select(0, live)
    union = send(bits.view(torch.uint8)).view(torch.int32)
    return clip_(union if live is None else torch.zeros_like(words).index_copy_(0, live, union), layout)


def clip_(union: Tensor, layout: Layout) -> Tensor:
    """Clear bits past the last item: if damaged, they would make kernels reach past the bucket."""
    for s in layout.segments:
        part, last = union[s.word_slice], s.items >> 5
        if s.items & 31:
            part[last] &= (1 << (s.items & 31)) - 1
            last += 1
        part[last:] = 0
    return union


def live_words(codes: Tensor, layout: Layout) -> Tensor | None:
    """int64: the words of blocks that are nonzero on some rank; None for all."""
    if bool((codes != 0).all()):
        return None
    found = []
    for s in layout.segments:
        blocks = codes[s.block_slice].nonzero()
        each = torch.arange(1 << (s.shift - 5), device=codes.device)
        found.append(((blocks << (s.shift - 5)) + each + s.first_word).view(-1))
    return torch.cat(found)


def _ladder(bits: Tensor, wire: Wire, depth: int) -> Tensor:
    if depth == 0:
        wire.union(bits)
        return bits
    marked = positions(_ladder(pack(bits), wire, depth - 1).view(torch.int32))
    part = bits.index_select(0, marked)
    wire.union(part)
    return torch.zeros_like(bits).index_copy_(0, marked, part)


def best_depth(union: Tensor, codes: Tensor, layout: Layout) -> int:
    """The number of levels that would have sent this union in the fewest bytes. The next step uses it."""
    live = live_words(codes, layout)
    bits = (union if live is None else union.index_select(0, live)).view(torch.uint8)
    above = pack(bits)
    marked, marked_above = int(torch.count_nonzero(bits)), int(torch.count_nonzero(above))
    two = -(-above.numel() // 8) + marked_above + marked
    costs = [bits.numel(), above.numel() + marked + LEVEL_BYTES, two + 2 * LEVEL_BYTES]
    return costs.index(min(costs))
