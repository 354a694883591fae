"""Ranks as threads of this process, and the integer reference their exchange must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.compression import BucketExchange, ExchangeSettings, Layout, LocalWire, Statistics
from dynamix.errors import DynamixError


def sparse_inputs(
    workers: int, layout: Layout, density: float, seed: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (workers, layout.elements)
    keep = torch.rand(shape, generator=generator) < density
    keep[seed % workers] &= bool(seed % 3)  # a rank that brings nothing
    return list((torch.randn(shape, generator=generator) * keep).to(dtype))


def ordered_mean(inputs: Sequence[Tensor], groups: Sequence[range] | None = None) -> Tensor:
    """x / W, added in the order of ranks; first within groups, where there are some."""
    wide = [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in inputs]
    sums = []
    for group in groups or [range(len(inputs))]:
        total = torch.zeros_like(wide[0])
        for rank in group:
            total = total + wide[rank] / len(inputs)
        sums.append(total)
    total = torch.zeros_like(wide[0])
    for one in sums:
        total = total + one
    return (sums[0] if len(sums) == 1 else total).to(inputs[0].dtype)


def in_threads(wires: Sequence[Any], function: Callable[[int, Any], Any]) -> list[Any]:
    """`function(rank, wire)` on each rank."""
    if len(wires) == 1:
        return [function(0, wires[0])]
    with ThreadPoolExecutor(len(wires)) as pool:
        return [f.result() for f in [pool.submit(function, rank, wire) for rank, wire in enumerate(wires)]]


def outcomes(
    wires: Sequence[Any], inputs: Sequence[Tensor], way: str, layout: Layout, want: Tensor
) -> list[tuple[str, bool]]:
    """One exchange, by rank: the error it ended with, and whether the gradient is untouched then, or else `want`."""

    def rank_of(rank: int, wire: Any) -> tuple[str, bool]:
        flat = inputs[rank].clone()
        try:
            BucketExchange(layout).reduce_(flat, way, wire, step=0, statistics=Statistics())  # type: ignore[arg-type]
        except (DynamixError, RuntimeError) as error:
            return str(error), torch.equal(flat, inputs[rank])
        return "", torch.equal(flat, want)

    return in_threads(wires, rank_of)


def exchange(
    inputs: Sequence[Tensor],
    way: str,
    layout: Layout,
    *,
    steps: int = 1,
    wires: Sequence[Any] | None = None,
    settings: Callable[[int], ExchangeSettings] | None = None,
    step_of: Callable[[int], int] | None = None,
) -> tuple[list[Tensor], list[Statistics]]:
    """The same inputs through `way` for some steps; each rank's last result and its statistics."""

    def rank_of(rank: int, wire: Any) -> tuple[Tensor, Statistics]:
        one = BucketExchange(layout, settings=settings(rank) if settings else ExchangeSettings())
        statistics, flat = Statistics(), inputs[rank]
        for step in range(steps):
            flat = inputs[rank].clone()
            number = step if step_of is None else step + step_of(rank)
            one.reduce_(flat, way, wire, step=number, statistics=statistics)  # type: ignore[arg-type]
        return flat, statistics

    found = in_threads(wires or LocalWire.make(len(inputs), timeout_s=20), rank_of)
    return [flat for flat, _ in found], [statistics for _, statistics in found]


def reference(inputs: Sequence[Tensor], layout: Layout) -> Tensor:
    """The mean by Python's big integers' rules: quantise with the block's exponent over ranks, sum exactly, divide."""
    workers = len(inputs)
    s = 30 - int(np.ceil(np.log2(workers)))
    stack = np.stack([x.double().numpy() for x in inputs])
    out = np.zeros(stack.shape[1])
    for segment in layout.segments:
        size = segment.width << segment.shift
        for low in range(segment.start, segment.stop, size):
            block = stack[:, low : min(low + size, segment.stop)]
            top = np.abs(block).max()
            if top == 0:
                continue
            exponent = max(int(np.frexp(top)[1]), -125)
            integers = np.rint(np.ldexp(block, s - exponent)).astype(np.int64).sum(0)
            assert np.abs(integers).max() < 2**31
            out[low : low + block.shape[1]] = np.ldexp(integers.astype(np.float64), exponent - s) / workers
    mean = torch.from_numpy(out)
    dtype = inputs[0].dtype
    return mean if dtype == torch.float64 else mean.float().to(dtype)
