"""Blocks: the union's values, added up in shares; fewer bytes than a gather where rows are shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynamix.compression import BucketExchange, Layout, LocalWire, Statistics
from dynamix.compression.rows import Index, read_items
from dynamix.compression.rows_exchange import RowsExchange
from dynamix.compression.sparse import mean_of_sparse
from dynamix.errors import DynamixError
from tests.compression.local import exchange, in_threads, ordered_mean, sparse_inputs

LAYOUT = Layout.of([(700, 1), (40, 24), (3, 1)])


def test_shared_rows_take_fewer_bytes_than_a_gather() -> None:
    one = torch.zeros(1000, 32)
    one[::10] = 1.5
    inputs, layout = [one.view(-1) * (rank + 1) for rank in range(8)], Layout.of([(1000, 32)])
    sent = {way: exchange(inputs, way, layout)[1][0].payload_bytes for way in ("gather", "blocks")}
    assert sent["blocks"] < 0.35 * sent["gather"], "7 times the rows, or 14/8 of them"


def test_a_rank_that_gathers_meets_one_with_blocks_and_all_go_dense() -> None:
    inputs = sparse_inputs(3, LAYOUT, 0.05, 5)

    def rank_of(rank: int, wire: Any) -> tuple[Tensor, Statistics]:
        flat, statistics = inputs[rank].clone(), Statistics()
        BucketExchange(LAYOUT).reduce_(flat, "gather" if rank else "blocks", wire, step=0, statistics=statistics)
        return flat, statistics

    for flat, statistics in in_threads(LocalWire.make(3, timeout_s=20), rank_of):
        assert statistics.dense_after == {"mixed": 1}
        torch.testing.assert_close(flat, torch.stack(inputs).mean(0))


# the index


@given(
    span=st.integers(1, 3000),
    pieces=st.lists(st.tuples(st.integers(0, 2999), st.integers(1, 400)), max_size=12),
    every=st.integers(1, 40),
)
@settings(max_examples=100, deadline=None)
def test_an_index_is_read_as_it_was_written(span: int, pieces: list[tuple[int, int]], every: int) -> None:
    marks = torch.zeros(span, dtype=torch.bool)
    for start, length in pieces:
        marks[start : start + length : every] = True
    items = marks.nonzero().squeeze(1)
    index = Index.of(items, span)
    message = torch.cat([torch.zeros(16, dtype=torch.uint8), index.bytes, torch.ones(8, dtype=torch.uint8)])
    found, end = read_items(message, 16, index.head, span, 0)
    assert torch.equal(found, items)
    assert end == 16 + index.bytes.numel()
    assert index.bytes.numel() <= 4 * items.numel() + 8


def test_neighbours_are_written_as_runs_and_many_as_bits() -> None:
    run = Index.of(torch.arange(5000, 105_000), 1_000_000)
    assert run.bytes.numel() == 8
    half = Index.of(torch.arange(0, 1_000_000, 2), 1_000_000)
    assert half.bytes.numel() == 125_000


@pytest.mark.parametrize("head", [[70, 3], [5, -1], [-1, 0], [10**12, 0], [9, 1]])
def test_an_index_that_does_not_fit_is_refused(head: list[int]) -> None:
    message = torch.full((64,), 200, dtype=torch.uint8)
    with pytest.raises(DynamixError, match="does not have"):
        read_items(message, 0, head, 90, 1)


# sparse tensors, table by table


def _touching(rows: Tensor, span: int, seed: int) -> Tensor:
    values = torch.randn((rows.numel(), 16), generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(rows[None], values, (span, 16), check_invariants=True)


def test_tables_that_all_ranks_touch_leave_the_gather_and_come_back() -> None:
    """First all ranks hold all of the small table; later nobody shares a row of it."""
    small, large, workers = 800, 100_000, 4

    def gradients(rank: int, step: int) -> list[Tensor]:
        own = torch.arange(small) if step < 10 else torch.arange(rank * 20, rank * 20 + 20)
        return [_touching(own, small, 9 * step + rank), _touching(torch.arange(5) * 97 + rank, large, step)]

    def train(rank: int, wire: Any) -> list[tuple[dict[str, int], int, list[Tensor]]]:
        memory, told = RowsExchange(), []
        for step in range(30):
            statistics = Statistics()
            means = mean_of_sparse(gradients(rank, step), wire, statistics=statistics, memory=memory)
            told.append((dict(statistics.buckets), statistics.payload_bytes, means))
        return told

    everybody = in_threads(LocalWire.make(workers, timeout_s=20), train)
    for step in range(30):
        dense = [[g.to_dense() for g in gradients(rank, step)] for rank in range(workers)]
        for told in everybody:
            assert told[step][0] == everybody[0][step][0]
            for table, mean in enumerate(told[step][2]):
                assert torch.equal(mean.to_dense(), ordered_mean([of_rank[table] for of_rank in dense]))
    buckets = [step[0] for step in everybody[0]]
    assert buckets[5] == {"blocks": 1, "gather": 1}
    assert buckets[-1] == {"gather": 2}
    full = everybody[0][5][1]
    assert full < 1.1 * small * 16 * 4, "no more than a dense all-reduce of the small table and an index"


def test_ranks_that_hold_everything_at_the_first_step_do_not_gather() -> None:
    def reduce(rank: int, wire: Any) -> tuple[Tensor, Statistics]:
        statistics = Statistics()
        gradient = _touching(torch.arange(500), 500, rank)
        return mean_of_sparse([gradient], wire, statistics=statistics)[0], statistics

    for mean, statistics in in_threads(LocalWire.make(4, timeout_s=20), reduce):
        assert statistics.buckets == {"blocks": 1}
        assert mean.is_coalesced()
        assert mean._nnz() == 500
