"""One suite for every wire: threads, and gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dynamix.compression import GroupWire, LocalWire
from dynamix.compression.link_speed import LinkSpeed
from tests.compression.local import in_threads
from tests.ranks import run_ranks

WORKERS = 3


def use(rank: int, wire: Any) -> dict[str, Tensor]:
    found = {}
    values = torch.tensor([rank, 200 - rank], dtype=torch.uint8)
    wire.maximum(values)
    found["maximum"] = values
    for n in (0, 1, 13, 64, 1001):
        bits = (torch.arange(n) * 37 + rank * 11).to(torch.uint8)
        wire.union(bits)
        found[f"union{n}"] = bits
    bits, beside = torch.tensor([1 << rank], dtype=torch.uint8), torch.tensor([2**31 - 1, rank], dtype=torch.int32)
    wire.union(bits, beside=beside)
    found["union"], found["beside"] = bits, beside
    total = torch.tensor([2**30 + rank, -(2**31)], dtype=torch.int32)
    wire.total(total)
    found["total"] = total
    mean = torch.tensor([float(rank), float("inf")])
    wire.mean(mean)
    found["mean"] = mean
    return found


def _of(rank: int, size: int) -> Tensor:
    return (torch.arange(size) * 7 + rank).to(torch.uint8)


def _passed_on(rank: int, wire: Any) -> None:
    for sizes in ([8, 24, 16], [0, 8, 0], [0, 0, 8192]):
        came = wire.pass_on(_of(rank, sizes[rank]), sizes)
        assert [one.tolist() for one in came] == [_of(j, size).tolist() for j, size in enumerate(sizes)]


def _on_gloo(rank: int) -> dict[str, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    wire = GroupWire(group)
    assert wire.hop_bytes == 0, "nothing is measured yet"
    _passed_on(rank, wire)
    wire.speed = LinkSpeed()
    for seconds in (1e-4, 5e-4):
        wire.speed.note(24, hops=1, seconds=seconds)
    wire.speed.note(1_000_000, hops=1, seconds=0.1001)
    assert wire.hop_bytes == pytest.approx(1000, abs=2)
    return use(rank, GroupWire(group))


def check(found: dict[str, Tensor]) -> None:
    assert found["maximum"].tolist() == [2, 200]
    for n in (0, 1, 13, 64, 1001):
        want = torch.zeros(n, dtype=torch.uint8)
        for rank in range(WORKERS):
            want |= (torch.arange(n) * 37 + rank * 11).to(torch.uint8)
        assert torch.equal(found[f"union{n}"], want)
    assert found["union"].tolist() == [7]
    wrap = lambda v: (v + 2**31) % 2**32 - 2**31  # noqa: E731
    assert found["beside"].tolist() == [wrap(3 * (2**31 - 1)), 3]
    assert found["total"].tolist() == [wrap(3 * 2**30 + 3), wrap(-3 * 2**31)]
    assert found["mean"].tolist() == [1.0, float("inf")]


def test_threads() -> None:
    for found in in_threads(LocalWire.make(WORKERS), use):
        check(found)


@pytest.mark.multiproc
def test_gloo() -> None:
    for found in run_ranks(_on_gloo, WORKERS):
        check(found)


def test_ranks_that_bring_different_sizes_end_with_an_error() -> None:
    def differ(rank: int, wire: LocalWire) -> str:
        try:
            wire.total(torch.zeros(rank + 1, dtype=torch.int32))
        except RuntimeError as error:
            return type(error).__name__
        return "went through"

    found = in_threads(LocalWire.make(2, timeout_s=5), differ)
    assert sorted(found) == ["BrokenBarrierError", "RuntimeError"]
