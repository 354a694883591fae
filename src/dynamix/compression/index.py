"""The index of nonzero items: packed bitmaps, and the positions of their bits."""

import numpy as np
import torch
from torch import Tensor

from dynamix.compression.kernels import compiled_for

_GATHER_BITS = 0x0102040810204080  # times eight 0/1 bytes (little-endian): their bits side by side in the top byte


def pack(marks: Tensor) -> Tensor:
    """Bit i of byte b is set if marks[8 b + i] is not zero; uint8, padded to 4 bytes. `marks`: bool or uint8 (n,).

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
    """int64 (k,), ascending: the positions of bits set in the int32 `words`."""
    fast = compiled_for(words)
    found: Tensor = unpack(words.view(torch.uint8)).nonzero().squeeze(1) if fast is None else fast.positions(words)
    return found
