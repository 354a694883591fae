"""The demo: what a call shows, repeats, keeps and refuses. Live runs need no root, but for the one that wants links."""

from __future__ import annotations

import html
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from torch import Tensor

from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.records import read_events
from dynamix.events.run_folder import RunFolder
from dynamix_lab.demo import run as demo_run
from dynamix_lab.demo import settings as demo_settings
from dynamix_lab.demo.report import HEAD, legend, result_table
from dynamix_lab.demo.rows import ABOUT, SCENARIO, TRIALS, WORKLOAD
from dynamix_lab.demo.run import run_demo, verdict_of
from dynamix_lab.demo.settings import DemoSettings
from dynamix_lab.demo.watch import DemoWatch
from dynamix_lab.emulator import load_scenario, probe_mechanisms
from dynamix_lab.emulator.devices import DeviceSteps
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.runs import AGAIN, PolicyRun
from dynamix_lab.opponents.launch import LiveRun
from dynamix_lab.opponents.runs import Evaluation, TrialRun
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.results.record import load
from tests.processes import run

LIVE = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(200)]


def live(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test with rank processes."""
    for mark in LIVE:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def privileged() -> None:
    can, why = probe_mechanisms()["network"]
    if not can and (os.environ.get("CI") == "true" or os.environ.get("DYNAMIX_REQUIRE_EMULATOR") == "1"):
        pytest.fail(f"the demo's smoke run is required here, but: {why}")
    if not can:
        pytest.skip(why)


def ranks() -> list[psutil.Process]:
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [child for child in children if "dynamix_lab.opponents.rank" in " ".join(child.cmdline())]


@live
@pytest.mark.emulator
def test_a_smoke_run_shows_every_row_and_leaves_a_complete_folder(privileged: None, tmp_path: Path) -> None:
    done = run("-m", "dynamix.cli.app", "demo", "--quick", "--json", "--out", tmp_path / "run", timeout_s=190)
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert page.count("<svg") == 2
    assert list(result["policies"]) == ["single", "static", "lb_bsp", "local", "dynamix"]
    for row, part in result["policies"].items():
        assert part["samples"][0] > 0
        assert len(part["curve"][0]) >= 2
        assert len(part["overruns"][0]) == 4
        assert part["trial"] == TRIALS[row].to_dict()
        assert f"{row}: {ABOUT[row]}" in page
    assert result["policies"]["static"]["batch_sizes"] == [[TRIALS["static"].batch_size] * 4]
    assert len(result["policies"]["single"]["batch_sizes"][0]) == 1
    (moves,) = result["policies"]["dynamix"]["sizes_over_time"]
    assert moves[-1][1] == result["policies"]["dynamix"]["batch_sizes"][0]
    assert all(at >= 0 and len(sizes) == 4 for at, sizes in moves)
    assert result["mechanisms"] == {**result["mechanisms"], "network": "netns+veth", "cpu": "device"}
    assert result["scenario_sha256"] == load_scenario("device-demo").sha256
    assert {e["policy"] for e in read_events(tmp_path / "run" / "events.jsonl")} == {"static", "lb_bsp", "dynamix"}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["command"] == "dynamix demo --quick"
    assert "smoke run" in done.stderr


class KillsARank(Display):
    """Kills one rank once training goes on."""

    killed = False

    def update(self, runs: Sequence[PolicyRun]) -> None:
        if not self.killed and runs[-1].samples:
            self.killed = True
            ranks()[2].send_signal(signal.SIGKILL)


@live
def test_a_rank_that_dies_ends_the_demo_with_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_settings, "QUICK_S", 60.0)
    settings = DemoSettings(quick=True, rows=("static",), mechanism="duty-cycle")
    with pytest.raises(WorkerLostError, match="rank"):
        run_demo(settings, RunFolder("demo", tmp_path / "run"), display=KillsARank(target=1.0))
    assert ranks() == []


class Interrupts(Display):
    """Ctrl-C once the second seed trains."""

    def update(self, runs: Sequence[PolicyRun]) -> None:
        if len({run.seed for run in runs}) == 2 and runs[-1].samples:
            raise KeyboardInterrupt


@live
def test_an_interrupted_call_keeps_its_finished_seeds_and_goes_on_without_repeating_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_settings, "QUICK_S", 1.0)
    settings = DemoSettings(quick=True, seeds=2, rows=("dynamix",), mechanism="duty-cycle")
    with pytest.raises(KeyboardInterrupt):
        run_demo(settings, RunFolder("demo", tmp_path / "run"), display=Interrupts(target=1.0))
    assert ranks() == []
    partly = json.loads((tmp_path / "run" / "result.json").read_text())
    assert partly["interrupted"] is True
    assert partly["seeds"] == [0]
    with pytest.raises(ConfigError, match="settings"):
        run_demo(replace(settings, policy="goodput"), RunFolder("demo", tmp_path / "run", resume=True))
    result, reached = run_demo(settings, RunFolder("demo", tmp_path / "run", resume=True))
    assert reached
    assert result["seeds"] == [0, 1]
    for name in ("time_s", "samples", "curve", "overruns", "wait_fraction"):
        assert result["policies"]["dynamix"][name][0] == partly["policies"]["dynamix"][name][0]
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert len(events) == len({(e["policy"], e["seed"], e["window_index"]) for e in events})


def a_run(trial: Trial, time_s: float, *, seed: int = 0) -> TrialRun:
    """As a launch gives it: the target reached at `time_s`, or, where that is negative, never."""
    never, time_s = time_s < 0, abs(time_s)
    scores = [(0.0, 0.1), (time_s - 1, 0.45), (time_s, 0.5 if never else 0.54), (time_s + 1, 0.6)]
    evaluations = tuple(Evaluation(at, round(1000 * at), 1 - score, score) for at, score in scores)
    meetings = tuple(float(at) for at in np.arange(1, time_s + 2))
    return TrialRun(trial, seed, "live", evaluations, meetings, (1000, 800, 700, 500), len(meetings))


class Pretended:
    """In the place of ranks on hosts: runs that take these seconds, the first ones of `late` with overruns."""

    def __init__(self, seconds: Mapping[str, float], late: Sequence[str] = ()) -> None:
        self.seconds, self.late = seconds, list(late)
        self.launched: list[tuple[int, list[str]]] = []

    def emulation(self, scenario: Any, *, run_dir: Path, mechanism: str, **_: Any) -> Any:
        mechanisms = {"network": "loopback", "cpu": "device"}
        return nullcontext(SimpleNamespace(scenario=scenario, run_dir=run_dir, mechanisms=mechanisms))

    def ranks(self, hosts: Any, job: Any, *, watch: DemoWatch, **_: Any) -> Any:
        names = list[str]()
        self.launched.append((job.seed, names))

        def run(name: str, trial: Trial) -> LiveRun:
            names.append(name)
            if late := name in self.late:
                self.late.remove(name)
            devices = (DeviceSteps(100, 5 if late else 0, 0.1),) * 4
            watch.began(name)
            made = LiveRun(name, a_run(trial, self.seconds[name], seed=job.seed), devices, 0.0)
            watch.finished(made)
            return made

        return nullcontext(SimpleNamespace(run=run))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pretended]:
    def made(seconds: Mapping[str, float], late: Sequence[str] = ()) -> Pretended:
        found = Pretended(seconds, late)
        monkeypatch.setattr(demo_run, "Emulation", found.emulation)
        monkeypatch.setattr(demo_run, "LiveRanks", found.ranks)
        monkeypatch.setattr(demo_run, "scoring", lambda workload, seed: float)
        return found

    return made


SECONDS = {"single": 80.0, "static": 40.0, "lb_bsp": 28.0, "local": 25.0, "dynamix": 30.0, AGAIN: 40.4}


def test_the_result_says_who_is_faster_by_how_much_and_whether_distributing_pays(
    tmp_path: Path, pretend: Callable[..., Pretended]
) -> None:
    pretend(SECONDS)
    result, reached = run_demo(DemoSettings(), RunFolder("demo", tmp_path / "run"))
    assert reached
    assert result["policies"]["local"]["time_to_target_s"] == [pytest.approx(25.0, abs=0.1)]
    assert result["ratios"]["dynamix/local"]["median"] == pytest.approx(1.2, abs=0.01)
    assert result["ratios"]["dynamix/single"]["low"] is None
    assert result["verdict"]["sentence"].startswith("Distributing pays: lb_bsp is 2.8")
    page = (tmp_path / "run" / "report.html").read_text()
    assert result["verdict"]["sentence"] in page
    assert "loopback: no root is needed" in page
    assert "dynamix: 1.20 x the time of local" in page


def test_a_row_that_never_arrives_makes_the_call_fail(tmp_path: Path, pretend: Callable[..., Pretended]) -> None:
    pretend({**SECONDS, "dynamix": -90.0})
    result, reached = run_demo(DemoSettings(rows=("static", "dynamix")), RunFolder("demo", tmp_path / "run"))
    assert not reached
    assert result["policies"]["dynamix"]["time_to_target_s"] == [None]
    assert result["ratios"]["dynamix/static"]["median"] == pytest.approx(3.0), "counts at three times static's"
    assert result["verdict"] is None


def test_several_seeds_repeat_runs_with_late_steps_and_run_static_twice(
    tmp_path: Path, pretend: Callable[..., Pretended]
) -> None:
    ran = pretend(SECONDS, late=["local", "local"])
    result, _ = run_demo(DemoSettings(seeds=2), RunFolder("demo", tmp_path / "run"))
    assert [names for _, names in ran.launched[1:3]] == [["local"], ["local"]]
    assert {seed for seed, _ in ran.launched} == {0, 1}
    assert set(ran.launched[0][1]) == {*TRIALS, AGAIN}
    assert result["policies"]["local"]["attempts"] == [3, 1]
    assert result["policies"]["local"]["overrun"] == [False, False]
    assert result["a_a"]["pairs"] == 2
    assert result["ratios"]["dynamix/static"]["high"] is not None


def test_one_seed_says_that_a_run_had_late_steps_and_does_not_repeat_it(
    tmp_path: Path, pretend: Callable[..., Pretended]
) -> None:
    ran = pretend(SECONDS, late=["local"])
    result, _ = run_demo(DemoSettings(), RunFolder("demo", tmp_path / "run"))
    assert len(ran.launched) == 1
    assert result["policies"]["local"]["overruns"] == [[5, 5, 5, 5]]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "local (seed 0): these times are no measurement" in page
    assert result["verdict"]["sentence"] not in page
    assert "dynamix: " in page  # whose devices kept their times
    assert "local: 0" not in page


def watching(tmp_path: Path, runs: list[PolicyRun], value: Callable[[Tensor], float]) -> DemoWatch:
    hosts: Any = SimpleNamespace(scenario=load_scenario("device-demo"), run_dir=tmp_path)
    folder = RunFolder("demo", tmp_path / "run")
    return DemoWatch(hosts, folder, Display(target=0.5), runs, TRIALS, value, seed=0, attempt=0, target=0.5, stops=True)


def test_a_row_ends_after_two_scores_in_a_row_at_the_target(tmp_path: Path) -> None:
    runs: list[PolicyRun] = []
    with watching(tmp_path, runs, lambda weights: float(weights[0])) as watch:
        watch.began("static")
        for i, score in enumerate((0.4, 0.55, 0.45, 0.6, 0.7)):
            path = tmp_path / f"{i}.f32"
            np.array([score], dtype=np.float32).tofile(path)
            assert not watch.stop("static"), score
            watch.progress("static", float(i), 100 * i, 1.0)
            watch.snapshot("static", float(i), 100 * i, path)
            watch._scorer.wait()
            assert not path.exists()
        assert watch.stop("static")
    assert runs[0].samples == 400


def test_a_row_ends_at_three_times_statics_time(tmp_path: Path) -> None:
    runs: list[PolicyRun] = []
    with watching(tmp_path, runs, lambda weights: 0.0) as watch:
        watch.began("static")
        watch.finished(LiveRun("static", a_run(TRIALS["static"], 20.0), (), 0.0))
        reached = runs[0].time_to_target_s
        assert reached is not None
        watch.began("local")
        watch.progress("local", 3 * reached - 0.1, 1000, 1.0)
        assert not watch.stop("local")
        watch.progress("local", 3 * reached + 0.1, 1000, 1.0)
        assert watch.stop("local")


def test_one_seed_begins_with_static_and_several_are_balanced() -> None:
    assert DemoSettings().order(3) == ["static", "single", "lb_bsp", "local", "dynamix"]
    several = DemoSettings(seeds=6)
    assert {several.order(seed)[0] for seed in range(6)} == {*TRIALS, AGAIN}
    assert DemoSettings(rows=("dynamix", "local")).order(0) == ["local", "dynamix"]


def test_ranks_find_a_policy_file_wherever_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = DemoSettings(policy="guarded:mine.py:Own")
    assert settings.for_ranks(["dynamix"])["dynamix"].policy == f"guarded:{tmp_path / 'mine.py'}:Own"
    assert settings.trials["dynamix"].policy == "guarded:mine.py:Own"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (DemoSettings(scenario="demo"), "device-demo"),
        (DemoSettings(rows=("static", "dbs")), "single, static, lb_bsp, local, dynamix"),
        (DemoSettings(rows=("static",), policy="goodput"), "--rows"),
        (DemoSettings(seed=9000, seeds=2), "9001"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_can(settings: DemoSettings, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings.check()


def test_the_rows_are_what_the_recorded_run_tuned_them_to() -> None:
    recorded = load("results/tuned-demo-*", Path(__file__).parents[3])
    rows = recorded["places"][f"{SCENARIO}/{WORKLOAD}"]["rows"]
    for row, trial in TRIALS.items():
        tuned = Trial.from_dict(rows[row]["trial"])
        assert replace(tuned, learning_rate=trial.learning_rate, budget=None) == trial, row
        assert tuned.learning_rate == pytest.approx(trial.learning_rate, rel=0.01), row


def test_no_verdict_without_the_rows_that_it_needs_or_where_static_never_arrived() -> None:
    assert verdict_of({"static": {"time_to_target_s": [4.0]}}) is None
    assert verdict_of({"static": {"time_to_target_s": [None]}, "single": {"time_to_target_s": [3.0]}}) is None
    found = verdict_of({"static": {"time_to_target_s": [4.0]}, "single": {"time_to_target_s": [None]}})
    assert found["over_single"] == pytest.approx(3.0)


def test_every_column_and_every_row_of_the_table_is_explained_under_it() -> None:
    runs = [PolicyRun(name, 0, target=0.54) for name in (*TRIALS, AGAIN)]
    lines = legend(runs, 0.54)
    for name in (*HEAD[2:], *TRIALS, AGAIN):
        assert any(line.startswith(f"{name}: ") for line in lines), name
    assert all(len(row) == len(HEAD) for row in result_table(runs).rows)
