"""Gathered means: exact sums in the order of ranks, the same on every rank, dense or sparse, flat or in two levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynamix.compression import Layout, LocalWire, Statistics, kernels
from dynamix.compression.gather import FLAT, Levels
from dynamix.compression.sparse import mean_of_sparse
from dynamix.errors import UsageError
from tests.compression.local import exchange, in_threads, ordered_mean, outcomes, sparse_inputs
from tests.ranks import refusal

LAYOUT = Layout.of([(700, 1), (40, 24), (3, 1)])


@given(
    way=st.sampled_from(["gather", "blocks"]),
    workers=st.sampled_from([1, 2, 3, 4, 8, 9]),
    density=st.floats(0, 0.2),
    seed=st.integers(0, 1 << 20),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    compiled=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_the_mean_is_the_sum_in_the_order_of_ranks(
    way: str, workers: int, density: float, seed: int, dtype: torch.dtype, compiled: bool
) -> None:
    inputs = sparse_inputs(workers, LAYOUT, density, seed, dtype)
    with pytest.MonkeyPatch.context() as patched:
        if not compiled:
            patched.setattr(kernels, "available", lambda: False)
        results, statistics = exchange(inputs, way, LAYOUT, steps=2)
    assert all(s.dense_after == statistics[0].dense_after for s in statistics)
    assert all(result.dtype == dtype and torch.equal(result, results[0]) for result in results)
    if not statistics[0].dense_after:
        wants = [ordered_mean(inputs)]  # in one level, or in blocks
        wants += [ordered_mean(inputs, Levels.of(workers).groups)] if way == "gather" and workers > FLAT else []
        assert any(torch.equal(results[0], want) for want in wants)


@pytest.mark.parametrize("way", ["gather", "blocks"])
@pytest.mark.parametrize(
    ("worth", "ring"), [([0, 9, 7, 8], True), ([0, 0, 0, 0], False), ([9, 1 << 30, 1 << 30, 7], False)]
)
def test_a_ring_is_taken_where_hops_are_cheap_and_changes_no_bit(way: str, worth: list[int], ring: bool) -> None:
    inputs, wires, passed = sparse_inputs(4, LAYOUT, 0.01, 1), LocalWire.make(4, timeout_s=20), list[int]()
    for wire, hop_bytes in zip(wires, worth, strict=True):
        wire.measured = hop_bytes

        def pass_on(part: Tensor, sizes: Sequence[int], wire: LocalWire = wire) -> list[Tensor]:
            passed.append(wire.rank)
            return LocalWire.pass_on(wire, part, sizes)

        wire.pass_on = pass_on  # type: ignore[method-assign]
    results, _ = exchange(inputs, way, LAYOUT, wires=wires)
    assert all(torch.equal(result, ordered_mean(inputs)) for result in results)
    assert sorted(passed) == ([0, 1, 2, 3] if ring else [])


@pytest.mark.parametrize("workers", [9, 10, 13, 16, 17])
def test_above_eight_ranks_it_goes_in_two_levels_and_stays_there_while_rows_are_shared(workers: int) -> None:
    one = sparse_inputs(1, LAYOUT, 0.005, 1)[0]
    inputs = [one * (rank + 1) / 7 for rank in range(workers)]  # the same rows on all
    results, statistics = exchange(inputs, "gather", LAYOUT, steps=3)
    assert statistics[0].buckets == {"gather": 3}
    assert all(torch.equal(result, ordered_mean(inputs, Levels.of(workers).groups)) for result in results)


def test_two_levels_send_less_where_rows_are_shared() -> None:
    one = torch.zeros(20_000)
    one[::100] = 1.0
    _, statistics = exchange([one] * 16, "gather", Layout.of([(20_000, 1)]))
    sent = statistics[0].payload_bytes * 30 / 16
    assert sent < 0.5 * 15 * 200 * 8, "in one level each of 15 ranks would get 200 indices and values"


def test_a_union_of_different_rows_goes_in_one_level_from_the_second_step_on() -> None:
    inputs = [torch.zeros(LAYOUT.elements) for _ in range(12)]
    for rank, flat in enumerate(inputs):
        flat[rank * 50 : rank * 50 + 10] = 0.1 * (rank + 1)
    results, _ = exchange(inputs, "gather", LAYOUT, steps=2)
    assert all(torch.equal(result, ordered_mean(inputs)) for result in results)


@pytest.mark.parametrize("way", ["gather", "blocks"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_all_ranks_without_a_dense_exchange(way: str, bad: float) -> None:
    inputs = sparse_inputs(3, LAYOUT, 0.01, 4)
    inputs[1][[5, 800]] = bad
    results, statistics = exchange(inputs, way, LAYOUT)
    assert statistics[0].buckets == {way: 1}
    assert all(not torch.isfinite(result[[5, 800]]).any() for result in results)
    assert all(torch.equal(r.nan_to_num(7.0), ordered_mean(inputs).nan_to_num(7.0)) for r in results)


@pytest.mark.parametrize("way", ["gather", "blocks"])
def test_a_gradient_without_zeros_goes_dense_as_that_sends_less(way: str) -> None:
    inputs = sparse_inputs(4, LAYOUT, 1.1, 1)
    results, statistics = exchange(inputs, way, LAYOUT)
    assert all(s.dense_after == {"full": 1} for s in statistics)
    torch.testing.assert_close(results[0], torch.stack(inputs).mean(0), rtol=1e-6, atol=1e-7)


class Damaged(LocalWire):
    """Flips a bit in the `at`-th long message that this rank receives, lets two words of it change places, or flips a
    bit of a header.
    """

    def __init__(self, wire: LocalWire, how: str, at: int) -> None:
        super().__init__(wire._shared, wire.rank)
        self.how, self.at = how, at

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        found = [message.clone() for message in super().swap(parts, sizes)]  # others hold the same
        longest = found[sizes.index(max(sizes))]
        if max(sizes) <= 40 and self.how == "header":
            longest[17] ^= 4
        elif max(sizes) > 40 and self.how != "header":
            self.at -= 1
            if self.at == -1 and self.how == "bit":
                longest[17] ^= 4
            elif self.at == -1:
                words = longest.view(torch.int64)
                words[[-3, -2]] = words[[-2, -3]]
        return found


@pytest.mark.parametrize(
    ("way", "how", "at"),
    [
        ("gather", "bit", 0),
        ("gather", "words", 0),
        ("gather", "header", 0),
        ("blocks", "bit", 0),
        ("blocks", "bit", 1),
        ("blocks", "bit", 2),
    ],
)
def test_a_damaged_message_ends_the_job_and_is_not_applied(way: str, how: str, at: int) -> None:
    wires: list[LocalWire] = LocalWire.make(3, timeout_s=2)
    wires[1], inputs = Damaged(wires[1], how, at), sparse_inputs(3, LAYOUT, 0.05 if way == "blocks" else 0.01, 1)

    found = outcomes(wires, inputs, way, LAYOUT, ordered_mean(inputs))
    assert "damaged" in found[1][0]
    assert all(untouched_or_right for _, untouched_or_right in found)


# sparse tensors


def _sparse(rank: int, seed: int, rows: int = 50, width: tuple[int, ...] = (4,)) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    count = 0 if (seed + rank) % 3 == 0 else int(torch.randint(0, 12, (), generator=generator))
    index = torch.randint(0, rows, (1, count), generator=generator)  # some twice
    values = torch.randn((count, *width), generator=generator)
    return torch.sparse_coo_tensor(index, values, (rows, *width), check_invariants=True)


@given(workers=st.sampled_from([1, 2, 3, 5, 9]), seed=st.integers(0, 1000), tables=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_sparse_gradients_of_a_pass_are_gathered_together(workers: int, seed: int, tables: int) -> None:
    def gradients(rank: int) -> list[Tensor]:
        return [_sparse(rank, seed + 7 * table, width=((4,), (), (2, 3))[table % 3]) for table in range(tables)]

    def reduce(rank: int, wire: Any) -> list[Tensor]:
        return mean_of_sparse(gradients(rank), wire, statistics=Statistics())

    found = in_threads(LocalWire.make(workers, timeout_s=20), reduce)
    for table in range(tables):
        dense = [gradients(rank)[table].to_dense() for rank in range(workers)]
        wants = [ordered_mean(dense)]  # in one level, or in blocks
        wants += [ordered_mean(dense, Levels.of(workers).groups)] if workers > FLAT else []
        touched = torch.cat([gradients(rank)[table].coalesce().indices()[0] for rank in range(workers)]).unique()
        for means in found:
            assert means[table].is_coalesced()
            assert torch.equal(means[table].to_dense(), found[0][table].to_dense())
            assert any(torch.equal(means[table].to_dense(), want) for want in wants)
            assert torch.equal(means[table].indices()[0], touched)


def test_two_sparse_dimensions() -> None:
    def reduce(rank: int, wire: Any) -> Tensor:
        index = torch.tensor([[0, 2], [rank, 4]])
        gradient = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0]), (3, 5), check_invariants=True)
        return mean_of_sparse([gradient], wire, statistics=Statistics())[0]

    first, second = in_threads(LocalWire.make(2, timeout_s=20), reduce)
    assert torch.equal(first.to_dense(), second.to_dense())
    assert first.to_dense()[2, 4] == 2.0
    assert first.to_dense()[0, :2].tolist() == [0.5, 0.5]


def test_ranks_with_different_tables_are_refused_all_of_them() -> None:
    def reduce(rank: int, wire: Any) -> str:
        return refusal(UsageError, mean_of_sparse, [_sparse(rank, 1, rows=50 + rank)], wire, statistics=Statistics())

    assert all("train one model" in said for said in in_threads(LocalWire.make(2, timeout_s=20), reduce))
