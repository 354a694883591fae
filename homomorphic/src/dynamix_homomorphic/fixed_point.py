"""Gradients as int32 fixed point with one exponent per block, shared by all ranks, so that sums are exact.

A block's exponent e is that of its largest magnitude on any rank (|x| < 2^e). Each value becomes the integer nearest to
x / 2^(e - s), s = 30 - ceil(log2 W). W of them cannot overflow, and int32 sums do not depend on their order. This
rounding is the only loss: "lossless" here means that the decoded sum equals the integer sum of the quantised inputs.

An exponent is sent as one byte, the exponent field of float32. 0 is a block of zeros. 255 is a block that fixed point
cannot hold (NaN, infinity, or a float64 beyond 2^128). Blocks below 2^-125 share the exponent -125.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamix.compression.bucket import DTYPES
from dynamix.compression.index import pack
from dynamix.compression.layout import Layout, Segment
from dynamix.errors import ConfigError
from dynamix_homomorphic.kernels import compiled_for

ZERO, BEYOND = 0, 255
_BIAS = 126  # code = e + 126


def fraction_bits(workers: int) -> int:
    """s = 30 - ceil(log2 W): how many bits below the block's exponent are kept.

    >>> [fraction_bits(w) for w in (1, 2, 3, 16, 17, 32)]
    [30, 29, 28, 26, 25, 25]
    """
    if not 1 <= workers <= 1 << 20:
        raise ConfigError("workers", workers, f"1 to {1 << 20}", "pass the size of the process group")
    return 30 - (workers - 1).bit_length()


@dataclass(frozen=True)
class Scales:
    """Powers of two by exponent code, float64 (256,): `up` from value to integer, `down` back. 0 for zero blocks."""

    workers: int
    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, workers: int, device: torch.device | str = "cpu") -> Scales:
        s = fraction_bits(workers)
        exponents = [s - (code - _BIAS) for code in range(1, 255)]
        up = [0.0, *(math.ldexp(1.0, e) for e in exponents), 0.0]
        down = [0.0, *(math.ldexp(1.0, -e) for e in exponents), 0.0]
        return cls(workers, *(torch.tensor(t, dtype=torch.float64, device=device) for t in (up, down)))


def working(flat: Tensor) -> Tensor:
    """`flat` itself for float32 and float64, else its exact float32 copy. Raises `ConfigError` for other dtypes."""
    if flat.dtype not in DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ConfigError("dtype", flat.dtype, allowed, "use a plain all-reduce for these gradients")
    return flat.detach() if flat.dtype in (torch.float32, torch.float64) else flat.detach().float()


def scan(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """One rank's exponent codes, uint8 (blocks,), and the bitmap of its nonzero items, int32 (words,)."""
    codes = torch.empty(layout.blocks, dtype=torch.uint8, device=values.device)
    words = torch.empty(layout.words, dtype=torch.int32, device=values.device)
    fast = compiled_for(values) if values.dtype == torch.float32 else None
    for s in layout.segments:
        part, code, word = values[s.start : s.stop], codes[s.block_slice], words[s.word_slice]
        if fast is not None:
            fast.scan(part, s.width, s.shift, code, word)
        else:
            _scan(part, s, code, word)
    return codes, words


def _scan(part: Tensor, s: Segment, codes: Tensor, words: Tensor) -> None:
    padded = part.new_zeros(s.blocks << s.shift, s.width)
    padded.view(-1)[: part.numel()] = part
    words.copy_(pack((padded != 0).any(1)).view(torch.int32))
    codes.copy_(codes_of(padded.abs().view(s.blocks, -1).amax(1)))


def codes_of(largest: Tensor) -> Tensor:
    """The exponent code, uint8, of each block's largest magnitude.

    >>> codes_of(torch.tensor([0.0, 1.0, 3.0, 1e-45, float("nan"), float("inf")])).tolist()
    [0, 127, 128, 1, 255, 255]
    """
    finite = torch.isfinite(largest)
    exponent = torch.frexp(torch.where(finite, largest, 0.0)).exponent
    codes = (exponent + _BIAS).clamp(1, 254)
    codes = torch.where(largest == 0, ZERO, codes)
    return torch.where(finite & (exponent <= 128), codes, BEYOND).to(torch.uint8)


def quantise(values: Tensor, s: Segment, items: Tensor, codes: Tensor, scales: Scales, out: Tensor) -> None:
    """Write the integers of `items` (int64 (k,), numbered within segment `s`) to `out`, int32 (k * width,)."""
    part, code = values[s.start : s.stop], codes[s.block_slice]
    fast = compiled_for(values)
    if fast is not None:
        fast.quantise(part, items, s.width, s.shift, code, scales.up, out)
        return
    scale = scales.up[code[items >> s.shift].long()]
    wide = part.view(-1, s.width)[items].double() * scale.unsqueeze(1)
    out.copy_(wide.round_().to(torch.int32).view(-1))


def write_mean_(values: Tensor, s: Segment, items: Tensor, codes: Tensor, scales: Scales, totals: Tensor) -> None:
    """Write the mean over workers to `items` of `values`, from the integer sums `totals`. Other items do not change."""
    part, code = values[s.start : s.stop], codes[s.block_slice]
    fast = compiled_for(values) if values.dtype in (torch.float32, torch.float64) else None
    if fast is not None:
        fast.write_mean_(part, items, s.width, s.shift, code, scales.down, totals, float(scales.workers))
        return
    scale = scales.down[code[items >> s.shift].long()]
    mean = totals.view(-1, s.width).double() * scale.unsqueeze(1) / scales.workers
    if values.dtype != torch.float64:
        mean = mean.float()  # half types are rounded from float32, as the compiled kernel's caller does
    part.view(-1, s.width)[items] = mean.to(values.dtype)
