"""What `dynamix bench overhead` times, on two real ranks, and what it makes of the blocks."""

from __future__ import annotations

import json
import math

import pytest

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.results.views import markdown_of
from dynamix_lab.suites.overhead.suite import OverheadPlan, OverheadSuite, summarise

TINY = OverheadPlan(
    step_ms=(1.0,),
    policies=("goodput",),
    launches=1,
    rounds=1,
    steps=10,
    deciders=("static",),
    workers=(2,),
    decisions=3,
)


def launch(factor: float) -> dict[str, object]:
    """Blocks on a machine that becomes slower: one of each round is disturbed."""
    plain = [1.0, 1.1, 1.2]
    mine = [factor * s for s in plain]
    mine[1] *= 5
    return {
        "steps": 10,
        "load_average": [0, 0],
        "wall_s": {"ddp": plain, "mine": mine},
        "cpu_s": {"ddp": plain, "mine": mine},
        "call_s": {"mine": [0.01, 0.02, 0.03]},
    }


def test_a_rows_ratio_is_the_median_over_blocks_and_its_interval_that_of_launches() -> None:
    found = summarise([launch(1.05), launch(1.07), launch(1.06)])["rows"]["mine"]
    logs = [math.log(x) for x in (1.05, 1.06, 1.07)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)  # Student's t, two degrees of freedom
    assert found["ratio"]["median"] == pytest.approx(math.exp(mean), abs=1e-4)
    assert found["ratio"]["high"] == pytest.approx(math.exp(mean + half), abs=1e-4)
    assert found["call_ms"] == pytest.approx(2.0)
    assert summarise([launch(1.05)])["rows"]["mine"]["ratio"] == {"median": 1.05, "low": None, "high": None}


def test_blocks_are_whole_windows_and_short_steps_are_timed_more_often() -> None:
    plan = OverheadPlan()
    short, middle, long = (plan.blocks(ms, 64, 0) for ms in plan.step_ms)
    assert [blocks.steps for blocks in (short, middle, long)] == [100, 50, 20]
    assert short.rounds > middle.rounds == long.rounds
    assert {"ddp", "ddp-again", "ddp-hook", "static", "goodput", "dynamix", "stigmergic"} == set(long.rows)


@pytest.mark.multiproc
def test_two_ranks_time_every_row_and_a_folder_is_gone_on_with(tmp_path) -> None:
    folder = RunFolder("overhead", tmp_path / "run")
    (folder.path / "cells").mkdir()
    (folder.path / "cells" / "1ms.json").write_text('{"width": 16}')  # as if found before: that takes a launch too
    result = run_suite(OverheadSuite(TINY), folder)
    assert result["jobs"]["1ms"]["width"] == 16
    rows = result["jobs"]["1ms"]["rows"]
    assert list(rows) == ["ddp", "ddp-again", "ddp-hook", "goodput"]
    assert all(row["step_ms"] > 0 and row["cpu_ms"] > 0 for row in rows.values())
    assert rows["ddp"]["ratio"]["median"] == 1
    assert result["ratios"]["1ms: goodput/ddp"] == rows["goodput"]["ratio"]
    assert "| goodput |" in markdown_of(result, "steps-of-1-ms")
    assert "| static | 2 |" in markdown_of(result, "a-decision")
    assert "| 10000 |" in markdown_of(result, "rank-0-beside-the-decision-a-window")
    assert result["jobs"]["1ms"]["rows"]["goodput"]["call_ms"] > 0
    again = run_suite(OverheadSuite(TINY), RunFolder("overhead", tmp_path / "run", resume=True))
    assert again["jobs"] == json.loads(json.dumps(result["jobs"]))


@pytest.mark.parametrize(
    "wrong", [{"step_ms": (0.0,)}, {"steps": 9}, {"launches": 0}, {"workers": (0,)}, {"policies": ("nonsense",)}]
)
def test_what_cannot_be_timed_is_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        OverheadPlan.of(**wrong).check()
