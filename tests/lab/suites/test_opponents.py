"""The opponents' suite: what a practitioner would pick, tuned as well as ours, and whether distributing pays."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError, StateError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.emulator import Emulation, load_scenario
from dynamix_lab.emulator.devices import DeviceSteps
from dynamix_lab.harness.suite import Context
from dynamix_lab.opponents.launch import LiveJob, LiveRun, LiveWatch, launch, until_paced
from dynamix_lab.opponents.runs import RunLimits, TrialRun
from dynamix_lab.opponents.trial import LocalSettings, Trial
from dynamix_lab.results.record import load
from dynamix_lab.statistics import geometric_mean
from dynamix_lab.suites.opponents import live_pages, pages, virtual
from dynamix_lab.suites.opponents.best import link_section
from dynamix_lab.suites.opponents.live import LivePlan, LiveSuite, concluded
from dynamix_lab.suites.opponents.places import JOBS, V2, job_numbers
from dynamix_lab.suites.opponents.plan import USUAL, Place, recorded_runs
from dynamix_lab.suites.opponents.regimes import regime, regime_places
from dynamix_lab.suites.opponents.verdict import ratios, verdict
from dynamix_lab.suites.opponents.virtual import (
    Impatient,
    OpponentsPlan,
    OpponentsSuite,
    at_edge,
    confirmed,
    held_trials,
    world_at,
)
from dynamix_lab.yardstick import ProgressCurve
from tests.refused import refused


def test_a_smoke_run_says_whether_distributing_pays_and_leaves_a_whole_folder(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "opponents", "--quick", "--json", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    part = result["places"]["device-even/teacher"]
    assert set(part["times_s"]) == {"single", "static", "local"}
    speed = geometric_mean(part["times_s"]["single"]) / geometric_mean(part["times_s"]["static"])
    assert part["verdict"]["over_single"] == pytest.approx(speed)
    assert part["verdict"]["sentence"] in (tmp_path / "run" / "table.md").read_text()
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("times", "pays", "says"),
    [
        ({"single": [9.0], "static": [4.0], "local": [5.0]}, True, "Distributing pays: static is 2.25 times"),
        ({"single": [9.0], "static": [8.0], "local": [8.5]}, False, "Do not distribute this job"),
        ({"single": [9.0], "static": [8.0], "local": [3.0]}, False, "Do not meet after every step"),
        ({"single": [9.0], "static": [8.0], "dynamix": [1.0]}, False, "Do not distribute this job"),
    ],
)
def test_the_verdict_is_the_opponents_alone(times: dict[str, list[float]], pays: bool, says: str) -> None:
    found = verdict(times)
    assert found.pays is pays
    assert says in found.sentence


def test_claims_are_made_where_the_devices_together_are_three_times_the_fastest_and_the_curve_still_falls() -> None:
    for text in V2:
        place = Place.of(text)
        scenario = place.load()
        speeds = [host.cpu for host in scenario.hosts]
        assert sum(speeds) >= 3 * max(speeds), text
        efficient = math.ceil(scenario.device.fixed_ms / scenario.device.per_sample_ms)
        assert len(speeds) * efficient <= max(JOBS[place.workload].rates), text


def test_a_run_of_the_tuning_ends_at_twice_the_best_of_its_seed() -> None:
    place = Place.of("device-even/teacher")
    run = Impatient(place, replace(job_numbers("teacher"), limit_s=6.0, target=1.0))
    first = run(Trial("static", "static", 64, 0.1), 3)
    assert 6.0 <= first.time_s < 7.0
    run.best[3] = 1.0
    assert 2.0 <= run(Trial("static", "static", 64, 0.1), 3).time_s < 3.0
    assert run.best[3] == 1.0


def test_the_map_of_regimes_has_24_places_whose_exchange_is_what_they_say() -> None:
    places = regime_places()
    assert len(set(places)) == 24
    place = Place.of("regime-w4-s4-r0.3/teacher")
    world: Any = world_at(place, Trial("static", "static", 64, 0.1), seed=0)
    size = sum(bucket.size_bytes for bucket in world.buckets)
    assert world.meeting_s(size, 0.0) == pytest.approx(0.3 * world.device_s(64), rel=1e-3)
    for name in ("regime-w1-s1-r1", "regime-w4-s0-r1", "regime-w4-r1", "regime-w4-s1-r0"):
        refused(ConfigError, "regime", regime, name, "teacher")


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        (OpponentsPlan(("device-even/teacher",), ("static", "local")), "single"),
        (OpponentsPlan(("device-even/teacher",), ("single", "static", "hope")), "hope"),
        (OpponentsPlan(()), "places"),
        (OpponentsPlan(("device-even/teacher", "device-even/teacher")), "places"),
        (OpponentsPlan(("device-even/teacher",), seed=9000, seeds=2), "9001"),
        (OpponentsPlan(("device-even/digits",)), "digits"),
    ],
)
def test_a_plan_that_compares_nothing_is_refused(plan: OpponentsPlan, names: str) -> None:
    refused(ConfigError, names, plan.check)


TRIALS = {
    "single": Trial("single", None, 128, 0.05),
    "static": Trial("static", "static", 32, 0.05),
    "local": Trial("local", None, 32, 0.05, local=LocalSettings(steps=4)),
    "goodput": Trial("goodput", "goodput", 32, 0.05),
}


def tuned(tmp_path: Path, place: str = "device-even/teacher") -> Path:
    """A virtual run's result, as far as live runs read it."""
    path = tmp_path / "result.json"
    rows = {row: {"trial": trial.to_dict()} for row, trial in TRIALS.items()}
    path.write_text(json.dumps({"commit": "abc", "places": {place: {"rows": rows}}}))
    return path


def test_a_live_plan_takes_what_was_tuned_and_refuses_the_rest(tmp_path: Path) -> None:
    def of(path: Path, **other: Any) -> LivePlan:
        return LivePlan.of(path, **{"places": None, "rows": None, "seeds": 2, "seed": 0, "time_s": 5.0, **other})

    plan = of(tuned(tmp_path))
    plan.check()
    assert plan.names("device-even/teacher") == [*TRIALS, "static-again", "goodput-again"]
    assert plan.trial("device-even/teacher", "goodput-again") == TRIALS["goodput"]
    keys = [cell.key for cell in LiveSuite(plan).cells()]
    assert keys == ["curve-teacher", "device-even-teacher-0", "device-even-teacher-1"]
    refused(ConfigError, "dynamix", of, tuned(tmp_path), rows=("single", "static", "dynamix"))
    refused(ConfigError, "even/teacher", of, tuned(tmp_path), places=("even/teacher",))
    refused(ConfigError, "device hosts", of(tuned(tmp_path, "even/teacher")).check)
    (tmp_path / "result.json").write_text("{}")
    refused(StateError, "no result", of, tmp_path / "result.json")


def test_live_rows_may_be_any_and_the_reference_curve_is_static_s_all_the_same(tmp_path: Path) -> None:
    chosen = {"places": None, "seeds": 1, "seed": 0, "time_s": 5.0}
    plan = LivePlan.of(tuned(tmp_path), rows=("local", "single"), **chosen)
    plan.check()
    assert plan.names("device-even/teacher") == ["local", "single"]
    assert Trial.from_dict(plan.curves["device-even/teacher"]) == TRIALS["static"]
    path = tmp_path / "result.json"
    path.write_text(path.read_text().replace('"static": {"trial"', '"profiled": {"trial"'))
    refused(ConfigError, "static among them", LivePlan.of, path, rows=("local",), **chosen)


def live_part(seconds: dict[str, list[float]], **told: Any) -> dict[str, Any]:
    """What live runs of one place found, of rows that took so long."""
    about = {name: {"samples": [9.0], "time_to_target_s": [None], "beyond_curve": [0.0]} for name in seconds}
    usual = {"verdict": None, "first": {"best": "static", "level": []}, "ratios": {}, "pairs": [0], "late": []}
    return {"seconds": seconds, "about": about, **usual, "overruns": {name: [0] for name in seconds}, **told}


def test_workers_without_an_arbiter_are_compared_with_the_same_job_under_one() -> None:
    held = str(next(Path(__file__).parents[3].glob("results/auto-*/result.json")))
    place = "device-uneven/teacher"
    (central,), (alone,) = (held_trials(held, place, row) for row in ("dynamix", "stigmergic"))
    assert alone == replace(central, row="stigmergic", policy="stigmergic")
    times = {"dynamix": [4.0, 4.0], "stigmergic": [4.1, 4.1]}
    assert list(ratios(times)) == ["stigmergic/dynamix"]
    part = live_part(times, first={"best": "dynamix", "level": []}, ratios=ratios(times), pairs=[0, 1])
    made = live_pages.sections({"policies": times, "ratios": {}, "a_a": None, "places": {place: part}})
    assert made[1].table.rows == [
        [place, "4.000", "4.100", "1.025 (1.025-1.025)"],
        ["all places", "–", "–", "1.025 (1.025-1.025)"],
    ]
    assert made[2].text == ["First: dynamix. Pairs: 2."]
    assert made[2].table.head == ["row", "s per 1,000", "samples", "s to target", "over dynamix", "overruns"]


def test_a_row_that_learns_twice_as_fast_takes_half_the_seconds_whatever_its_batches() -> None:
    curve = ProgressCurve("teacher", (1000.0, 100_000.0), (2.0, 1.0))

    def run(samples_per_s: float, counted: float) -> dict[str, Any]:
        times = [float(t) for t in range(1, 31)]
        losses = [2.0 - math.log(samples_per_s * t / 1000) / math.log(100) for t in times]
        columns = {"time_s": times, "samples": [counted * t for t in times], "loss": losses, "score": [0.0] * 30}
        devices = [{"steps": 10, "overruns": 0, "overrun_s": 0.0}]
        return {"evaluations": columns, "devices": devices, "steps": 10, "samples_by_worker": [1], "overrun": False}

    speeds = {"single": 1100.0, "static": 2200.0, "goodput": 2200.0}
    pairs = [
        {"seed": seed, "runs": {name: run(speed, 5 * speed) for name, speed in speeds.items()}} for seed in (0, 1, 2)
    ]
    found = concluded(pairs, curve, job_numbers("teacher"), 25.0)
    assert found["ratios"]["static/single"]["median"] == pytest.approx(0.5, rel=1e-3)
    assert found["ratios"]["goodput/static"]["median"] == pytest.approx(1.0, rel=1e-3)
    assert found["verdict"]["pays"] is True
    assert found["late"] == []
    pairs[1]["runs"]["static"]["overrun"] = True
    assert concluded(pairs, curve, job_numbers("teacher"), 25.0)["late"] == ["static (seed 1)"]
    assert found["about"]["static"]["samples"] == [pytest.approx(5 * 2200 * 25)] * 3
    assert found["about"]["static"]["equivalent_samples"] == [pytest.approx(2200 * 25, rel=0.01)] * 3


def test_rows_past_the_end_of_the_reference_curve_are_named() -> None:
    said = {"best_synchronous": "static", "best_rarely": None, "sentence": "Distributing pays."}
    overruns = {"static": [0], "static-again": [2]}
    part = live_part({name: [1.0] for name in overruns}, verdict=said, overruns=overruns)
    part["about"]["static-again"] |= {"time_to_target_s": [2.0], "beyond_curve": [3.0]}
    made = live_pages.sections({"policies": {}, "ratios": {}, "a_a": None, "places": {"device-even/teacher": part}})
    assert made[1].text[1:] == [
        "First: static. Pairs: 1.",
        "Past the end of the reference curve, so slower here than they were: static-again.",
    ]
    assert made[1].table.rows[1] == ["static-again", "1.000", "9", "2.0 (1 of 1)", "–", "2"]


def test_a_page_names_the_rows_that_were_tuned_to_an_end_of_what_was_tried() -> None:
    recorded = load("results/opponents-*", Path(__file__).parents[3])
    together, product, *each = pages.sections(recorded)
    assert [row[0] for row in together.table.rows] == list(USUAL)
    assert [row[:2] for row in product.table.rows] == [[text, "dynamix"] for text in recorded["places"]]
    for section, part in zip(each, recorded["places"].values(), strict=True):
        ends = [row for row, cell in part["rows"].items() if cell["at_edge"]]
        said = [text for text in section.text if text.startswith("Tuned to an end")]
        assert len(said) == bool(ends)
        assert all(f"{row} (" in said[0] for row in ends)


def test_a_run_that_overran_is_made_again_three_times_at_most() -> None:
    asked: list[tuple[int, list[str]]] = []

    def make(trials: Any, attempt: int) -> list[LiveRun]:
        asked.append((attempt, list(trials)))
        late = DeviceSteps(100, 2 if attempt < 2 else 1, 0.1)
        fine = DeviceSteps(100)
        return [LiveRun(name, _run(trials[name]), (late if name == "local" else fine,), 0.0) for name in trials]

    runs = until_paced(make, TRIALS, repeats=3)
    assert [run.name for run in runs] == list(TRIALS)
    assert asked == [(0, list(TRIALS)), (1, ["local"]), (2, ["local"])]
    assert not any(run.overrun for run in runs)


def _run(trial: Trial) -> TrialRun:
    return TrialRun(trial, 0, "live", (), (1.0,), (8,), 1)


def test_a_winner_at_an_end_of_its_grid_is_marked() -> None:
    trials = [Trial("static", "static", size, rate) for size in (32, 64, 128) for rate in (0.1, 0.2, 0.4)]
    found = {(t.batch_size, t.learning_rate): at_edge(t, trials) for t in trials}
    assert found[64, 0.2] == []
    assert found[128, 0.2] == ["batch_size"]
    assert found[32, 0.4] == ["learning_rate", "batch_size"]


class Noted(LiveWatch):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def began(self, name: str) -> None:
        self.told.append(f"{name} began")

    def finished(self, run: LiveRun) -> None:
        self.told.append(f"{run.name} ended")


@pytest.mark.emulator
@pytest.mark.multiproc
def test_every_kind_of_row_runs_live_on_device_hosts(tmp_path: Path) -> None:
    device = {"fixed_ms": 10.0, "per_sample_ms": 0.5}
    scenario = load_scenario({"device": device, "hosts": [{"cpu": 0.5}, {"cpu": 1.0}]})
    job = LiveJob("teacher", 0, "device-even", 1, RunLimits(time_s=2.0, every_s=0.5), fastest=1)
    watch = Noted()
    with Emulation(scenario, seed=1, run_dir=tmp_path) as hosts:
        runs = {run.name: run for run in launch(hosts, job, TRIALS, watch=watch)}
    assert watch.told == [f"{name} {what}" for name in TRIALS for what in ("began", "ended")]
    for name, live in runs.items():
        assert live.run.evaluations[-1].loss < live.run.evaluations[0].loss, name
        assert live.devices[1].steps > 0, name
    assert runs["single"].run.samples_by_worker[0] == 0
    assert runs["single"].devices[0].steps == 0
    slow, fast = runs["local"].run.samples_by_worker
    assert slow < fast  # steps in proportion to speed


def test_the_usual_rows_are_known_to_the_tuning() -> None:
    OpponentsPlan(V2, USUAL).check()


def test_the_hosts_of_a_scenario_may_be_there_several_times() -> None:
    place = Place.of("device-paper-like-x4/teacher-classes")
    assert [host.cpu for host in place.load().hosts] == 4 * [h.cpu for h in load_scenario("device-paper-like").hosts]
    assert place.key == "device-paper-like-x4-teacher-classes"


def test_runs_of_an_earlier_result_stand_only_where_one_of_them_takes_as_long_again() -> None:
    def run(seed: int) -> dict[str, Any]:
        return {"time_to_target_s": 5.0 + seed, "limit_s": 9.0, "curve": {}}

    known = {seed: {"time_to_target_s": 5.0 + seed, "limit_s": 9.0} for seed in (0, 1)}
    assert ["curve" in one for one in confirmed([0, 1, 2], run, known, again=True)] == [True, False, True]
    assert ["curve" in one for one in confirmed([0, 1, 2], run, known, again=False)] == [False, False, True]
    known[0]["time_to_target_s"] = 5.1
    assert all("curve" in one for one in confirmed([0, 1, 2], run, known, again=True))


def test_rows_are_tuned_beside_held_ones_only_where_a_result_is_held() -> None:
    with pytest.raises(ConfigError, match="--held"):
        OpponentsPlan(("device-even/teacher",), ("single", "static", "lb_bsp-auto"), tuned=("lb_bsp-auto",)).check()
    held = "results/opponents-2026-11-23/result.json"
    rows = ("single", "static", "lb_bsp-auto")
    OpponentsPlan(("device-uneven/teacher",), rows, held=held, tuned=("lb_bsp-auto",)).check()
    seeds = [0, 1, 2, 3, 4]
    single = held_trials(held, "device-uneven/teacher", "single")[0]
    found = recorded_runs(Path(held), "device-uneven/teacher", "single", single)
    assert list(found) == seeds
    assert all(one["time_to_target_s"] > 0 for one in found.values())
    other = replace(single, learning_rate=1.0)
    assert recorded_runs(Path(held), "device-uneven/teacher", "single", other) == {}


def test_places_of_one_job_may_take_what_rows_were_tuned_to_at_one_of_them() -> None:
    held = str(next(Path(__file__).parents[3].glob("results/quota-demo-*/result.json")))
    rows, demo = ("single", "static", "local"), "demo/mnist1d"
    OpponentsPlan(("even/mnist1d", "slow-link/mnist1d"), rows, held=held, tuned_at=demo).check()
    refused(ConfigError, "tune it first", OpponentsPlan(("even/teacher",), rows, held=held).check)
    refused(ConfigError, "the same job", OpponentsPlan(("device-even/teacher",), rows, held=held, tuned_at=demo).check)
    refused(ConfigError, "--held", OpponentsPlan((demo,), rows, tuned_at=demo).check)


def test_a_row_that_is_tuned_beside_them_is_tuned_at_that_place_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_at = list[str]()

    def tuned(text: str, row: str, held: str | None, seeds: tuple[int, ...]) -> tuple[Trial, list[Any], list[Trial]]:
        tuned_at.append(f"{row} at {text}, {'held' if held else 'tuned'}")
        return (trial := Trial(row, None, 32, 0.1)), [], [trial]

    monkeypatch.setattr(virtual, "tuned_trial", tuned)
    monkeypatch.setattr(virtual, "recorded_runs", lambda *_: {})
    monkeypatch.setattr(virtual, "confirmed", lambda *_, **__: [])
    plan = OpponentsPlan(("even/mnist1d",), ("single", "static"), held="x", tuned=("static",), tuned_at="demo/mnist1d")
    suite = OpponentsSuite(plan)
    for cell in suite.cells():
        suite.run(cell, Context(RunFolder("opponents", tmp_path), {}, lambda *_: None))
    assert tuned_at == ["single at demo/mnist1d, held", "static at demo/mnist1d, tuned"]


def test_what_a_slow_link_costs_is_said_where_the_same_job_ran_without_it() -> None:
    part = {"times_s": {"lb_bsp-auto": [2.2, 2.2]}, "without_limit_s": {"lb_bsp-auto": [2.0, 2.0]}}
    section = link_section({"device-slow-link/teacher": part})
    assert section.table.rows[0][:4] == ["device-slow-link/teacher", "lb_bsp-auto", "2.2", "2.0"]
    assert section.table.rows[0][4].startswith("1.10")
    assert link_section({"device-slow-link/teacher": {**part, "without_limit_s": {"lb_bsp-auto": []}}}) is None


def test_what_a_run_was_tuned_to_is_held_and_the_choice_takes_the_better_of_both_ways() -> None:
    kept = str(next(Path(__file__).parents[3].glob("results/rounds-*/result.json")))
    place = "regime-w4-s1-r1/teacher"
    (over_gradients,), (apart,) = (held_trials(kept, place, row) for row in ("lb_bsp", "lb_bsp-parameters"))
    either = held_trials(kept, place, "lb_bsp-auto")
    assert [(t.batch_size, t.learning_rate) for t in either] == [
        (t.batch_size, t.learning_rate) for t in (over_gradients, apart)
    ]
    assert all(trial.meets_in_both_ways for trial in either)
    OpponentsPlan((place,), ("single", "static", "lb_bsp-auto"), held=kept).check()
    refused(ConfigError, "tune it first", OpponentsPlan((place,), ("single", "static", "goodput"), held=kept).check)
