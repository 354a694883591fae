"""How often to meet: what is trained once is charged for any network, and the rule stands beside every fixed number."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.suites.rounds import compare, pages, suite
from dynamix_lab.suites.rounds.jobs import JOBS, WORKERS, mean_piece_s, meeting_s, pass_s, shards, speeds_of
from dynamix_lab.suites.rounds.rows import FIXED, planner
from dynamix_lab.suites.rounds.suite import RoundsPlan, RoundsSuite, leader, rows_of, trainer
from dynamix_lab.suites.rounds.train import shares_together

JOB = dataclasses.replace(JOBS["perceptron"], target=2.2, budget=2_000)


def test_a_run_is_charged_for_its_meetings() -> None:
    run = {"samples": [0, 10, 20, 30], "loss": [3.0, 2.0, 1.0, 1.0], "meetings": [0, 1, 2, 3]}
    run["busy_s"] = [[0.0], [1.0], [2.0], [3.0]]  # type: ignore[assignment]
    job = dataclasses.replace(JOB, target=1.5)
    assert compare.time_s(run, job, 0.0, 0) == (1.5, True)
    assert compare.time_s(run, job, 2.0, 0) == (4.5, True)
    assert compare.time_s(run, dataclasses.replace(JOB, target=0.5), 2.0, 0) == (9.0, False)


def test_more_steps_and_longer_rounds_where_meetings_take_longer() -> None:
    speeds = speeds_of(4.0)
    rounds = [planner(f"rule@{ratio}", JOB, speeds).plan(0).steps for ratio in (0.1, 1, 10)]
    assert [int(steps.sum()) for steps in rounds] == sorted(int(steps.sum()) for steps in rounds)
    assert all((steps >= 1).all() and steps[0] > steps[-1] for steps in rounds)
    assert meeting_s(JOB, speeds, 1.0) == pytest.approx(2 * mean_piece_s(JOB, speeds))


def test_shares_of_one_step_end_together() -> None:
    speeds = speeds_of(4.0)
    shares = shares_together(256, speeds)
    ends = pass_s(shares, speeds)
    assert shares.sum() == 256
    assert ends.max() / ends.min() < 1.05


def test_shards_hold_every_sample_once() -> None:
    data = JOB.load().make_data(0, train=1000, test=100).train
    parts = shards(data, 0.5, 0)
    assert sorted(int(i) for part in parts for i in part) == list(range(1000))
    low = [np.mean(np.isin(data.targets[part].numpy(), (0, 1))) for part in parts]
    assert low[0] > 2 * low[-1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("row", ["together@4", "8", "adacomm@16", "qsr@8", "product@1"])
def test_every_row_trains(row: str) -> None:
    job = dataclasses.replace(JOB, unlike=0.5) if row == "8" else JOB
    track = trainer(row, job, 4.0)(0.1, 0)
    assert track.samples[-1] > 1_000
    assert track.loss[-1] < track.loss[0]
    assert np.all(np.diff(track.busy_s, axis=0) >= 0)


def test_rows_that_follow_come_after_those_that_are_tuned() -> None:
    for group in RoundsPlan().groups:
        rows = rows_of(*group)
        for row in rows:
            assert leader(row) is None or rows.index(leader(row) or "") < rows.index(row)


@pytest.mark.timeout(120)
def test_the_suite_says_who_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(JOBS, "perceptron", JOB)
    monkeypatch.setattr(RoundsPlan, "groups", [("perceptron", 1.0)])
    monkeypatch.setattr(suite, "MORE_RATES", 0)
    result = run_suite(RoundsSuite(RoundsPlan(("perceptron",), 1)), RunFolder("rounds", tmp_path / "run"))
    assert {place["ratio"] for place in result["places"]} == {0.1, 1.0, 10.0}
    assert all(place["over_best"]["rule"] > 0 and place["best"] in FIXED for place in result["places"])
    assert len(result["bends"]) == len(FIXED)
    assert len(pages.constants(result["places"]).rows) == len(pages.FACTORS)
    assert WORKERS == 4
    with pytest.raises(ConfigError, match="job"):
        RoundsPlan(("none",)).check()
