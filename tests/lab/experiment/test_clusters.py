"""One experiment on every cluster: the same trial, place and seed, whatever makes the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dynamix_lab.emulator import Emulation, load_scenario
from dynamix_lab.emulator.devices import DeviceSteps
from dynamix_lab.experiment.clusters import cluster_of
from dynamix_lab.experiment.places import Place
from dynamix_lab.opponents.launch import LiveJob, LiveRanks, LiveRun, LiveWatch, paced, until_paced
from dynamix_lab.opponents.runs import RunLimits, TrialRun
from dynamix_lab.opponents.trial import LocalSettings, Trial

TRIALS = {
    "single": Trial("single", None, 128, 0.05),
    "static": Trial("static", "static", 32, 0.05),
    "local": Trial("local", None, 32, 0.05, local=LocalSettings(steps=4)),
    "goodput": Trial("goodput", "goodput", 32, 0.05),
}
LIMITS = RunLimits(samples=1280, every_samples=320)


@pytest.mark.parametrize(
    "name", ["virtual", pytest.param("emulator", marks=[pytest.mark.emulator, pytest.mark.multiproc])]
)
def test_rows_take_turns_on_a_cluster(name: str, tmp_path: Path) -> None:
    place = Place.of("device-even/teacher")
    with cluster_of(name, tmp_path) as cluster:
        runs = {row: cluster.run(TRIALS[row], place, 3, LIMITS) for row in ("static", "single")}
        again = cluster.run(TRIALS["static"], place, 3, LIMITS)
        static = cluster.run(TRIALS["static"], place, 4, LIMITS)
    assert all(run.samples >= 1280 and run.evaluations[-1].loss < run.evaluations[0].loss for run in runs.values())
    assert runs["static"].time_s < runs["single"].time_s
    assert static.seed == 4
    assert again.samples == runs["static"].samples
    assert bool(cluster.mechanisms) == (name == "emulator")


def test_the_virtual_clock_gives_the_same_run_again(tmp_path: Path) -> None:
    place = Place.of("device-neighbours/mnist1d-noisy-mlp")
    with cluster_of("virtual", tmp_path) as cluster:
        first, second, other = (cluster.run(TRIALS["goodput"], place, seed, LIMITS) for seed in (3, 3, 4))
    assert first == second
    assert first.evaluations != other.evaluations


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
    with Emulation(scenario, seed=1, run_dir=tmp_path) as hosts, LiveRanks(hosts, job, watch=watch) as ranks:
        runs = {name: ranks.run(name, trial) for name, trial in TRIALS.items()}
    assert watch.told == [f"{name} {what}" for name in TRIALS for what in ("began", "ended")]
    for name, live in runs.items():
        assert live.run.evaluations[-1].loss < live.run.evaluations[0].loss, name
        assert live.devices[1].steps > 0, name
    assert runs["single"].run.samples_by_worker[0] == 0
    assert runs["single"].devices[0].steps == 0
    slow, fast = runs["local"].run.samples_by_worker
    assert slow < fast  # steps in proportion to speed


def live(name: str, *, late: bool) -> LiveRun:
    """A run of which 2 % of the steps came late, or 1 %."""
    run = TrialRun(TRIALS[name], 0, "live", (), (1.0,), (8,), 1)
    return LiveRun(name, run, (DeviceSteps(100, 2 if late else 1, 0.1),), 0.0)


def test_a_run_that_overran_is_made_again_three_times_at_most() -> None:
    asked: list[int] = []

    def make(attempt: int, fine_at: int) -> LiveRun:
        asked.append(attempt)
        return live("static", late=attempt < fine_at)

    assert not paced(lambda attempt: make(attempt, 2), repeats=3).overrun
    assert paced(lambda attempt: make(attempt, 9), repeats=3).overrun
    assert asked == [0, 1, 2, 0, 1, 2, 3]


def test_of_several_runs_only_those_that_overran_are_made_again() -> None:
    asked: list[tuple[int, list[str]]] = []

    def make(trials: Mapping[str, Trial], attempt: int) -> list[LiveRun]:
        asked.append((attempt, list(trials)))
        return [live(name, late=name == "local" and attempt < 2) for name in trials]

    runs = until_paced(make, TRIALS, repeats=3)
    assert [run.name for run in runs] == list(TRIALS)
    assert asked == [(0, list(TRIALS)), (1, ["local"]), (2, ["local"])]
    assert not any(run.overrun for run in runs)
