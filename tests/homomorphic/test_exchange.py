"""What is decoded equals the exact integer sum of the quantised inputs, whatever the way, the ranks and the
gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynamix.compression import Layout, kernels
from dynamix.compression.bucket import BucketExchange
from dynamix.compression.checks import Statistics
from dynamix.compression.wire import LocalWire
from dynamix.errors import ConfigError
from tests.compression.local import exchange, reference

LOSSLESS = ["fixed", "compaction", "lhc", "lhc-one-phase"]  # in fixed point
CLOSE = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float64: 1e-7}
KINDS = ("random", "cancelling", "zero", "one", "all", "strided", "clustered", "tiny", "wide")


def _inputs(kind: str, workers: int, n: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rank in range(workers):
        x = torch.randn(n, generator=generator, dtype=torch.float64)
        keep = torch.rand(n, generator=generator) < 0.1
        if kind == "cancelling":
            x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            keep = torch.rand(n, generator=torch.Generator().manual_seed(seed + 1)) < 0.2
            x *= -1 if rank % 2 else 1
        elif kind in ("zero", "one"):
            keep = torch.zeros(n, dtype=torch.bool)
            keep[seed % n] = kind == "one" and rank == seed % workers
        elif kind == "all":
            keep = torch.ones(n, dtype=torch.bool)
        elif kind == "strided":
            keep = (torch.arange(n) % 64) == 7
        elif kind == "clustered":
            keep = (torch.arange(n) // 100) % 9 == 0
        elif kind == "tiny":
            x *= 1e-44
        elif kind == "wide":
            x *= torch.exp2(torch.randint(-120, 120, (n,), generator=generator).double())
        found.append(torch.where(keep, x, 0.0).to(dtype))
    return found


@given(
    kind=st.sampled_from(KINDS),
    workers=st.sampled_from([1, 2, 3, 4, 4, 17]),
    n=st.integers(1, 5000),
    rows=st.integers(0, 40),
    seed=st.integers(0, 1 << 20),
    way=st.sampled_from(LOSSLESS),
    dtype=st.sampled_from([torch.float32, torch.float32, *CLOSE]),
    compiled=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_decoded_mean_is_the_exact_integer_sum(
    kind: str, workers: int, n: int, rows: int, seed: int, way: str, dtype: torch.dtype, compiled: bool
) -> None:
    assume(dtype not in CLOSE or kind not in ("tiny", "wide"))
    layout = Layout.of([(n, 1), (rows, 24), (3, 1)])
    inputs = _inputs(kind, workers, layout.elements, seed, dtype)
    with pytest.MonkeyPatch.context() as patched:
        if not compiled:
            patched.setattr(kernels, "available", lambda: False)
        results, statistics = exchange(inputs, way, layout, steps=2)
    assert all(result.dtype == dtype and torch.equal(result, results[0]) for result in results)
    assert not statistics[0].dense_after
    assert torch.equal(results[0], reference(inputs, layout))
    if close := CLOSE.get(dtype):
        mean = torch.stack(inputs).double().mean(0)
        torch.testing.assert_close(results[0].double(), mean, rtol=close, atol=close)


@pytest.mark.parametrize(("way", "width", "most"), [("compaction", 1, 1.2), ("lhc", 1, 1.6), ("compaction", 16, 1.2)])
def test_bytes_stay_near_the_entropy_of_the_index_and_the_values(way: str, width: int, most: float) -> None:
    items, density = (1 << 18) // width, 0.05
    values = torch.zeros(items, width)
    values[torch.randperm(items)[: round(density * items)]] = 1.0
    bucket, wire, statistics = BucketExchange(Layout.of([(items, width)])), LocalWire.make(1)[0], Statistics()
    before = 0
    for step in range(3):  # the first ones learn the index's depth and the union's size
        before = wire.payload_bytes
        bucket.reduce_(values.view(-1).clone(), way, wire, step=step, statistics=statistics)
    entropy = -sum(p * math.log2(p) for p in (density, 1 - density))
    assert not statistics.dense_after
    assert wire.payload_bytes - before < most * items * (entropy + 32 * density * width) / 8


def test_wrong_arguments_are_named() -> None:
    layout = Layout.of([(8, 1)])
    with pytest.raises(ConfigError, match="way='zip'"):
        exchange([torch.zeros(8)], "zip", layout)
    with pytest.raises(ConfigError, match="8 elements"):
        exchange([torch.zeros(9)], "fixed", layout)
