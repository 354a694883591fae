"""An experiment is a file: what it may say, which runs it means on every cluster, and how they are read."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.records import read_events
from dynamix.events.run_folder import RunFolder, machine
from dynamix_lab.emulator import Emulation, load_scenario
from dynamix_lab.emulator.devices import DeviceSteps
from dynamix_lab.experiment.clusters import cluster_of
from dynamix_lab.experiment.experiment import Experiment, Row, Tuning, load, shipped
from dynamix_lab.experiment.measures import SETTINGS
from dynamix_lab.experiment.places import Place
from dynamix_lab.experiment.regimes import regime, regime_places
from dynamix_lab.experiment.suite import ExperimentSuite, TableCase, at_edge, read
from dynamix_lab.opponents.launch import LiveJob, LiveRanks, LiveRun, paced
from dynamix_lab.opponents.runs import (
    FALLS,
    Evaluation,
    RunLimits,
    RunLog,
    TrialRun,
    mean_scores,
    reached_for_good,
)
from dynamix_lab.opponents.trial import LocalSettings, Trial
from dynamix_lab.results.record import load as result
from tests.refused import refused

TRIALS = {
    "single": Trial("single", None, 128, 0.05),
    "static": Trial("static", "static", 32, 0.05),
    "local": Trial("local", None, 32, 0.05, local=LocalSettings(steps=4)),
    "goodput": Trial("goodput", "goodput", 32, 0.05),
}
LIMITS = RunLimits(samples=1280, every_samples=320)
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "design" / "experiments.md").read_text()


RECORDED = [
    *(("device-uneven/teacher", row) for row in ("static, warm-up", "lb_bsp", "local SGD", "post-local SGD", "DiLoCo")),
    ("device-slow-link/teacher", "static, r0"),
]


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    """The cases of the newest `dynamix bench first-run`."""
    found = result("results/first-run-*", ROOT)
    assert found is not None
    return found["cases"]


@pytest.mark.parametrize(("where", "row"), RECORDED)
def test_a_recorded_run_comes_out_again_to_the_last_digit(
    tmp_path: Path, recorded: list[dict[str, Any]], where: str, row: str
) -> None:
    """So samples, weights, losses, schedules, meetings and devices are as they were. Kinds of CPU round unlike."""
    cases = {(case["place"], case["setting"], case["batch"]): case for case in recorded}
    kept, place = cases[where, "finish", 128]["rows"][row], Place.of(where)
    trial, limits = Trial.from_dict(kept["trial"]), SETTINGS["finish"].limits(place)
    with cluster_of("virtual", RunFolder("again", tmp_path / "run")) as cluster:
        run = cluster.run(trial, place, kept["seed"][0], limits)
    found = read(TableCase("finish", place, 128), {**run.to_dict(), "overrun": run.overrun})
    once = {name: kept[name][0] for name in found}
    if machine()["cpu"] != result("results/first-run-*", ROOT)["machine"]["cpu"]:
        assert found.pop("score") == pytest.approx(once.pop("score"), abs=0.002)
    assert found == once


def test_an_experiment_means_the_trials_and_the_least_times_that_were_recorded(recorded: list[dict[str, Any]]) -> None:
    """Recipes of one worker for W of them; and what physics allows, also where a device is lost and replaced."""
    plan = load("first-run")
    for case in recorded:
        place = Place.of(case["place"])
        for row in plan.rows_at(place, case["setting"]):
            trial = row.trial(place.job, case["setting"], case["batch"], place.load().workers)
            assert trial == Trial.from_dict(case["rows"][row.name]["trial"]), (case["place"], row.name)
        if case["least_s"]:
            assert place.least_s(0, case["batch"], place.outages) == case["least_s"]["0"]


@pytest.mark.emulator
@pytest.mark.multiproc
def test_rows_take_turns_on_a_cluster(tmp_path: Path) -> None:
    place = Place.of("device-even/teacher")
    with cluster_of("emulator", RunFolder("small", tmp_path / "run")) as cluster:
        static, single = (cluster.run(TRIALS[row], place, 3, LIMITS) for row in ("static", "single"))
        again = cluster.run(TRIALS["static"], place, 3, LIMITS)
        other = cluster.run(TRIALS["static"], place, 4, LIMITS)
    assert all(run.samples >= 1280 and run.evaluations[-1].loss < run.evaluations[0].loss for run in (static, single))
    assert static.time_s < single.time_s
    assert other.seed == 4
    assert again.samples == static.samples
    assert cluster.mechanisms


@pytest.mark.emulator
@pytest.mark.multiproc
def test_every_kind_of_row_runs_live_on_device_hosts(tmp_path: Path) -> None:
    device = {"fixed_ms": 10.0, "per_sample_ms": 0.5}
    scenario = load_scenario({"device": device, "hosts": [{"cpu": 0.5}, {"cpu": 1.0}]})
    job = LiveJob("teacher", 0, "device-even", 1, RunLimits(time_s=2.0, every_s=0.5), fastest=1)
    with Emulation(scenario, seed=1, run_dir=tmp_path) as hosts, LiveRanks(hosts, job) as ranks:
        runs = {name: ranks.run(name, trial) for name, trial in TRIALS.items()}
        assert read_events(ranks.events("goodput"))
    for name, live in runs.items():
        assert live.run.evaluations[-1].loss < live.run.evaluations[0].loss, name
        assert live.devices[1].steps > 0, name
    assert runs["single"].run.samples_by_worker[0] == 0
    assert runs["single"].devices[0].steps == 0
    slow, fast = runs["local"].run.samples_by_worker
    assert slow < fast  # steps in proportion to speed


def started() -> list[psutil.Process]:
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [child for child in children if "dynamix_lab.opponents.rank" in " ".join(child.cmdline())]


class LosesARank(Emulation):
    """Hosts of which one rank dies once training begins."""

    def start_clock(self) -> None:
        super().start_clock()
        started()[1].send_signal(signal.SIGKILL)


@pytest.mark.multiproc
def test_a_rank_that_dies_ends_the_run_with_an_error_that_names_it(tmp_path: Path) -> None:
    scenario = load_scenario({"device": {"fixed_ms": 10.0, "per_sample_ms": 0.5}, "hosts": [{"cpu": 1.0}] * 2})
    job = LiveJob("teacher", 0, "device-even", 1, RunLimits(time_s=60.0))
    with (
        LosesARank(scenario, seed=1, run_dir=tmp_path, mechanism="duty-cycle") as hosts,
        LiveRanks(hosts, job) as ranks,
        pytest.raises(WorkerLostError, match="rank"),
    ):
        ranks.run("static", TRIALS["static"])
    assert started() == []


def live(name: str, *, late: bool) -> LiveRun:
    """A run of which 2 % of the steps came late, or 1 %."""
    run = TrialRun(TRIALS[name], 0, "live", (), (1.0,), (8,), 1)
    return LiveRun(name, run, (DeviceSteps(100, 2 if late else 1, 0.1),))


def test_a_run_that_overran_is_made_again_three_times_at_most() -> None:
    asked: list[int] = []

    def make(attempt: int, fine_at: int) -> LiveRun:
        asked.append(attempt)
        return live("static", late=attempt < fine_at)

    assert not paced(lambda attempt: make(attempt, 2), repeats=3).overrun
    assert paced(lambda attempt: make(attempt, 9), repeats=3).overrun
    assert asked == [0, 1, 2, 0, 1, 2, 3]


EVEN = "device-even/teacher"
FILE = """
title = "A small one"
cluster = "virtual"
settings = ["finish"]
batches = [32]
seeds = 1
against = ["static"]
beside = ["static"]
places = ["device-even/teacher"]

[rows.single]

[rows.static]
policy = "static"
rate = "W r0"
"""


def written(tmp_path: Path, text: str = FILE) -> str:
    path = tmp_path / "small.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_experiment_that_is_shipped_can_be_run() -> None:
    for name in shipped():
        experiment = load(name)
        experiment.check()
        experiment.smoke().check()
        keys = [cell.key for cell in ExperimentSuite(experiment).cells()]
        assert len(set(keys)) == len(keys), name


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ('cluster = "virtual"', 'cluster = "cloud"', "cloud"),
        ('settings = ["finish"]', 'settings = ["begin"]', "begin"),
        ('against = ["static"]', 'against = ["hope"]', "hope"),
        ("batches = [32]", "batches = [33]", "33"),
        ("batches = [32]", "", "batches"),
        ("seeds = 1", "seeds = 0", "seeds"),
        ("seeds = 1", "colour = 1", "colour"),
        ('beside = ["static"]', 'beside = ["statics"]', "statics"),
        ('policy = "static"', 'policy = "statics"', "statics"),
        ('policy = "static"', 'policy = "static"\nworkloads = ["teachers"]', "teachers"),
        ("[rows.single]", "[rows.single]\n[rows.Single]\n[rows.'single;']", "letters or digits"),
        ("[rows.single]", "[rows.single]\nrounds = 3", "local steps"),
        ('rate = "W r0"', 'rate = "W^2 r0"', r"W\^2 r0"),
        ('policy = "static"', 'policies = "static"', "policies"),
        ("[rows.single]", "[rows.single", "TOML"),
        ('"device-even/teacher"', '"device-even/digits"', "digits"),
        ('"device-even/teacher"', '"even/teacher"', "device hosts"),
        ('"device-even/teacher"', '"device-even/teacher", "device-even/teacher"', "differ"),
        ('cluster = "virtual"\nsettings = ["finish"]', 'cluster = "emulator"\nsettings = ["reach"]', "live"),
        ("[rows.single]", "[tuning]\nseeds = [9001]\n[rows.single]", "tuning"),
    ],
)
def test_a_file_that_means_nothing_is_refused_by_what_is_wrong(tmp_path: Path, old: str, new: str, names: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigError, match=names):
        load(written(tmp_path, FILE.replace(old, new))).check()


def test_a_file_may_take_from_another_what_it_does_not_say() -> None:
    live, first = load("first-run-live"), load("first-run")
    assert [row.name for row in live.rows] == [*(row.name for row in first.rows), "static, W r0, again"]
    assert (live.cluster, live.against) == ("emulator", first.against)
    refused(ConfigError, "TOML file", load, "nothing-of-this-name")


def test_a_smoke_run_leaves_a_whole_folder(tmp_path: Path) -> None:
    out, file = tmp_path / "run", written(tmp_path, FILE.replace("seeds = 1", "seeds = 1\nbudget = 6400"))
    done = CliRunner().invoke(app, ["bench", "experiment", file, "--quick", "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (case,) = json.loads((out / "result.json").read_text())["cases"]
    assert list(case["rows"]) == ["single", "static"]
    assert case["rows"]["static"]["samples"][0] >= 6400
    assert case["least_s"]["0"] < case["rows"]["static"]["seconds"][0] < case["rows"]["single"]["seconds"][0]
    assert "Distributing pays: static" in (out / "table.md").read_text()
    assert "<svg" in (out / "report.html").read_text()
    assert f"run folder: {out}" in done.stderr
    two = written(tmp_path, FILE.replace('"device-even/teacher"', '"device-even/teacher", "device-uneven/teacher"'))
    done = CliRunner().invoke(
        app, ["bench", "experiment", two, "--quick", "--out", str(out)]
    )  # the folder is not empty
    assert done.stderr.startswith("quick: one setting, batch and seed, without the places device-uneven/teacher\n")


def test_a_row_that_is_not_there_is_refused_before_any_choice_of_rows(tmp_path: Path) -> None:
    file = written(tmp_path, FILE.replace('against = ["static"]', 'against = ["statik"]'))
    done = CliRunner().invoke(app, ["bench", "experiment", file, "--quick", "--out", str(tmp_path / "run")])
    assert "against='statik' is not possible: allowed is single, static;" in done.stderr


def test_a_place_may_be_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mycluster.yaml").write_text(PAGE.partition("```yaml\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    assert Place.of("mycluster.yaml/teacher").load().workers == 3


def test_the_page_lists_every_field_of_a_file() -> None:
    for kind in (Experiment, Row, Tuning):
        for field in fields(kind):
            assert field.name == "name" or f"| `{field.name}` |" in PAGE, f"{kind.__name__}.{field.name}"
    for field in fields(LocalSettings):
        assert f"`{field.name}`" in PAGE, field.name


def run_of(scores: list[float], *, every: int = 100, losses: list[float] | None = None) -> TrialRun:
    """A run that is scored at its start and after every `every` samples, a second each."""
    losses = losses or [1.0] * len(scores)
    evaluations = tuple(Evaluation(float(i), every * i, losses[i], score) for i, score in enumerate(scores))
    return TrialRun(Trial("x", None, 8, 0.1), 0, "virtual", evaluations, (len(scores) - 1.0,), (1,), 1)


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), max_size=40), st.floats(0.1, 0.9))
def test_a_target_is_reached_where_no_later_mean_falls_below_it(scores: list[float], target: float) -> None:
    means = mean_scores(range(0, 10 * len(scores), 10), scores, 50)
    at = reached_for_good(means, target)
    if at is None:
        assert not means or means[-1] is None or means[-1] < target
    else:
        assert means[at] >= target
        assert all(mean >= target - FALLS for mean in means[at + 1 :])


def test_a_row_that_meets_seldom_is_read_over_as_many_samples_as_one_that_meets_often() -> None:
    place = Place.of(EVEN)
    budget = place.job.budget
    often = run_of([0.1] + [0.5] * 35 + [0.7] * 5, every=budget // 40)
    seldom = run_of([0.1, 0.5, 0.5, 0.5, 0.7], every=budget // 4)
    finish, reach = SETTINGS["finish"], SETTINGS["reach"]
    assert [finish.read(run, place).score for run in (often, seldom)] == [pytest.approx(0.7)] * 2
    twice = run_of([0.1, 0.9], every=budget)  # neither the untrained model nor a memory of it counts
    assert finish.read(twice, place).score == 0.9
    assert reach.read(twice, place).seconds == 1.0


def test_what_is_read_from_a_run_depends_on_the_setting() -> None:
    place = Place.of(EVEN)
    target, every = place.job.target, place.job.every_samples
    lucky = run_of([0.0] * 6 + [target, target] + [0.5] * 6, every=every)
    assert SETTINGS["crossing"].read(lucky, place).seconds == 6.0
    assert not SETTINGS["reach"].read(lucky, place).arrived
    steady = run_of([0.0] * 6 + [1.0] * 10, every=every)
    found = SETTINGS["reach"].read(steady, place)
    assert found.arrived
    assert found.seconds == pytest.approx(9 + (target - 0.8) / 0.2)  # means of five: 0.8 after 9 s, 1.0 after 10 s
    finished = SETTINGS["finish"].read(steady, place)
    assert (finished.seconds, finished.score, finished.arrived) == (15.0, 1.0, True)
    broken = run_of([0.5, 0.0], losses=[1.0, math.inf])
    assert not SETTINGS["finish"].read(broken, place).arrived
    assert SETTINGS["finish"].read(broken, place).score == 0.0


@pytest.mark.parametrize("meeting", [10, 40])
def test_a_run_to_a_target_goes_on_until_it_has_stayed_there(meeting: int) -> None:
    limits = RunLimits(samples=100_000, target=0.8, stays=True, every_samples=10)
    log = RunLog(Trial("x", None, 8, 0.1), limits, 1)
    log.scored(1.0, 0.0)
    while not log.arrived:
        log.met(log.time_s + 1, np.array([meeting]))
        log.scored(0.1, 0.9 if log.samples >= 200 else 0.1)
    assert 300 <= log.samples <= 380  # ten times ten samples after the mean over fifty is there
    refused(ConfigError, "every_samples", RunLimits, samples=100, target=0.8, stays=True)


def test_the_map_of_regimes_has_24_places_whose_exchange_is_what_they_say() -> None:
    places = regime_places()
    assert len(set(places)) == 24
    place = Place.of("regime-w4-s4-r0.3/teacher")
    world = place.world(0, 64)
    size = sum(bucket.size_bytes for bucket in world.buckets)
    assert world.meeting_s(size, 0.0) == pytest.approx(0.3 * world.device_s(64), rel=1e-3)
    for name in ("regime-w1-s1-r1", "regime-w4-s0-r1", "regime-w4-r1", "regime-w4-s1-r0"):
        refused(ConfigError, "regime", regime, name, "teacher")
    four = Place.of("device-paper-like-x4/teacher-classes").load().hosts
    assert [host.cpu for host in four] == 4 * [host.cpu for host in load_scenario("device-paper-like").hosts]


def test_a_winner_at_an_end_of_what_was_tried_is_marked() -> None:
    trials = [Trial("static", "static", size, rate) for size in (32, 64, 128) for rate in (0.1, 0.2, 0.4)]
    found = {(t.batch_size, t.learning_rate): at_edge(t, trials) for t in trials}
    assert found[64, 0.2] == []
    assert found[128, 0.2] == ["batch_size"]
    assert found[32, 0.4] == ["learning_rate", "batch_size"]
    longer = [Trial("static", "static", 32, 0.1, schedule="cosine", budget=samples) for samples in (700, 1000, 1400)]
    assert at_edge(longer[2], longer) == ["budget"]
    assert at_edge(longer[1], [*longer, *trials]) == []


def test_a_tuned_row_is_run_at_what_won_on_tuning_seeds_that_are_its_own(tmp_path: Path) -> None:
    rows = FILE.partition("[rows.single]")[0].replace('["finish"]', '["crossing"]').replace("batches = [32]", "")
    tuned = rows + 'rows = ["single", "static"]\n[tuning]\nseeds = [9001]\nclimbs = 0\n'
    same = tuned.replace("[tuning]", "first_seed = 9001\n[tuning]")
    with pytest.raises(ConfigError, match="9001"):
        load(written(tmp_path, same)).check()
    asked: list[tuple[int, float]] = []

    class Cluster:
        def __init__(self) -> None:
            self.mechanisms = dict[str, str]()

        def run(self, trial: Trial, place: Place, seed: int, limits: Any) -> TrialRun:
            asked.append((seed, trial.learning_rate))
            quick = trial.learning_rate == pytest.approx(0.1) and trial.batch_size == 64
            scores = [0.0, 1.0, 1.0] if quick else [0.0] * 9 + [1.0, 1.0]
            return TrialRun(trial, seed, "virtual", run_of(scores).evaluations, (9.0,), (1,), 1)

    suite = ExperimentSuite(load(written(tmp_path, tuned)))
    made = suite.row_of(Cluster(), suite.cases()[0], suite.plan.rows[1], [0])["rows"]["static"]
    assert (made["trial"]["batch_size"], made["trial"]["learning_rate"]) == (64, pytest.approx(0.1))
    assert len(made["tried"]) == 9
    assert asked[-1] == (0, pytest.approx(0.1))
