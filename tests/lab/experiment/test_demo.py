"""The demo: what a call says and keeps, and what it refuses. One run is live; in the others runs are pretended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix.events.records import read_events
from dynamix_lab.emulator import load_scenario, probe_mechanisms
from dynamix_lab.experiment import suite
from dynamix_lab.experiment.demo import OVER_LEAST, demo_plan
from dynamix_lab.experiment.places import Place
from dynamix_lab.experiment.suite import ExperimentSuite
from dynamix_lab.opponents.runs import Evaluation, RunLimits, TrialRun
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.results.generated import part_of
from tests.processes import run
from tests.refused import refused

ROWS = ["static", "lb_bsp", "balance", "adapt", "single"]
SECONDS = {"static": 32.0, "lb_bsp": 21.0, "balance": 20.0, "adapt": 19.0, "single": 55.0}


class Pretended:
    """In the place of emulated devices: runs that take these seconds, some late, one interrupted, some diverged."""

    def __init__(
        self,
        seconds: Mapping[str, float],
        late: Sequence[str] = (),
        interrupted: tuple[int, str] | None = None,
        diverged: Sequence[str] = (),
    ) -> None:
        self.seconds, self.late, self.interrupted, self.diverged = seconds, late, interrupted, diverged
        self.mechanisms = {"network": "loopback", "cpu": "device"}
        self.ran: list[tuple[int, str]] = []
        self.repeats: list[int] = []

    def run(self, trial: Trial, place: Place, seed: int, limits: RunLimits) -> TrialRun:
        if (seed, trial.row) == self.interrupted:
            self.interrupted = None
            raise KeyboardInterrupt
        self.ran.append((seed, trial.row))
        time_s, samples = self.seconds[trial.row] * (1 + 0.01 * seed), place.job.budget
        loss = float("inf") if trial.row in self.diverged else 1.0
        scores = tuple(Evaluation(part * time_s, round(part * samples), loss, 0.5 * part) for part in (0.0, 0.9, 1.0))
        sizes = ((1.0, (32, 32, 32, 32)), (2.0, (40, 30, 30, 28)))
        late, waiting = trial.row in self.late, None if trial.policy is None else 0.25
        return TrialRun(trial, seed, "live", scores, (time_s,), (samples,), 9, late, waiting, sizes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pretended]:
    def made(**how: Any) -> Pretended:
        found = Pretended(SECONDS, **how)

        def cluster_of(name: str, folder: Any, *, repeats: int, **_: Any) -> Pretended:
            found.repeats.append(repeats)
            return found

        monkeypatch.setattr(suite, "cluster_of", cluster_of)
        return found

    return made


def demo(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["demo", "--out", str(folder), *words])


def test_one_seed_says_how_long_it_takes_and_shows_each_row_once_without_a_ratio(
    tmp_path: Path, pretend: Callable[..., Pretended]
) -> None:
    ran = pretend()
    done = demo(tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert ran.ran == [(0, name) for name in ROWS]
    assert ran.repeats == [0]
    before, _, after = done.stderr.partition("static, seed 0: 32.0 s, score 47.5, 719 samples/s, waiting 25 %")
    assert re.search(r"5 rows of about \d\d s each, \d\.\d minutes in all", before)
    assert "single, seed 0: 55.0 s, score 47.5, 418 samples/s, waiting –" in after
    assert "no root is needed" in done.stderr
    assert "| static | 32.0 | 47.50 | 719 | 25 % |\n" in done.stdout
    assert "over static" not in done.stdout
    assert "| static |" in (tmp_path / "run" / "table.md").read_text()
    assert "loopback" in (tmp_path / "run" / "report.html").read_text()


def test_several_seeds_give_ratios_with_intervals_in_the_form_that_pages_show(
    tmp_path: Path, pretend: Callable[..., Pretended]
) -> None:
    ran = pretend()
    done = demo(tmp_path / "run", "--seeds", "3", "--json")
    result = json.loads(done.stdout)
    assert len(set(ran.ran)) == 15
    assert [name for _, name in ran.ran[:5]] != [name for _, name in ran.ran[5:10]]  # rows take turns
    assert ran.repeats[0] > 0
    rows = result["cases"][0]["rows"]
    assert rows["balance"]["seed"] == [0, 1, 2]
    assert rows["balance"]["sizes"][0] == [[1.0, [32, 32, 32, 32]], [2.0, [40, 30, 30, 28]]]
    table = (tmp_path / "run" / "table.md").read_text()
    shown = part_of(
        table, "match-b0-32-device-demo-mnist1d-noisy-mlp", ["row", "seconds", "over static", "over lb_bsp"]
    )
    assert re.search(r"\| balance \| 20\.2 \| 0\.62 \(.+\) \| 0\.95 \(.+\) \|", shown), shown
    assert "Distributing pays: lb_bsp is 2.6" in table


def test_what_was_no_measurement_or_never_ended_is_said(tmp_path: Path, pretend: Callable[..., Pretended]) -> None:
    pretend(late=["adapt"])
    done = demo(tmp_path / "late")
    assert done.exit_code == 0
    assert "too slow for the devices: adapt." in done.stdout
    pretend(diverged=["balance"])
    done = demo(tmp_path / "diverged")
    assert done.exit_code == 1
    assert "not every row reached its end" in done.stderr


def test_an_interrupted_call_keeps_its_finished_rows_and_goes_on_without_repeating_them(
    tmp_path: Path, pretend: Callable[..., Pretended]
) -> None:
    folder = tmp_path / "run"
    ran = pretend(interrupted=(0, "balance"))
    assert demo(folder).exit_code == 130
    partly = json.loads((folder / "result.json").read_text())
    assert partly["interrupted"] is True
    assert list(partly["cases"][0]["rows"]) == ["static", "lb_bsp"]
    other = demo(folder, "--resume", "--policy", "goodput")
    assert other.exit_code == 2
    assert "begun with" in other.stderr
    done = demo(folder, "--resume")
    assert done.exit_code == 0, done.output
    assert "3 rows of about" in done.stderr
    assert ran.ran == [(0, name) for name in ROWS]


def test_of_a_seed_that_was_interrupted_nothing_is_compared(tmp_path: Path, pretend: Callable[..., Pretended]) -> None:
    plan = demo_plan(seeds=2)
    last = [cell.what for cell in ExperimentSuite(plan).cells()][-1]
    pretend(interrupted=(1, last[1].name))
    assert demo(tmp_path / "run", "--seeds", "2").exit_code == 130
    rows = json.loads((tmp_path / "run" / "result.json").read_text())["cases"][0]["rows"]
    assert {name: row["seed"] for name, row in rows.items()} == {name: [0] for name in ROWS}


def test_all_rows_have_one_recipe_and_one_budget_and_end_within_three_minutes() -> None:
    plan = demo_plan()
    case = ExperimentSuite(plan).cases()[0]
    trials = [row.trial(case.place.job, case.setting, 32, 4) for row in plan.rows]
    assert {(t.batch_size, t.learning_rate, t.schedule, t.budget) for t in trials} == {(32, 0.05, "cosine", 23_000)}
    assert {t.rate_for for t in trials if t.policy is not None} == {32}
    assert {t.row for t in trials if t.count == "progress"} == {"adapt"}
    assert len(trials) * OVER_LEAST * case.place.least_s(0, 32) < 165  # beside the start of the ranks


def test_another_policy_stands_in_for_dynamix_alone() -> None:
    plan = demo_plan(policy="guarded:mine.py:Own", rows=("static", "adapt"), seed=4, quick=True)
    assert {row.name: row.policy for row in plan.rows} == {"static": "static", "adapt": "guarded:mine.py:Own"}
    assert plan.all_seeds == [4]
    assert plan.budget is not None
    assert plan.budget < 2_000
    refused(ConfigError, "balance or adapt", demo_plan, policy="goodput", rows=("static",))
    refused(ConfigError, "static, lb_bsp, balance, adapt, single", demo_plan, rows=("static", "dbs"))


@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_smoke_run_leaves_a_complete_folder(tmp_path: Path) -> None:
    can, why = probe_mechanisms()["network"]
    if not can and (os.environ.get("CI") == "true" or os.environ.get("DYNAMIX_REQUIRE_EMULATOR") == "1"):
        pytest.fail(f"the demo's smoke run is required here, but: {why}")
    if not can:
        pytest.skip(why)
    rows = ["--rows", "static,adapt,single"]
    done = run("-m", "dynamix.cli.app", "demo", "--quick", *rows, "--json", "--out", tmp_path / "run", timeout_s=190)
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    (case,) = result["cases"]
    assert list(case["rows"]) == ["static", "adapt", "single"]
    for row in case["rows"].values():
        assert row["samples"][0] >= 1_280
        assert row["arrived"] == [True]
    assert 0 < case["rows"]["static"]["waiting"][0] < 1
    assert case["rows"]["single"]["waiting"] == [None]
    moved = case["rows"]["adapt"]["sizes"][0]
    assert all(at >= 0 and len(sizes) == 4 for at, sizes in moved)
    assert result["mechanisms"] == {**result["mechanisms"], "network": "netns+veth", "cpu": "device"}
    assert result["scenario_sha256"] == {case["place"]: load_scenario("device-demo").sha256}
    assert {e["policy"] for e in read_events(tmp_path / "run" / "events.jsonl")} == {"static", "adapt"}
    assert "smoke run" in done.stderr
