"""The hook on real gloo ranks: `auto` picks alike on all of them, and mistakes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dynamix.compression import CompressionState, compression_hook
from dynamix.errors import ConfigError, UsageError
from tests.ranks import refusal, run_ranks


def _auto(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.EmbeddingBag(20_000, 64), nn.Linear(64, 2))
    model = DDP(net)
    state = CompressionState(model=net)
    model.register_comm_hook(state, compression_hook)
    for step in range(30):
        words = torch.randint(0, 20_000, (8, 4), generator=torch.Generator().manual_seed(step * 7 + rank))
        model(words).square().sum().backward()
        gradient = net[0].weight.grad
        net.zero_grad()
    return {"ways": state.ways, "statistics": state.statistics.as_dict(), "rows": int(gradient.any(1).sum())}


@pytest.mark.multiproc
def test_auto_measures_a_sparse_bucket_and_all_ranks_pick_alike() -> None:
    results = run_ranks(_auto, 2)
    assert results[0]["ways"] == results[1]["ways"]
    counted = results[0]["statistics"]
    assert counted["buckets"] == results[1]["statistics"]["buckets"]
    by_rows = counted["buckets"]["gather"] + counted["buckets"].get("blocks", 0)
    assert by_rows >= 1, "5 MB with 0.2 % of its rows set: tried, and kept if it is quicker, which a machine decides"
    assert not counted["dense_after"]
    assert 32 < results[0]["rows"] <= 64


def _differ(rank: int) -> str:
    return refusal(ConfigError, CompressionState, "gather" if rank else "blocks")


@pytest.mark.multiproc
def test_ranks_with_different_modes_are_refused() -> None:
    assert all("the same on every rank" in message for message in run_ranks(_differ, 2))


def test_refused_without_a_process_group_and_for_unknown_modes() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        CompressionState()
    with pytest.raises(ConfigError, match="mode='zip'"):
        CompressionState("zip")  # type: ignore[arg-type]
