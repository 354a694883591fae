"""`dynamix bench compression`: what it makes of measurements, its goals, and one whole call over loopback."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch

from dynamix.errors import ConfigError
from dynamix_lab.report import sections_markdown
from dynamix_lab.suites.compression.exchanges import LOSSY, OURS, PLAIN, WAYS
from dynamix_lab.suites.compression.jobs import JOBS, make_job
from dynamix_lab.suites.compression.report import label, sections
from dynamix_lab.suites.compression.suite import CompressionCell, CompressionPlan
from dynamix_lab.suites.compression.summary import join, judge, summarise
from dynamix_lab.suites.compression.worker import Rank, bound_bytes
from tests.ranks import run_ranks
from tests.refused import refused

SOME = ("dense", "dense-again", "fp16", "compaction", "lhc", "auto")
TINY = {"users": 300, "items": 100, "factors": 8, "samples": 8}


def _rank(rank: int) -> dict[str, Any]:
    """Dense takes 100 ms of exchange, compaction 5, the others 50; rank 1 arrives 10 ms late, so rank 0 waits for
    it.
    """
    times = {"dense": 0.1, "dense-again": 0.1, "compaction": 0.005}
    ways = {}
    for name in SOME:
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


def _cell(job: str = "ratings", rate: int | None = 100) -> dict[str, Any]:
    about = {"job": job, "rate_mbit_s": rate, "workers": 2, "load_average": [0.1, 0.2]}
    about |= {"mechanisms": {}, "commit": None}
    return {**about, **summarise([_rank(0), _rank(1)])}


def test_a_cell_compares_exchanges_of_the_last_to_arrive() -> None:
    cell = _cell()
    found = cell["ways"]["compaction"]
    assert found["exchange_s"] == [0.005, 0.005]
    assert found["aggregation_bytes_per_s"] == pytest.approx(10_000_000 / 0.005)
    assert found["sent_bytes_per_step"] == 1000
    assert found["payload_over_bound"] == pytest.approx(500 / 400)
    assert found["sent_over_bound"] == pytest.approx(1000 / 400)  # on a ring of two each sends the payload once
    assert cell["ratios"]["compaction/dense"]["median"] == pytest.approx(0.025 / 0.12)
    assert found["timed_steps"] == 6


def test_goals_are_judged_where_they_are_set() -> None:
    cells = {"slow": _cell(rate=100), "fast": _cell(rate=1000), "other": _cell("moe", 100)}
    cells["other"]["ways"]["compaction"]["nonzero"] = 0.9  # nothing to compress: bytes are not judged there
    goals = judge(cells)
    assert goals["aggregation"]["found"] == {"slow": {"way": "compaction", "value": pytest.approx(20.0)}}
    assert goals["aggregation"]["reached"]
    assert goals["iteration"]["found"]["slow"]["value"] == pytest.approx(0.12 / 0.025)
    assert goals["compaction_bytes"]["found"] == {"slow": pytest.approx(1.25), "fast": pytest.approx(1.25)}
    assert goals["compaction_bytes"]["reached"] is False
    assert goals["lhc_bytes"]["reached"]
    assert judge({})["aggregation"]["reached"] is None


def test_a_job_runs_the_ways_that_make_sense_for_it() -> None:
    assert set(WAYS) == set(CompressionCell("ratings", 100, 4).ways(CompressionPlan()))
    assert {"sparse", "gather-sparse", "auto"} <= set(CompressionCell("ncf", 1000, 4).ways(CompressionPlan()))
    assert not {"sparse", "powersgd"} & set(CompressionCell("moe", 100, 4).ways(CompressionPlan()))


def test_all_cells_together_have_pairs_ratios_and_the_a_a_pair() -> None:
    cells = {"a": _cell(), "b": _cell("moe", 1000)}
    about = {"command": "bench compression", "plan": {}, "commit": None, "cluster": "emulator", "mechanisms": {}}
    about |= {"seeds": [0], "machine": {"cores": 2, "cpu": ""}, "scenario_sha256": {}}
    result = {**about, "target": judge(cells), **join(cells), "cells": cells}
    assert result["pairs"] == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    assert len(result["policies"]["lhc"]["iteration_s"]) == 4
    assert result["a_a"]["median"] == pytest.approx(1.0)
    assert result["ratios"]["fp16/dense"]["median"] < 1
    table = sections_markdown(sections(result))
    assert "| compaction |" in table
    assert "| fp16 (lossy) |" in table
    assert join({}) == {"pairs": [], "policies": {}, "ratios": {}, "a_a": None}


def test_bound_counts_rows_of_embeddings_or_elements() -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 1, bias=False))
    net(torch.tensor([3, 3, 9, 11])).sum().backward()
    rows, share = bound_bytes(net, by_row=True)
    p = 3 / 64
    entropy = -p * math.log2(p) - (1 - p) * math.log2(1 - p)
    assert rows == pytest.approx((64 * entropy + 32 * 3 * 8) / 8 + 8 * 4)
    assert share == pytest.approx((24 + 8) / (512 + 8))
    assert bound_bytes(net, by_row=False)[0] > rows


def test_jobs_give_every_rank_and_step_a_batch_of_its_own() -> None:
    job = make_job("ratings", 3, **TINY)
    same, other = job.batch(5), job.batch(6)
    assert torch.equal(same[0], job.batch(5)[0])
    assert not torch.equal(same[0], other[0])
    assert same[0].shape == (8, 2)
    job.loss(job.make_model(3)(same[0]), same[1]).backward()
    refused(ConfigError, "workload", make_job, "netflix", 0)


def test_sizes_of_the_issue_and_what_cannot_be_run() -> None:
    cells = CompressionPlan().cells()
    assert [c.name for c in cells[:2]] == ["ratings-4x100", "ratings-8x100"]
    assert len(cells) == len(JOBS) * 2 * 2 - 2, "ncf not on the slow link"
    assert {c.rate_mbit_s for c in CompressionPlan.of(quick=True).cells()} == {100}
    assert CompressionPlan.of(quick=True, workers=(8,), jobs=None).workers == (8,)
    wrong = [{"jobs": ("x",)}, {"ways": ("dense",)}, {"workers": (1,)}, {"rates_mbit_s": (0,)}, {"steps": 0}]
    for change in wrong:
        refused(ConfigError, "", dataclasses.replace(CompressionPlan(), **change).check)
    assert CompressionCell("moe", 1000, 8).scenario().hosts[0].rate_mbit_s == 1000.0
    assert (label("auto"), label("topk")) == ("auto", "topk (lossy)")


def _trained(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    return Rank(config).run()


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)  # seconds, minutes only where other jobs hold the cores
def test_all_ways_train_alike_on_two_ranks(tmp_path) -> None:
    """Twelve steps by each way, in the order of one round."""
    ours = ("gather", "gather-sparse", "blocks", "compaction", "lhc", "auto")
    ways = ("dense", "dense-again", "dense-1mb", "sparse", "topk", "bf16", "omnireduce", "index-gather", *ours)
    options = {"rounds": 1, "steps": 12, "turn_s": 0.2, "ways": ways, "options": TINY, "warm_up": False}
    config = CompressionCell("ratings", 100, 2).config(CompressionPlan(**options), tmp_path)
    found = summarise(run_ranks(_trained, 2, config, timeout_s=280, group_timeout_s=120))["ways"]
    assert set(found) == set(ways)
    for name, way in found.items():
        assert way["timed_steps"] == len(way["loss"]) >= 12
        assert (way["exchange_median_s"] is None) == (name in PLAIN)
        if name not in LOSSY:
            assert way["loss"][:12] == pytest.approx(found["dense"]["loss"][:12], rel=1e-4), name
    assert found["dense"]["timed_steps"] > 12, "a turn of quick steps goes on until it has lasted long enough"
    assert found["compaction"]["loss"][:12] == found["lhc"]["loss"][:12], "bit by bit"
    assert found["compaction"]["payload_over_bound"] > 1
