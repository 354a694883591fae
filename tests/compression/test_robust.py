"""Sparse gradients and mistakes on real gloo ranks: the union gradient exactly, one state a model, ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dynamix.compression import CompressionState, compression_hook
from dynamix.compression.path import backend_on
from dynamix.errors import ConfigError, StateError, UsageError
from dynamix.runtime.sync.inner_hook import InnerHook
from tests.ranks import refusal, run_ranks

ROWS = 200


class Recommender(nn.Module):
    """Two tables under eight layers: ten buckets with small ones."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(ROWS, 8, sparse=sparse) for _ in range(2))
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))

    def forward(self, pairs: Tensor) -> Tensor:
        out: Tensor = self.layers(self.users(pairs[:, 0]) * self.items(pairs[:, 1]))
        return out.sum(1)


def _pairs(count: int, seed: int) -> Tensor:
    return torch.randint(0, ROWS, (count, 2), generator=torch.Generator().manual_seed(seed))


def _trained(mode: str, *, sparse: bool, steps: int, rank: int, change: Any = None) -> tuple[Tensor, CompressionState]:
    torch.manual_seed(0)
    net = Recommender(sparse=sparse)
    model = DDP(net, bucket_cap_mb=0.0002)
    state = CompressionState(mode, model=net, min_bytes=1)  # type: ignore[arg-type]
    model.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(steps):
        if change is not None:
            change(state, step)
        model(_pairs(0 if (step + rank) % 5 == 0 else 4, 100 * step + rank)).square().sum().mul(0.25).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), state


def _load_on_first(rank: int) -> Any:
    def change(state: CompressionState, step: int) -> None:
        if step == 12 and rank == 0:
            state.load_state_dict({"settings": [state.mode, 0], "steps": {0: 3}})

    return change


def _everything(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = {steps: _trained("dense", sparse=False, steps=steps, rank=rank)[0] for steps in (15, 50)}
    for mode, steps in (("gather", 15), ("auto", 50), ("compaction", 15)):  # auto looks again after 40
        for sparse in (True, False):
            weights, state = _trained(mode, sparse=sparse, steps=steps, rank=rank, change=_load_on_first(rank))
            found[f"{mode} {sparse}"] = (weights, dict(state.statistics.buckets), state.ways)
            assert not state.statistics.dense_after["mixed"]
            torch.testing.assert_close(weights, wanted[steps], rtol=0, atol=1e-4)
    return found


@pytest.mark.multiproc
@pytest.mark.timeout(200)
def test_ragged_sparse_and_dense_gradients_train_all_ranks_alike_as_a_dense_mean_does() -> None:
    """A checkpoint loaded in mid-run on one rank only changes nothing; `auto` switches in mid-run, on all alike."""
    results = run_ranks(_everything, 3, timeout_s=180)
    for name in results[0]:
        weights, buckets, ways = results[0][name]
        assert all(torch.equal(result[name][0], weights) for result in results)
        assert all(result[name][1:] == (buckets, ways) for result in results)
        assert name.startswith("auto") or len(ways) >= 8


def _mistakes(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    net, second = Recommender(sparse=False), Recommender(sparse=False)

    def train(model: nn.Module) -> str:
        return refusal((UsageError, RuntimeError), lambda: model(_pairs(4, rank)).sum().backward())

    for given in (net, None):
        state = CompressionState("compaction", model=given)
        models = [DDP(one) for one in (net, second)]
        for model in models:
            model.register_comm_hook(state, compression_hook)
        found[f"two models, {given is not None}"] = [train(models[0]), train(models[0]), train(models[1])]
    alone = [dist.new_group([one]) for one in range(2)][rank]
    found["another group"] = refusal(UsageError, InnerHook, alone, compression_hook, CompressionState())
    found["modes"] = refusal(ConfigError, CompressionState, "gather" if rank else "blocks")
    found["seeds"] = refusal(ConfigError, CompressionState, "compaction", seed=rank)
    found["model on one rank"] = refusal(ConfigError, CompressionState, "compaction", model=net if rank else None)
    state = CompressionState("lhc")
    found["another mode"] = refusal(StateError, state.load_state_dict, {"settings": ["compaction", 0]})
    return found


@pytest.mark.multiproc
def test_mistakes_are_named() -> None:
    for found in run_ranks(_mistakes, 2):
        for name in ("two models, True", "two models, False"):
            assert found[name][:2] == ["accepted"] * 2
            assert "one CompressionState for each model" in found[name][2]
        assert "process_group=" in found["another group"]
        assert "the same on every rank" in found["modes"]
        assert "the same on every rank" in found["seeds"]
        assert "the same on every rank" in found["model on one rank"]
        assert "written with mode" in found["another mode"]


def test_refused_without_a_process_group_and_for_unknown_modes() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        CompressionState()
    with pytest.raises(ConfigError, match="mode='zip'"):
        CompressionState("zip")  # type: ignore[arg-type]


def _with_back_ends(rank: int, folder: Path) -> list[dict[str, Any]]:
    found = []
    for backend in (None, "cpu:gloo"):
        dist.destroy_process_group()
        dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=2)
        weights, state = _trained("compaction", sparse=True, steps=5, rank=rank)
        on = backend_on(state.process_group, "cpu")
        found.append({"weights": weights, "buckets": dict(state.statistics.buckets), "on": on})
    return found


@pytest.mark.multiproc
def test_whatever_the_back_end_was_called(tmp_path: Path) -> None:
    for one, other in zip(*run_ranks(_with_back_ends, 2, tmp_path), strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert one["on"] == "gloo"
        assert one["buckets"]["compaction"] > 10
