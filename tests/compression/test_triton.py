"""Triton's kernels give the bits of the torch reference; run by Triton's interpreter, on the CPU."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamix.compression import Layout, fixed_point, kernels, sketch
from dynamix.compression.fixed_point import Scales
from dynamix.compression.sketch import Hashing

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install triton", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from dynamix.compression import triton_kernels

pytestmark = [
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="TRITON_INTERPRET is not 1"),
    pytest.mark.filterwarnings("ignore"),  # the interpreter's, about NumPy
]
LAYOUTS = [Layout.of([(700, 1)]), Layout.of([(45, 24)]), Layout.of([(9, 130)]), Layout.of([(3, 1)])]


def _as(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: Any = triton_kernels if kind == "triton" else None
    for module in (fixed_point, sketch):
        monkeypatch.setattr(module, "fast_for", lambda _: chosen)


def _both(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[Any, Any]:
    found = []
    for kind in ("torch", "triton"):
        _as(kind, monkeypatch)
        found.append(run())
    return found[0], found[1]


def _values(layout: Layout, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.elements, generator=generator, dtype=torch.float64)
    values *= torch.exp2(torch.randint(-140, 120, values.shape, generator=generator).double())
    values *= torch.rand(values.shape, generator=generator) < 0.1
    return values.to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.segments[0].width))
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -0.0, 1e-45])
def test_exponents_and_bitmap(layout: Layout, bad: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    values = _values(layout)
    if bad is not None:
        values[1] = bad
    one, other = _both(monkeypatch, lambda: fixed_point.scan(values, layout))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.segments[0].width))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_integers_and_the_way_back(layout: Layout, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values, (s,), scales = _values(layout, 1, dtype), layout.segments, Scales.of(3)
    codes, _ = fixed_point.scan(values.float(), layout)
    items = values.view(s.items, s.width).any(1).nonzero().squeeze(1)

    def run() -> tuple[Tensor, Tensor]:
        out = torch.empty(items.numel() * s.width, dtype=torch.int32)
        fixed_point.quantise(values, s, items, codes, scales, out)
        back = values.clone()
        fixed_point.write_mean_(back, s, items, codes, scales, out)
        return out, back

    one, other = _both(monkeypatch, run)
    assert one[0].any() or not items.numel()
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(("lanes", "width"), [(1, 1), (64, 1), (1, 5)])
def test_sketches(lanes: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    items = torch.arange(0, 4000, 3)
    hashing = Hashing.of(items.numel(), 7, lanes=lanes)
    values = torch.randint(-(2**31), 2**31 - 1, (items.numel() * width,), dtype=torch.int64).to(torch.int32)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        where, signs = sketch.slots(items, hashing)
        table = torch.zeros(hashing.counters * width, dtype=torch.int32)
        sketch.insert_(table, where, signs, values, width)
        return where, signs, table

    for one, other in zip(*_both(monkeypatch, run), strict=True):
        assert torch.equal(one, other)


def test_nothing_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, layout = torch.empty(0, dtype=torch.int64), LAYOUTS[0]
    _as("triton", monkeypatch)
    where, _ = sketch.slots(empty, Hashing.of(0, 1))
    assert where.shape == (0, 3)
    out = torch.empty(0, dtype=torch.int32)
    codes = torch.zeros(layout.blocks, dtype=torch.uint8)
    fixed_point.quantise(torch.zeros(700), layout.segments[0], empty, codes, Scales.of(2), out)


def test_taken_only_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.TRITON, "1")
    assert kernels.fast_for(torch.zeros(1)) is not triton_kernels
