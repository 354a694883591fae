from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.suites import stepcount
from dynamix_lab.suites.stepcount import StepCountPlan, StepCountSuite, best_rate, fit, steps_to_target, table
from dynamix_lab.tasks import make_workload


@pytest.mark.parametrize("rule", ["none", "adascale"])
def test_progress_is_counted_in_steps_of_the_base_batch(rule: str) -> None:
    workload = make_workload("digits")
    count = steps_to_target(workload, workload.base_batch, 9001, target=2.0, most=12, rule=rule)
    assert count.steps is None
    assert count.progress == pytest.approx(12)
    assert steps_to_target(workload, 16, 9001, target=2.0, most=12, rule=rule).progress < 10


def test_a_rate_at_which_training_breaks_off_never_reaches_the_target() -> None:
    workload = make_workload("teacher")
    assert steps_to_target(workload, 16, 9001, target=0.5, most=60, learning_rate=1e3).steps is None
    assert steps_to_target(workload, 256, 9001, target=0.3, most=100, learning_rate=0.1).steps is not None


def test_the_search_ends_between_worse_neighbours_and_goes_down_where_nothing_arrives() -> None:
    asked: list[int] = []

    def measure(power: int, bound: float) -> float:
        asked.append(power)
        steps = 100.0 * 1.3 ** abs(power + 4) if power <= -3 else math.inf
        return steps if steps <= bound else math.inf

    assert best_rate(measure, 0) == -4
    assert len(asked) == len(set(asked)) <= stepcount.MOST_RATES


def test_the_search_for_a_rate_goes_both_ways_until_one_arrives() -> None:
    assert best_rate(lambda power, bound: 9.0 if power == 3 else math.inf, 0) == 3
    assert best_rate(lambda power, bound: 9.0 if power == -3 else math.inf, 0) == -3


def test_a_curve_has_a_row_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepcount, "PLATEAU_SAMPLES", 6_400)
    monkeypatch.setattr(stepcount, "SHARE", 0.7)
    monkeypatch.setattr(stepcount, "make_workload", lambda name: replace(make_workload(name), target=None))
    suite = StepCountSuite(StepCountPlan(("teacher",), batches=(256, 1024), most=60_000))
    result = run_suite(suite, RunFolder("stepcount", tmp_path / "run"))
    curve = result["workloads"]["teacher"]
    small, large = curve["table"]
    assert (small["batch"], large["batch"]) == (256, 1024)
    assert sum(small["steps"]) > sum(large["steps"]), "labels are noisy: a larger batch saves steps"
    assert curve["critical_batch"] > 0
    assert curve["plateau"]["untrained"] < curve["target"] < max(curve["plateau"]["plateaus"].values())
    assert table(result).markdown() == (tmp_path / "run" / "table.md").read_text()


def test_a_batch_that_never_arrives_is_left_out_of_the_fit() -> None:
    rows = [{"batch": b, "steps": [100 + 6400 // b], "noise_scale": [None]} for b in (64, 128, 256)]
    found = fit([{"batch": 32, "steps": [None], "noise_scale": [None]}, *rows])
    assert found["critical_batch"] == pytest.approx(64)
    assert "ratio" not in found
    assert fit(rows[:1]) == {}
