"""What `dynamix bench overhead` times, on two real ranks, and what it makes of the blocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamix.errors import ConfigError
from dynamix_lab.suites.overhead import memory as of_memory
from dynamix_lab.suites.overhead.memory import WAYS, memory, peak_bytes
from dynamix_lab.suites.overhead.ranks import CLOCKS, RANKS, Blocks, time_blocks
from dynamix_lab.suites.overhead.suite import OverheadPlan, OverheadSuite, decisions, summarise
from tests.ranks import run_ranks
from tests.refused import refused

TINY = OverheadPlan(step_ms=(1.0,), policies=("goodput",), launches=1, rounds=1, steps=10)


def launch(factor: float) -> dict[str, object]:
    """Blocks on a machine that becomes slower: one of each round is disturbed."""
    plain = [1.0, 1.1, 1.2]
    mine = [factor * s for s in plain]
    mine[1] *= 5
    seconds = {"ddp": plain, "mine": mine}
    clocks = {"wall_s": seconds, "cpu_s": seconds, "thread_s": seconds, "call_s": {"mine": [0.01, 0.02, 0.03]}}
    return {"steps": 10, "load_average": [0, 0], **clocks}


def test_a_rows_ratio_is_the_median_over_blocks_and_its_interval_that_of_launches() -> None:
    found = summarise([launch(1.05), launch(1.07), launch(1.06)])["rows"]["mine"]
    logs = [math.log(x) for x in (1.05, 1.06, 1.07)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)  # Student's t, two degrees of freedom
    assert found["ratio"]["median"] == pytest.approx(math.exp(mean), abs=1e-4)
    assert found["ratio"]["high"] == pytest.approx(math.exp(mean + half), abs=1e-4)
    assert found["call_ms"] == pytest.approx(2.0)
    over = found["thread_over_ms"]  # of medians 0.06, 0.084 and 0.072 s in 10 steps; the interval is theirs
    assert over["mean"] == pytest.approx(7.2)
    assert over["high"] == pytest.approx(7.2 + 4.303 * 1.2 / math.sqrt(3), abs=1e-3)
    assert summarise([launch(1.05)])["rows"]["mine"]["ratio"] == {"median": 1.05, "low": None, "high": None}


def _both(rank: int, folder: Path, blocks: Blocks) -> tuple[dict[str, Any], dict[str, tuple[float, int]]]:
    """In one pair of processes; so no peak of memory is lower than that before it."""
    dist.barrier()  # so that nobody closes what the other still opens
    dist.destroy_process_group()  # the blocks' ranks have one of their own
    timed = time_blocks(rank, str(folder / "blocks"), blocks)
    return timed, {way: peak_bytes(rank, str(folder / str(n)), way, width=64) for n, way in enumerate(WAYS)}


@pytest.mark.multiproc
def test_two_ranks_time_every_row_and_say_every_ways_peak_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = TINY.blocks(1.0, 16, 0)
    timed, peaks = zip(*run_ranks(_both, RANKS, tmp_path, blocks, timeout_s=200), strict=True)
    for found in timed:
        assert list(found["wall_s"]) == ["ddp", "ddp-again", "ddp-hook", "goodput"]
        assert all(s > 0 for each in CLOCKS for of_row in found[each].values() for s in of_row)
    cells = {"1ms": {"width": 16}, "1ms-0": {"steps": blocks.steps, "load_average": [0, 0], **timed[0]}}
    suite = OverheadSuite(TINY)
    result = suite.conclude({**cells, "decisions": decisions(("static",), workers=(2,), count=3)})
    rows = result["jobs"]["1ms"]["rows"]
    assert (result["jobs"]["1ms"]["width"], rows["ddp"]["ratio"]["median"]) == (16, 1)
    assert result["ratios"]["1ms: goodput/ddp"] == rows["goodput"]["ratio"]
    assert rows["goodput"]["call_ms"] > 0
    assert all(row in suite.table(result) for row in ("| goodput |", "| static | 2 |", "| 10000 |"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = lambda _, given, ranks: [(r, peaks[r][given[r][2]]) for r in given]  # noqa: E731
    monkeypatch.setattr(of_memory, "in_processes", told)
    of_ways = memory(width=64, launches=1)["cpu"]
    assert list(of_ways) == list(WAYS)
    assert of_ways["ddp"]["copies"] == 0
    assert all(of["peak_mb"] > 1 for of in of_ways.values())


def test_what_cannot_be_timed_is_refused() -> None:
    wrong = [{"step_ms": (0.0,)}, {"steps": 4}, {"launches": 0}, {"workers": (0,)}, {"policies": ("nonsense",)}]
    for change in wrong:
        refused(ConfigError, "", OverheadPlan.of(**change).check)
