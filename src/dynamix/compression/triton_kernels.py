"""Triton kernels for CUDA: fixed point, bitmap, compaction and sketch. EXPERIMENTAL: no device has run them yet.

Each repeats, bit for bit, the torch function of its name (`fixed_point.scan` and so on); tests compare the two under
Triton's interpreter. They are taken only where `DYNAMIX_TRITON=1` is set, triton is installed and a tensor is on CUDA.
None of them waits for the device. The exchange around them does: it reads headers, counts and votes.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_installed = importlib.util.find_spec("triton") is not None
tl: Any = importlib.import_module("triton.language") if _installed else None
_jit: Callable[[Any], Any] = importlib.import_module("triton").jit if _installed else lambda function: function

BLOCK = 1024  # elements a program
_COLUMNS = 64  # of a row that are looked at at once
_ROUND = 6755399441055744.0  # 1.5 * 2^52: adding it and taking it away rounds to the nearest integer, halves to even


@_jit
def _scan(bits, codes, words, items, width, words_a_block, COLUMNS: tl.constexpr):
    """One block: its exponent code, and a bit for each of its items that is not zero."""
    block = tl.program_id(0)
    lanes = tl.arange(0, 32)
    top = tl.zeros((32,), tl.int32)
    for word in range(words_a_block):
        rows = (block.to(tl.int64) * words_a_block + word) * 32 + lanes
        seen = tl.zeros((32,), tl.int32)
        for first in range(0, width, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            there = (rows < items)[:, None] & (columns < width)[None, :]
            found = tl.load(bits + rows[:, None] * width + columns[None, :], mask=there, other=0)
            seen = tl.maximum(seen, tl.max(found & 0x7FFFFFFF, axis=1))
        top = tl.maximum(top, seen)
        packed = tl.sum((seen != 0).to(tl.int64) << lanes.to(tl.int64), axis=0)
        tl.store(words + block.to(tl.int64) * words_a_block + word, packed.to(tl.int32))
    largest = tl.max(top, axis=0)
    code = tl.where(largest == 0, 0, tl.maximum(largest >> 23, 1))
    tl.store(codes + block, code.to(tl.uint8))


def scan(values: Tensor, width: int, shift: int, codes: Tensor, words: Tensor) -> None:
    """Exponent codes and bitmap of one segment of float32 `values`."""
    if codes.numel():
        bits, items = values.view(torch.int32), values.numel() // width
        _scan[(codes.numel(),)](bits, codes, words, items, width, 1 << (shift - 5), COLUMNS=_COLUMNS)


@_jit
def _quantise(values, items, codes, up, out, total, width, shift, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < total
    item = tl.load(items + place // width, mask=there, other=0)
    code = tl.load(codes + (item >> shift), mask=there, other=0).to(tl.int64)
    scale = tl.load(up + code, mask=there, other=0.0)
    value = tl.load(values + item * width + place % width, mask=there, other=0.0).to(tl.float64)
    tl.store(out + place, ((value * scale + ROUND) - ROUND).to(tl.int32), mask=there)


def quantise(values: Tensor, items: Tensor, width: int, shift: int, codes: Tensor, up: Tensor, out: Tensor) -> None:
    """Integers of `items`, for compaction and sketches."""
    if out.numel():
        total = out.numel()
        _quantise[_programs(total)](values, items, codes, up, out, total, width, shift, ROUND=_ROUND, BLOCK=BLOCK)


@_jit
def _write_mean(values, items, codes, down, totals, total, width, shift, workers, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < total
    item = tl.load(items + place // width, mask=there, other=0)
    code = tl.load(codes + (item >> shift), mask=there, other=0).to(tl.int64)
    scale = tl.load(down + code, mask=there, other=0.0)
    mean = tl.load(totals + place, mask=there, other=0).to(tl.float64) * scale / tl.load(workers)
    tl.store(values + item * width + place % width, mean.to(values.dtype.element_ty), mask=there)


def write_mean_(
    values: Tensor, items: Tensor, width: int, shift: int, codes: Tensor, down: Tensor, totals: Tensor, workers: float
) -> None:
    """The mean over workers to `items` of float32 or float64 `values`."""
    total = totals.numel()
    if total:
        divisor = torch.full((1,), workers, dtype=torch.float64, device=values.device)  # as an argument: float32
        _write_mean[_programs(total)](values, items, codes, down, totals, total, width, shift, divisor, BLOCK=BLOCK)


@_jit
def _mixed(h):
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


@_jit
def _slots(items, keys, slots, signs, count, groups, lane_bits, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    item = tl.load(items + place, mask=there, other=0)
    block, lane = item >> lane_bits, item & ((1 << lane_bits) - 1)
    for j in range(3):
        h = _mixed((block * tl.load(keys + 2 * j) + tl.load(keys + 2 * j + 1)) & 0xFFFFFFFF)
        group = (h * groups) >> 32
        slot = ((j * groups + group) << lane_bits) + ((lane + h) & ((1 << lane_bits) - 1))
        tl.store(slots + 3 * place + j, slot.to(tl.int32), mask=there)
        tl.store(signs + 3 * place + j, (1 - 2 * ((h >> 11) & 1)).to(tl.int8), mask=there)


def slots(items: Tensor, keys: Tensor, groups: int, lane_bits: int) -> tuple[Tensor, Tensor]:
    """The three counters, int32 (k, 3), and signs, int8 (k, 3), of int64 `items` (k,)."""
    count = items.numel()
    found = torch.empty((count, 3), dtype=torch.int32, device=items.device)
    signs = torch.empty((count, 3), dtype=torch.int8, device=items.device)
    if count:
        _slots[_programs(count)](items, keys, found, signs, count, groups, lane_bits, BLOCK=BLOCK)
    return found, signs


@_jit
def _insert(table, slots, signs, values, total, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < total
    item, column = place // width, place % width
    value = tl.load(values + place, mask=there, other=0)
    for j in range(3):
        slot = tl.load(slots + 3 * item + j, mask=there, other=0).to(tl.int64)
        sign = tl.load(signs + 3 * item + j, mask=there, other=0).to(tl.int32)
        tl.atomic_add(table + slot * width + column, sign * value, mask=there)


def insert_(table: Tensor, slots: Tensor, signs: Tensor, values: Tensor, width: int) -> None:
    """Add int32 `values` (k * width,) to a sketch. Integers, so the order of additions does not matter."""
    total = values.numel()
    if total:
        _insert[_programs(total)](table, slots, signs, values, total, width, BLOCK=BLOCK)


def _programs(count: int) -> tuple[int]:
    return (-(-count // BLOCK),)
