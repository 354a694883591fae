"""Which items are not zero on any rank: packed bitmaps and their union.

Blocks that are zero everywhere are known from the exponents already, so only words of live blocks travel. Below that,
the bitmap can be sent in levels: first which of its bytes are not zero, then only those bytes. At 5 % of random items
that takes 0.46 bits an item in place of 1 (entropy 0.29); at 1 % two levels take 0.15 (0.08).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dynamix.compression.kernels import compiled_for
from dynamix.compression.layout import Layout
from dynamix.compression.wire import Wire

LEVEL_BYTES = 4096  # a level is one more round trip: it has to save at least this much
_GATHER_BITS = 0x0102040810204080  # times eight 0/1 bytes (little-endian): their bits side by side in the top byte


def pack(marks: Tensor) -> Tensor:
    """Bit i of byte b says whether marks[8 b + i] is not zero; uint8, padded to 4 bytes. `marks`: bool or uint8 (n,).

    >>> pack(torch.tensor([True, False, False, True])).tolist()
    [9, 0, 0, 0]
    """
    if not marks.numel():
        return torch.empty(0, dtype=torch.uint8, device=marks.device)
    padding = -marks.numel() % 32
    if marks.device.type != "cpu":
        return _pack(torch.nn.functional.pad(marks, (0, padding)) if padding else marks)
    packed = np.packbits(marks.view(torch.uint8).numpy(), bitorder="little")
    return torch.from_numpy(np.pad(packed, (0, -packed.size % 4)) if padding else packed)


def _pack(marks: Tensor) -> Tensor:
    eights = (marks != 0).view(torch.uint8).view(torch.int64)
    return ((eights * _GATHER_BITS) >> 56).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """bool (8 n,): the bits of uint8 (n,)."""
    each = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> each) & 1).view(-1).bool()


def positions(words: Tensor) -> Tensor:
    """int64 (k,), ascending: which bits of the int32 `words` are set."""
    fast = compiled_for(words)
    found: Tensor = unpack(words.view(torch.uint8)).nonzero().squeeze(1) if fast is None else fast.positions(words)
    return found


def is_superset(union: Tensor, words: Tensor) -> bool:
    """Whether every bit of `words` is in `union`."""
    return not bool((words & ~union).any())


def union_of(words: Tensor, codes: Tensor, layout: Layout, wire: Wire, depth: int) -> Tensor:
    """The OR of all ranks' `words`, int32 (words,). `codes`: agreed exponents; `depth`: levels above the bits."""
    return exchange_union(words, codes, layout, lambda bits: _ladder(bits, wire, depth))


def exchange_union(words: Tensor, codes: Tensor, layout: Layout, send: Callable[[Tensor], Tensor]) -> Tensor:
    """What `send` makes of the uint8 of the live `words`, at their places; zeros elsewhere and past the last item."""
    live = live_words(codes, layout)
    bits = words.clone() if live is None else words.index_select(0, live)
    union = send(bits.view(torch.uint8)).view(torch.int32)
    return clip_(union if live is None else torch.zeros_like(words).index_copy_(0, live, union), layout)


def clip_(union: Tensor, layout: Layout) -> Tensor:
    """Clear bits past the last item: damaged ones would make kernels reach past the bucket."""
    for s in layout.segments:
        part, last = union[s.word_slice], s.items >> 5
        if s.items & 31:
            part[last] &= (1 << (s.items & 31)) - 1
            last += 1
        part[last:] = 0
    return union


def live_words(codes: Tensor, layout: Layout) -> Tensor | None:
    """int64: the words of blocks that are not zero on every rank; None for all."""
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
    """The number of levels that would have sent this union in the fewest bytes: the next step's choice."""
    live = live_words(codes, layout)
    bits = (union if live is None else union.index_select(0, live)).view(torch.uint8)
    above = pack(bits)
    marked, marked_above = int(torch.count_nonzero(bits)), int(torch.count_nonzero(above))
    two = -(-above.numel() // 8) + marked_above + marked
    costs = [bits.numel(), above.numel() + marked + LEVEL_BYTES, two + 2 * LEVEL_BYTES]
    return costs.index(min(costs))
