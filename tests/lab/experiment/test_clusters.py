"""One experiment on every cluster: the same trial, place and seed, whatever makes the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynamix.errors import WorkerLostError
from dynamix.events.records import read_events
from dynamix.events.run_folder import RunFolder
from dynamix_lab.emulator import Emulation, load_scenario
from dynamix_lab.emulator.devices import DeviceSteps
from dynamix_lab.experiment.clusters import cluster_of
from dynamix_lab.experiment.experiment import load as experiment
from dynamix_lab.experiment.measures import SETTINGS
from dynamix_lab.experiment.places import Place
from dynamix_lab.experiment.suite import TableCase, read
from dynamix_lab.opponents.launch import LiveJob, LiveRanks, LiveRun, paced
from dynamix_lab.opponents.runs import RunLimits, TrialRun
from dynamix_lab.opponents.trial import LocalSettings, Trial
from dynamix_lab.results.record import load

TRIALS = {
    "single": Trial("single", None, 128, 0.05),
    "static": Trial("static", "static", 32, 0.05),
    "local": Trial("local", None, 32, 0.05, local=LocalSettings(steps=4)),
    "goodput": Trial("goodput", "goodput", 32, 0.05),
}
LIMITS = RunLimits(samples=1280, every_samples=320)
ROOT = Path(__file__).parents[3]


RECORDED = [
    *(("device-uneven/teacher", row) for row in ("static, warm-up", "lb_bsp", "local SGD", "post-local SGD", "DiLoCo")),
    ("device-slow-link/teacher", "static, r0"),
]


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    """The cases of the newest `dynamix bench first-run`."""
    found = load("results/first-run-*", ROOT)
    assert found is not None
    return found["cases"]


@pytest.mark.parametrize(("where", "row"), RECORDED)
def test_a_recorded_run_comes_out_again_to_the_last_digit(
    tmp_path: Path, recorded: list[dict[str, Any]], where: str, row: str
) -> None:
    """So samples, weights, losses, schedules, meetings and devices are as they were."""
    cases = {(case["place"], case["setting"], case["batch"]): case for case in recorded}
    kept, place = cases[where, "finish", 128]["rows"][row], Place.of(where)
    trial, limits = Trial.from_dict(kept["trial"]), SETTINGS["finish"].limits(place)
    with cluster_of("virtual", RunFolder("again", tmp_path / "run")) as cluster:
        run = cluster.run(trial, place, kept["seed"][0], limits)
    found = read(TableCase("finish", place, 128), {**run.to_dict(), "overrun": run.overrun})
    assert found == {name: kept[name][0] for name in found}


def test_an_experiment_means_the_trials_and_the_least_times_that_were_recorded(recorded: list[dict[str, Any]]) -> None:
    """Recipes of one worker for W of them; and what physics allows, also where a device is lost and replaced."""
    plan = experiment("first-run")
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
