"""`dynamix bench compression`: what it makes of measurements, its goals, and one whole call over loopback."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamix.errors import ConfigError
from dynamix_lab.results.record import load
from dynamix_lab.suites.compression.exchanges import OURS, PLAIN, SPARSE_TENSORS, WAYS
from dynamix_lab.suites.compression.jobs import EMBEDDINGS, JOBS, SPARSE_JOBS, make_job
from dynamix_lab.suites.compression.report import beside_dense, goals
from dynamix_lab.suites.compression.sparse_jobs import KEEP
from dynamix_lab.suites.compression.suite import CompressionCell, CompressionPlan
from dynamix_lab.suites.compression.summary import join, judge, summarise
from dynamix_lab.suites.compression.task import CompressionTask
from dynamix_lab.suites.compression.worker import Rank, bound_bytes
from tests.ranks import run_ranks
from tests.refused import refused

ROOT = Path(__file__).parents[3]
TINY = {"users": 300, "items": 100, "factors": 8, "samples": 8}


def _rank(rank: int) -> dict[str, Any]:
    """Dense takes 100 ms of exchange, compaction 5, the others 50; rank 1 arrives 10 ms late, so rank 0 waits for
    it.
    """
    times = {"dense": 0.1, "dense-again": 0.1, "compaction": 0.005}
    ways = {}
    for name in ("dense", "dense-again", "omnireduce", "compaction"):
        exchange = times.get(name, 0.05)
        ours = name in OURS
        times_s = {"iteration_s": [exchange + 0.02] * 3, "exchange_s": [exchange + (0 if rank else 0.01)] * 3}
        sizes = {"sent": 3000 if ours else 30_000, "received": 3000, "payload": 1500 if ours else None, "bound": 400.0}
        turn = {**times_s, **sizes, "loss": [1.0, 0.5, 0.4], "nonzero": 0.05}
        counted = {"buckets": {name: 6}, "dense_after": {}, "undecoded": 0, "dense_bytes": 1, "payload_bytes": 1}
        ways[name] = {
            "turns": [copy.deepcopy(turn), copy.deepcopy(turn)],
            "statistics": counted if ours else None,
            "chosen": {"0": "dense"},
        }
    return {"dense_bytes": 10_000_000, "ways": ways}


def test_a_cell_compares_exchanges_of_the_last_to_arrive() -> None:
    cell = summarise([_rank(0), _rank(1)])
    found = cell["ways"]["compaction"]
    assert found["exchange_s"] == [0.005, 0.005]
    assert found["aggregation_bytes_per_s"] == pytest.approx(10_000_000 / 0.005)
    assert found["sent_bytes_per_step"] == 1000
    assert found["payload_over_bound"] == pytest.approx(500 / 400)
    assert found["sent_over_bound"] == pytest.approx(1000 / 400)  # on a ring of two each sends the payload once
    assert cell["ratios"]["compaction/dense"]["median"] == pytest.approx(0.025 / 0.12)
    assert found["timed_steps"] == 6
    for ratios, faster in (("ratios", 0.12 / 0.025), ("exchange_ratios", 0.1 / 0.005)):
        table = beside_dense({"cells": {"job-2x100": cell}}, ratios)
        row = dict(zip(table.head, table.rows[0], strict=True))
        assert row["compaction"].startswith(f"{faster:.2f}"), "times dense's speed"
        assert "dense" not in row


def test_goals_and_ratios_of_recorded_cells_are_those_that_were_recorded() -> None:
    recorded = load("results/compression-*", ROOT)
    assert recorded is not None
    for found, kept in ((judge(recorded["cells"]), recorded["target"]), (join(recorded["cells"]), recorded)):
        assert json.loads(json.dumps(found)) == {name: kept[name] for name in found}
    assert [row[2] for row in goals(recorded).rows[:2]] == [
        "ratings-8x100: 22.601 by gather",
        "ratings-8x100: 17.107 by gather-sparse",
    ]


def test_bound_counts_rows_of_embeddings_or_elements() -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 1, bias=False))
    net(torch.tensor([3, 3, 9, 11])).sum().backward()
    rows, share = bound_bytes(net, by_row=True)
    p = 3 / 64
    entropy = -p * math.log2(p) - (1 - p) * math.log2(1 - p)
    assert rows == pytest.approx((64 * entropy + 32 * 3 * 8) / 8 + 8 * 4)
    assert share == pytest.approx((24 + 8) / (512 + 8))
    assert bound_bytes(net, by_row=False)[0] > rows


def test_sizes_of_the_issue_and_what_cannot_be_run() -> None:
    cells = CompressionPlan().cells()
    assert [c.name for c in cells[:2]] == ["ratings-4x100", "ratings-8x100"]
    assert len(cells) == len(JOBS) * 2 * 2 - 2, "ncf not on the slow link"
    assert {c.rate_mbit_s for c in CompressionPlan.of(quick=True).cells()} == {100}
    assert CompressionPlan.of(quick=True, workers=(8,), jobs=None).workers == (8,)
    wrong = [{"jobs": ("x",)}, {"ways": ("dense",)}, {"workers": (1,)}, {"rates_mbit_s": (0,)}, {"steps": 0}]
    for change in wrong:
        refused(ConfigError, "", dataclasses.replace(CompressionPlan(), **change).check)
    hosts = CompressionCell("moe", 1000, 8).scenario().hosts
    assert [host.rate_mbit_s for host in hosts] == [1000.0] * 9, "one is for an aggregator"
    assert set(WAYS) == set(CompressionCell("ratings", 100, 4).ways(CompressionPlan()))
    assert not set(SPARSE_TENSORS) & set(CompressionCell("moe", 100, 4).ways(CompressionPlan()))
    refused(ConfigError, "workload", make_job, "netflix", 0)


def _trained(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    return Rank(config).run()


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)  # seconds, minutes only where other jobs hold the cores
def test_all_ways_train_alike_on_two_ranks(tmp_path) -> None:
    """Twelve steps by each way, in the order of one round."""
    ours = ("fixed", "gather", "gather-sparse", "blocks", "compaction", "lhc", "auto")
    ways = ("dense", "dense-again", "dense-25mb", "sparse", "omnireduce", *ours)
    options = {"rounds": 1, "steps": 12, "turn_s": 0.2, "ways": ways, "options": TINY, "warm_up": False}
    config = CompressionCell("ratings", 100, 2).config(CompressionPlan(**options), tmp_path)
    found = summarise(run_ranks(_trained, 2, config, timeout_s=280, group_timeout_s=120))["ways"]
    assert set(found) == set(ways)
    for name, way in found.items():
        assert way["timed_steps"] == len(way["loss"]) >= 12
        assert (way["exchange_median_s"] is None) == (name in PLAIN)
        assert way["loss"][:12] == pytest.approx(found["dense"]["loss"][:12], rel=1e-4), name
    assert found["dense"]["timed_steps"] > 12, "a turn of quick steps goes on until it has lasted long enough"
    assert found["fixed"]["loss"][:12] == found["compaction"]["loss"][:12] == found["lhc"]["loss"][:12], "bit by bit"
    assert found["compaction"]["payload_over_bound"] > 1


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["vgg-topk", "bert-topk"])
def test_all_ways_exchange_what_top_k_leaves(tmp_path: Path, name: str) -> None:
    ways = ("dense", "dense-again", "dense-25mb", "fixed", "gather", "blocks", "compaction", "lhc", "lhc-one-phase")
    options = {"rounds": 1, "steps": 8, "turn_s": 0.0, "ways": ways, "options": OF_JOB[name], "warm_up": False}
    config = CompressionCell(name, 100, 2).config(CompressionPlan(**options), tmp_path)
    found = summarise(run_ranks(_trained, 2, config, timeout_s=280, group_timeout_s=120))["ways"]
    small = 0.02  # of every parameter at least one element is sent
    for way in set(ways) - {"dense-25mb"}:
        assert found[way]["loss"] == pytest.approx(found["dense"]["loss"], rel=1e-4), way
        assert 0 < found[way]["nonzero"] < 2 * KEEP + small, way
    assert found["fixed"]["loss"] == found["lhc"]["loss"] == found["lhc-one-phase"]["loss"], "bit by bit"
    assert found["dense-25mb"]["nonzero"] > 0.1, "plain DDP selects nothing"
    assert found["dense-25mb"]["loss"] != found["dense"]["loss"]


OF_JOB: dict[str, dict[str, Any]] = {
    "ncf": {"users": 3000, "items": 400, "samples": 32},
    "ncf-20m": {"users": 3000, "items": 400, "samples": 32},
    "lstm-tied": {"vocabulary": 2000, "width": 16, "length": 8, "samples": 2, "drawn": 20, "text_bytes": 50_000},
    "transformer-tied": {"vocabulary": 2000, "width": 16, "length": 8, "samples": 2, "drawn": 20, "text_bytes": 50_000},
    "moe": {"experts": 16, "width": 16, "hidden": 8, "samples": 24},
    "lora": {"width": 32, "layers": 1},
    "vgg-topk": {"width": 4, "side": 32, "hidden": 16, "classes": 10},
    "bert-topk": {"words": 200, "width": 24, "layers": 1, "length": 8},
    **{f"rows-{share}": {"rows": 500, "width": 4, "own": 20} for share in (0, 50, 100)},
}


def _job(name: str, workers: int = 1) -> CompressionTask:
    return make_job(name, 1, workers=workers, **OF_JOB[name])


def _gradients(job: CompressionTask, number: int, net: nn.Module | None = None) -> dict[str, Tensor]:
    net = job.make_model(1) if net is None else net
    inputs, targets = job.batch(number)
    job.loss(net(inputs), targets).backward()
    return {name: p.grad.to_dense() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SPARSE_JOBS)
def test_batches_are_the_same_for_a_number_and_the_loss_falls(name: str) -> None:
    job = _job(name)
    assert all(torch.equal(one, other) for one, other in zip(job.batch(5), job.batch(5), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(job.batch(5), job.batch(6), strict=True))
    net = job.make_model(1)
    optimizer = job.make_optimizer([p for p in net.parameters() if p.requires_grad])
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        inputs, targets = job.batch(0)
        loss = job.loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", [name for name in SPARSE_JOBS if name in EMBEDDINGS])
def test_sparse_gradients_are_the_dense_ones(name: str) -> None:
    job = _job(name)
    assert job.make_sparse is not None
    sparse, dense = _gradients(job, 0, job.make_sparse(1)), _gradients(job, 0)
    for parameter, gradient in dense.items():
        torch.testing.assert_close(sparse[parameter], gradient)
    largest = max(dense.values(), key=lambda gradient: gradient.numel())
    assert float(largest.any(1).float().mean()) < 0.1, "most rows get none"


def test_experts_without_a_sample_get_no_gradient_and_only_adapters_are_trained() -> None:
    found = _gradients(_job("moe"), 0)
    assert all(int(found[name].flatten(1).any(1).sum()) <= 8 for name in ("into", "back")), "of 16 experts"
    assert {name.rpartition(".")[2] for name in _gradients(_job("lora"), 0)} == {"down", "up"}


@pytest.mark.parametrize("share", [0, 50, 100])
def test_workers_share_as_many_rows_as_the_job_is_named_for(share: int) -> None:
    job = _job(f"rows-{share}", workers=3)
    rows = [set(job.batch(6 + rank)[0].tolist()) for rank in range(3)]
    assert [len(of_rank) for of_rank in rows] == [20] * 3
    common = set.intersection(*rows)
    assert len(common) == share / 100 * 20
    assert len(set.union(*rows)) == len(common) + 3 * (20 - len(common))
    assert rows[0] != set(job.batch(9)[0].tolist()), "another step, other rows"
