"""Rounded gradients: every element of the mean is within the bound, and what cannot be is reduced densely. LOSSY."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamix
from dynamix.compression import LocalWire
from dynamix.compression.bounded import bounded_mean_
from dynamix.compression.lossy import BoundedState, bounded_hook
from dynamix.errors import ConfigError
from tests.compression.local import in_threads
from tests.ranks import run_ranks


@given(
    workers=st.integers(1, 5),
    n=st.integers(0, 90),
    seed=st.integers(0, 1 << 20),
    bound=st.sampled_from([0.5, 0.1, 0.01, 1e-3, 1e-4, 3e-5]),
    exponent=st.integers(-120, 100),
    relative=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=150, deadline=None)
def test_every_element_of_the_mean_is_within_the_bound(
    workers: int, n: int, seed: int, bound: float, exponent: int, relative: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(workers, n, generator=generator, dtype=torch.float64) * 2.0**exponent
    wide *= torch.rand(workers, n, generator=generator) < 0.7
    inputs = [one.to(dtype) for one in wide]
    largest = max((float(x.double().abs().max()) for x in inputs if n), default=0.0)
    limit = bound * largest
    results = [x.clone() for x in inputs]

    def reduce(rank: int, wire: Any) -> bool:
        return bounded_mean_(results[rank], wire, bound if relative else limit or 1.0, relative=relative)

    done = in_threads(LocalWire.make(workers, timeout_s=20), reduce)
    assert done == [done[0]] * workers
    if not done[0]:
        assert bound < 1e-4
        assert all(torch.equal(one, other) for one, other in zip(results, inputs, strict=True))
        return
    mean = torch.stack([x.double() for x in inputs]).mean(0)
    limits = torch.finfo(dtype)
    rounding = limits.eps * mean.abs() + limits.tiny * limits.eps
    for result in results:
        assert torch.equal(result, results[0])
        assert bool(((result.double() - mean).abs() <= limit * (1 + 1e-9) + limit * limits.eps + rounding).all())


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_left_alone_on_every_rank(bad: float) -> None:
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([bad, 0.0])]

    def reduce(rank: int, wire: Any) -> bool:
        return bounded_mean_(inputs[rank], wire, 0.01)

    assert in_threads(LocalWire.make(2, timeout_s=20), reduce) == [False, False]
    assert inputs[0].tolist() == [1.0, 2.0]


def test_a_thirtieth_takes_a_quarter_of_the_bytes() -> None:
    def reduce(rank: int, wire: Any) -> int:
        bounded_mean_(torch.randn(40_000), wire, 0.03)
        return int(wire.payload_bytes)

    sent = in_threads(LocalWire.make(2, timeout_s=20), reduce)
    assert max(sent) < 0.3 * 4 * 40_000


@pytest.mark.parametrize(("bound", "relative"), [(0.0, True), (1.0, True), (-1.0, False), (float("inf"), False)])
def test_a_bound_is_above_zero(bound: float, relative: bool) -> None:
    with pytest.raises(ConfigError, match="bound="):
        BoundedState(bound, relative=relative)


def _gradients(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    model, state = DDP(net, bucket_cap_mb=0.001), BoundedState(0.01)
    model.register_comm_hook(state, dynamix.weighted(bounded_hook, count=lambda: (1 + 2 * rank, 4)))
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(7))
    own = x[:1] if rank == 0 else x[1:]
    found: list[Tensor] = []
    for _ in range(3):
        net.zero_grad()
        model(own).square().mean().backward()
        found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(x).square().mean().backward()
    exact = [p.grad for p in net.parameters() if p.grad is not None]
    return {"found": found, "exact": exact, "dense": state.dense}


@pytest.mark.multiproc
def test_unequal_batches_in_several_buckets_over_gloo() -> None:
    one, other = run_ranks(_gradients, 2)
    assert one["dense"] == 0
    for a, b, exact in zip(one["found"], other["found"], one["exact"], strict=True):
        assert torch.equal(a, b)
        assert float((a - exact).abs().max()) < 0.05
        assert not torch.equal(a, exact)
