"""numba kernels for the CPU. Each repeats, bit for bit, the torch function of its name: `index.positions` and so on.

All arithmetic is in int64 with 32-bit quantities, masked, because numba converts a mix of signed and unsigned 64-bit
integers to floats.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
Array = NDArray[Any]

MASK = 0xFFFFFFFF
MAGNITUDE = np.int32(0x7FFFFFFF)
_BIT = np.zeros(32, np.int64)  # de Bruijn: the position of the bit in a word with one bit set
for _i in range(32):
    _BIT[((0x077CB531 << _i) & MASK) >> 27] = _i


def jit(function: F) -> F:
    """`function` compiled, with the compiled code cached if possible."""
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no place for the cache
        return cast(F, numba.njit(nogil=True)(function))


@jit
def nonzero_rows(bits: Array, width: int, marks: Array) -> None:
    """Mark the rows of `bits`, the int32 of float32 values, with a nonzero element."""
    for item in range(marks.size):
        row = bits[item * width : (item + 1) * width]
        seen = np.int32(0)
        for i in range(row.size):
            seen = np.int32(seen | row[i])
        marks[item] = np.int32(seen & MAGNITUDE) != 0


@jit
def _count_bits(words: Array) -> Any:
    total = np.int64(0)
    for w in range(words.size):
        v = np.int64(words[w])
        v -= (v >> 1) & 0x55555555
        v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
        v = (v + (v >> 4)) & 0x0F0F0F0F
        total += ((v * 0x01010101) & MASK) >> 24
    return total


@jit
def _positions(words: Array, out: Array) -> None:
    k = 0
    for w in range(words.size):
        word = np.int64(words[w])
        while word != 0:
            low = word & -word
            out[k] = 32 * w + _BIT[((low * 0x077CB531) & MASK) >> 27]
            k += 1
            word ^= low


def positions(words: Tensor) -> Tensor:
    unsigned = words.numpy().view(np.uint32)
    out = np.empty(_count_bits(unsigned), np.int64)
    _positions(unsigned, out)
    return torch.from_numpy(out)


def rows_not_zero(values: Tensor, width: int) -> Tensor:
    """int64, ascending: the rows of float32 `values` with a nonzero element."""
    array = values.numpy()
    if width == 1:
        return torch.from_numpy(np.flatnonzero(array))
    marks = np.empty(array.size // width, np.bool_)
    nonzero_rows(array.view(np.int32), width, marks)
    return torch.from_numpy(np.flatnonzero(marks))


@jit
def _add_rows(table: Array, items: Array, values: Array, width: int, workers: Any) -> None:
    for i in range(items.size):
        at = items[i] * width
        for c in range(width):
            table[at + c] += values[i * width + c] / workers


def add_rows_(table: Tensor, items: Tensor, values: Tensor, width: int, workers: int) -> None:
    array = table.numpy()
    _add_rows(array, items.numpy(), values.numpy(), width, array.dtype.type(workers))
