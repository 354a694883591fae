"""Whatever goes wrong, every rank ends with the same mean, and counts it alike; never with a wrong gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamix.compression import ExchangeSettings, Layout, LocalWire
from tests.compression.local import exchange, reference

LAYOUT = Layout.of([(6000, 1), (64, 16)])
WORKERS = 3
ENCODED = ["compaction", "lhc", "lhc-one-phase"]


def _inputs(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (WORKERS, LAYOUT.elements)
    return list(torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.08))


def _assert_dense(results: list[Tensor], inputs: list[Tensor]) -> None:
    want = torch.stack([x / WORKERS for x in inputs]).sum(0)
    for result in results:
        torch.testing.assert_close(result, want, rtol=1e-6, atol=1e-7, equal_nan=True)
        assert torch.equal(result.nan_to_num(7.0), results[0].nan_to_num(7.0))


@pytest.mark.parametrize("way", ["fixed", *ENCODED])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_gradient_that_is_not_finite_reaches_all_ranks(way: str, bad: float) -> None:
    inputs = _inputs()
    inputs[1][4321] = bad
    results, statistics = exchange(inputs, way, LAYOUT, steps=2)
    assert all(s.dense_after == {"nonfinite": 2} for s in statistics)
    assert not torch.isfinite(results[2][4321])
    _assert_dense(results, inputs)


@pytest.mark.parametrize("way", ENCODED)
@pytest.mark.parametrize(
    "apart",
    [{"settings": lambda rank: ExchangeSettings(seed=int(rank == 2))}, {"step_of": lambda rank: int(rank == 0)}],
    ids=["another seed", "another step"],
)
def test_ranks_that_are_not_alike_go_densely(way: str, apart: dict[str, Any]) -> None:
    inputs = _inputs()
    results, statistics = exchange(inputs, way, LAYOUT, **apart)
    assert all(s.dense_after == {"mixed": 1} for s in statistics)
    _assert_dense(results, inputs)


def test_a_sketch_that_does_not_decode_goes_by_compaction_bit_for_bit() -> None:
    inputs = _inputs()
    results, statistics = exchange(inputs, "lhc", LAYOUT, settings=lambda rank: ExchangeSettings(ratio=0.8))
    assert all((s.undecoded, s.buckets, dict(s.dense_after)) == (1, {"compaction": 1}, {}) for s in statistics)
    assert all(torch.equal(result, reference(inputs, LAYOUT)) for result in results)


def test_compaction_after_an_undecoded_sketch_is_checked_too() -> None:
    wires: list[LocalWire] = LocalWire.make(WORKERS, timeout_s=20)
    wires[1] = Damaged(wires[1], "total", _flip)
    inputs = _inputs()
    results, statistics = exchange(
        inputs, "lhc", LAYOUT, wires=wires, settings=lambda rank: ExchangeSettings(ratio=0.8)
    )
    assert all((s.undecoded, s.buckets) == (1, {"dense": 1}) for s in statistics)
    assert all(sum(s.dense_after.values()) == 1 for s in statistics)
    _assert_dense(results, inputs)


def test_a_union_larger_than_predicted_goes_by_compaction_once() -> None:
    from dynamix.compression import BucketExchange, Statistics
    from tests.compression.local import in_threads

    def grow(rank: int, wire: LocalWire) -> Statistics:
        one, statistics = BucketExchange(LAYOUT), Statistics()
        for step, density in enumerate((0.01, 0.01, 0.3, 0.3, 0.3)):
            generator = torch.Generator().manual_seed(100 * step + rank)
            flat = torch.randn(LAYOUT.elements, generator=generator)
            flat *= torch.rand(LAYOUT.elements, generator=generator) < density
            one.reduce_(flat, "lhc-one-phase", wire, step=step, statistics=statistics)
        return statistics

    for statistics in in_threads(LocalWire.make(WORKERS, timeout_s=20), grow):
        assert (statistics.undecoded, dict(statistics.dense_after)) == (1, {})
        assert statistics.buckets == {"lhc-one-phase": 4, "compaction": 1}


class Damaged(LocalWire):
    """Damages what this rank receives in one of its collectives."""

    def __init__(self, wire: LocalWire, method: str, damage: Callable[[Tensor], None]) -> None:
        super().__init__(wire._shared, wire.rank)
        self._method, self._damage, self._left = method, damage, 1

    def total(self, values: Tensor) -> None:
        super().total(values)
        self._hit("total", values)

    def union(self, bits: Tensor, beside: Tensor | None = None) -> None:
        super().union(bits, beside)
        self._hit("union", bits)

    def _hit(self, method: str, values: Tensor) -> None:
        if method == self._method and self._left:
            self._left -= 1
            self._damage(values)


def _flip(values: Tensor) -> None:
    values[5] ^= 1


def _past_the_end(values: Tensor) -> None:
    if values.dtype == torch.uint8:
        values[6100 // 8] |= 1 << 6100 % 8  # of 6,000 elements in blocks of 512
    else:
        _flip(values)


def _swap(values: Tensor) -> None:
    values[[3, 4]] = values[[4, 3]]


def _wipe(values: Tensor) -> None:
    values.zero_()


def _double(values: Tensor) -> None:
    values *= 2


@pytest.mark.parametrize("way", ENCODED)
@pytest.mark.parametrize(
    ("method", "damage"), [("total", _flip), ("total", _swap), ("total", _double), ("union", _flip), ("union", _wipe)]
)
def test_one_rank_receives_something_else(way: str, method: str, damage: Callable[[Tensor], None]) -> None:
    wires: list[LocalWire] = LocalWire.make(WORKERS, timeout_s=20)
    wires[1] = Damaged(wires[1], method, damage)
    inputs = _inputs()
    results, statistics = exchange(inputs, way, LAYOUT, wires=wires)
    reasons = {frozenset(s.dense_after.items()) for s in statistics}
    assert len(reasons) == 1, "ranks must count the same"
    assert sum(statistics[0].dense_after.values()) == 1
    _assert_dense(results, inputs)


@pytest.mark.parametrize(("method", "damage"), [("total", _flip), ("union", _flip), ("union", _past_the_end)])
def test_everybody_receives_the_same_wrong_thing(method: str, damage: Callable[[Tensor], None]) -> None:
    """A broken operator, say a sum where an OR was asked for, damages all ranks alike."""
    wires = [Damaged(wire, method, damage) for wire in LocalWire.make(WORKERS, timeout_s=20)]
    inputs = _inputs()
    inputs[0][32 * 5] = 1.0
    for way in ("compaction", "lhc"):
        for wire in wires:
            wire._left = 1
        results, statistics = exchange(inputs, way, LAYOUT, wires=wires)
        if statistics[0].dense_after:
            _assert_dense(results, inputs)
        else:  # a bit too many in the union costs bytes, not correctness
            assert torch.equal(results[0], reference(inputs, LAYOUT))


def test_after_a_fault_the_next_step_is_compressed_again() -> None:
    wires: list[LocalWire] = LocalWire.make(WORKERS, timeout_s=20)
    wires[1] = Damaged(wires[1], "total", _flip)
    _, statistics = exchange(_inputs(), "compaction", LAYOUT, wires=wires, steps=4)
    assert all(s.buckets == {"dense": 1, "compaction": 3} for s in statistics)
