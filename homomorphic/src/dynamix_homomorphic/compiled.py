"""numba kernels for the CPU. Each equals, bit for bit, the torch function of its name: `fixed_point.scan` and so on.

All arithmetic is in int64, masked to 32 bits, because numba converts a mix of signed and unsigned 64-bit integers to
floats.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.compression.compiled import MAGNITUDE, MASK, Array, F, jit, nonzero_rows

_PIECE = 1 << 17  # elements; a multiple of the block size


def _kernel(function: F) -> Callable[..., Any]:
    """`function` compiled, and callable with tensors as its arrays."""
    compiled = jit(function)
    return lambda *arguments: compiled(*(a.numpy() if isinstance(a, Tensor) else a for a in arguments))


@jit
def _codes(bits: Array, block: int, codes: Array) -> None:
    for b in range(codes.size):
        row = bits[b * block : (b + 1) * block]
        top = np.int32(0)
        for i in range(row.size):
            magnitude = np.int32(row[i] & MAGNITUDE)
            top = max(top, magnitude)  # compared as integers, NaN and infinity are the largest
        codes[b] = 0 if top == 0 else max(top >> 23, 1)


def scan(values: Tensor, width: int, shift: int, codes: Tensor, words: Tensor) -> None:
    """Exponent codes and bitmap of one segment of float32 `values`."""
    bits = values.view(torch.int32).numpy()
    out = words.numpy().view(np.uint8)
    if width == 1:
        _scan_elements(values.numpy(), bits, 1 << shift, codes.numpy(), out)
        return
    _codes(bits, width << shift, codes.numpy())
    marks = np.empty(bits.size // width, np.bool_)
    nonzero_rows(bits, width, marks)
    packed = np.packbits(marks, bitorder="little")
    out[: packed.size] = packed
    out[packed.size :] = 0


def _scan_elements(values: Array, bits: Array, block: int, codes: Array, out: Array) -> None:
    """Works in pieces that fit the cache. For the bitmap numpy's own loops are the fastest."""
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
            weighted += value * ((items[i] * 0x9E3779B1 + key) & MASK | 1)
        return plain & MASK, weighted & MASK
    for i in range(items.size):
        weight = items[i] * 0x9E3779B1 + key
        for c in range(width):
            value = np.int64(totals[i * width + c])
            plain += value
            weighted += value * ((weight + c * 0x85EBCA6B) & MASK | 1)
    return plain & MASK, weighted & MASK


@jit
def _mix(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


@_kernel
def _slots(items: Array, keys: Array, table: int, slots: Array, signs: Array) -> None:
    for i in range(items.size):
        for j in range(3):
            h = _mix((items[i] * keys[j, 0] + keys[j, 1]) & MASK)
            slots[i, j] = j * table + ((h * table) >> 32)
            signs[i, j] = 1 - 2 * ((h >> 11) & 1)


def slots(items: Tensor, keys: Tensor, table: int) -> tuple[Tensor, Tensor]:
    found = torch.empty((items.numel(), 3), dtype=torch.int32)
    signs = torch.empty((items.numel(), 3), dtype=torch.int8)
    _slots(items, keys, table, found, signs)
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


@jit
def _peel(slots: Array, degree: Array, order: Array, source: Array, ends: Array) -> int:
    """`order`, `source` and `alive` have room for one extra item, so that writing needs no branch to mispredict."""
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
