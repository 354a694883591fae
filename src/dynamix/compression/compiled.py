"""numba kernels for the CPU. Each repeats, bit for bit, the torch function of its name: `fixed_point.scan` and so on.

All arithmetic is int64 that holds 32-bit quantities, masked: numba turns a mix of signed and unsigned 64-bit integers
into floats.
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

_MASK = 0xFFFFFFFF
_PIECE = 1 << 17  # elements; a multiple of a block's
_MAGNITUDE = np.int32(0x7FFFFFFF)
_BIT = np.zeros(32, np.int64)  # de Bruijn: which bit is set in a word with one bit
for _i in range(32):
    _BIT[((0x077CB531 << _i) & _MASK) >> 27] = _i


def _jit(function: F) -> F:
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # nowhere to keep the compiled code
        return cast(F, numba.njit(nogil=True)(function))


def _kernel(function: F) -> Callable[..., Any]:
    """`function` compiled, to be called with tensors in place of its arrays."""
    compiled = _jit(function)
    return lambda *arguments: compiled(*(a.numpy() if isinstance(a, Tensor) else a for a in arguments))


@_jit
def _codes(bits: Array, block: int, codes: Array) -> None:
    for b in range(codes.size):
        row = bits[b * block : (b + 1) * block]
        top = np.int32(0)
        for i in range(row.size):
            magnitude = np.int32(row[i] & _MAGNITUDE)
            top = max(top, magnitude)  # as integers, NaN and infinity are the largest
        codes[b] = 0 if top == 0 else max(top >> 23, 1)


@_jit
def _nonzero_rows(bits: Array, width: int, marks: Array) -> None:
    for item in range(marks.size):
        row = bits[item * width : (item + 1) * width]
        seen = np.int32(0)
        for i in range(row.size):
            seen = np.int32(seen | row[i])
        marks[item] = np.int32(seen & _MAGNITUDE) != 0


def scan(values: Tensor, width: int, shift: int, codes: Tensor, words: Tensor) -> None:
    """Exponent codes and bitmap of one segment of float32 `values`."""
    bits = values.view(torch.int32).numpy()
    out = words.numpy().view(np.uint8)
    if width == 1:
        _scan_elements(values.numpy(), bits, 1 << shift, codes.numpy(), out)
        return
    _codes(bits, width << shift, codes.numpy())
    marks = np.empty(bits.size // width, np.bool_)
    _nonzero_rows(bits, width, marks)
    packed = np.packbits(marks, bitorder="little")
    out[: packed.size] = packed
    out[packed.size :] = 0


def _scan_elements(values: Array, bits: Array, block: int, codes: Array, out: Array) -> None:
    """In pieces that stay in the cache; for the bitmap numpy's own loops are the fastest."""
    marks = np.empty(min(_PIECE, values.size), np.bool_)
    at = 0
    for start in range(0, values.size, _PIECE):
        part = slice(start, start + _PIECE)
        _codes(bits[part], block, codes[start // block : (start + _PIECE) // block])
        count = min(_PIECE, values.size - start)
        packed = np.packbits(np.not_equal(values[part], 0, out=marks[:count]), bitorder="little")
        out[at : at + packed.size] = packed
        at += packed.size
    out[at:] = 0


@_jit
def _count_bits(words: Array) -> Any:
    total = np.int64(0)
    for w in range(words.size):
        v = np.int64(words[w])
        v -= (v >> 1) & 0x55555555
        v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
        v = (v + (v >> 4)) & 0x0F0F0F0F
        total += ((v * 0x01010101) & _MASK) >> 24
    return total


@_jit
def _positions(words: Array, out: Array) -> None:
    k = 0
    for w in range(words.size):
        word = np.int64(words[w])
        while word != 0:
            low = word & -word
            out[k] = 32 * w + _BIT[((low * 0x077CB531) & _MASK) >> 27]
            k += 1
            word ^= low


def positions(words: Tensor) -> Tensor:
    unsigned = words.numpy().view(np.uint32)
    out = np.empty(_count_bits(unsigned), np.int64)
    _positions(unsigned, out)
    return torch.from_numpy(out)


@_kernel
def quantise(values: Array, items: Array, width: int, shift: int, codes: Array, up: Array, out: Array) -> None:
    for i in range(items.size):
        item = items[i]
        scale = up[codes[item >> shift]]
        if width == 1:
            out[i] = np.int32(np.rint(np.float64(values[item]) * scale))
        else:
            for c in range(width):
                out[i * width + c] = np.int32(np.rint(np.float64(values[item * width + c]) * scale))


@_kernel
def write_mean_(
    values: Array, items: Array, width: int, shift: int, codes: Array, down: Array, totals: Array, workers: float
) -> None:
    for i in range(items.size):
        item = items[i]
        scale = down[codes[item >> shift]]
        if width == 1:
            values[item] = np.float64(totals[i]) * scale / workers
        else:
            for c in range(width):
                values[item * width + c] = np.float64(totals[i * width + c]) * scale / workers


@_kernel
def checksum(totals: Array, items: Array, width: int, key: int) -> Any:
    plain, weighted = np.int64(0), np.int64(0)
    if width == 1:
        for i in range(items.size):
            value = np.int64(totals[i])
            plain += value
            weighted += value * ((items[i] * 0x9E3779B1 + key) & _MASK | 1)
        return plain & _MASK, weighted & _MASK
    for i in range(items.size):
        weight = items[i] * 0x9E3779B1 + key
        for c in range(width):
            value = np.int64(totals[i * width + c])
            plain += value
            weighted += value * ((weight + c * 0x85EBCA6B) & _MASK | 1)
    return plain & _MASK, weighted & _MASK


@_jit
def _mix(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


@_kernel
def _slots(items: Array, keys: Array, groups: int, lane_bits: int, slots: Array, signs: Array) -> None:
    lanes = 1 << lane_bits
    for i in range(items.size):
        block, lane = items[i] >> lane_bits, items[i] & (lanes - 1)
        for j in range(3):
            h = _mix((block * keys[j, 0] + keys[j, 1]) & _MASK)
            group = (h * groups) >> 32
            slots[i, j] = ((j * groups + group) << lane_bits) + ((lane + h) & (lanes - 1))
            signs[i, j] = 1 - 2 * ((h >> 11) & 1)


def slots(items: Tensor, keys: Tensor, groups: int, lane_bits: int) -> tuple[Tensor, Tensor]:
    found = torch.empty((items.numel(), 3), dtype=torch.int32)
    signs = torch.empty((items.numel(), 3), dtype=torch.int8)
    _slots(items, keys, groups, lane_bits, found, signs)
    return found, signs


@_kernel
def insert_(table: Array, slots: Array, signs: Array, values: Array, width: int) -> None:
    if width == 1:
        for i in range(slots.shape[0]):
            for j in range(3):
                table[slots[i, j]] += np.int32(signs[i, j] * values[i])
        return
    for i in range(slots.shape[0]):
        for j in range(3):
            at, sign = np.int64(slots[i, j]) * width, np.int64(signs[i, j])
            for c in range(width):
                table[at + c] = np.int32(table[at + c] + sign * values[i * width + c])


@_jit
def _peel(slots: Array, degree: Array, order: Array, source: Array, ends: Array) -> int:
    """`order` and `source` have room for one item too many, as does the list of those left: no branch to mispredict."""
    k = slots.shape[0]
    for i in range(k):
        for j in range(3):
            degree[slots[i, j]] += np.int32(1)
    alive = np.arange(k + 1).astype(np.int32)
    left, done, rounds = k, 0, 0
    while left and rounds < ends.size:
        found, kept = done, 0
        for a in range(left):
            i = alive[a]
            first, second = degree[slots[i, 0]] == 1, degree[slots[i, 1]] == 1
            free = int(first | second | (degree[slots[i, 2]] == 1))
            order[found], source[found], alive[kept] = i, (1 - first) * (2 - second), i
            found += free
            kept += 1 - free
        if found == done:
            break
        for f in range(done, found):
            i = order[f]
            for j in range(3):
                degree[slots[i, j]] -= np.int32(1)
        done, left = found, kept
        ends[rounds] = done
        rounds += 1
    return rounds


def peel(slots: Tensor, counters: int, max_rounds: int) -> tuple[Tensor, Tensor, list[int]]:
    k = slots.shape[0]
    order, source = np.empty(k + 1, np.int32), np.empty(k + 1, np.int8)
    ends = np.empty(max_rounds, np.int64)
    rounds = int(_peel(slots.numpy(), np.zeros(counters, np.int32), order, source, ends))
    boundaries = [int(e) for e in ends[:rounds]]
    done = boundaries[-1] if boundaries else 0
    return torch.from_numpy(order[:done]), torch.from_numpy(source[:done]), boundaries


@_kernel
def extract(table: Array, slots: Array, signs: Array, order: Array, source: Array, width: int, out: Array) -> None:
    if width == 1:
        for f in range(order.size):
            i = order[f]
            value = np.int32(signs[i, source[f]] * table[slots[i, source[f]]])
            out[i] = value
            for j in range(3):
                table[slots[i, j]] -= np.int32(signs[i, j] * value)
        return
    for f in range(order.size):
        i = order[f]
        j = source[f]
        at, sign = np.int64(slots[i, j]) * width, np.int64(signs[i, j])
        for c in range(width):
            out[i * width + c] = np.int32(sign * table[at + c])
        for other in range(3):
            at, sign = np.int64(slots[i, other]) * width, np.int64(signs[i, other])
            for c in range(width):
                table[at + c] = np.int32(table[at + c] - sign * out[i * width + c])


def rows_not_zero(values: Tensor, width: int) -> Tensor:
    """int64, ascending: the rows of float32 `values` with an element that is not zero."""
    array = values.numpy()
    if width == 1:
        return torch.from_numpy(np.flatnonzero(array))
    marks = np.empty(array.size // width, np.bool_)
    _nonzero_rows(array.view(np.int32), width, marks)
    return torch.from_numpy(np.flatnonzero(marks))


@_jit
def _add_rows(table: Array, items: Array, values: Array, width: int, workers: Any) -> None:
    for i in range(items.size):
        at = items[i] * width
        for c in range(width):
            table[at + c] += values[i * width + c] / workers


def add_rows_(table: Tensor, items: Tensor, values: Tensor, width: int, workers: int) -> None:
    array = table.numpy()
    _add_rows(array, items.numpy(), values.numpy(), width, array.dtype.type(workers))
