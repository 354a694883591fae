"""One experiment on every cluster: the same trial, place and seed, whatever makes the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from dynamix.errors import WorkerLostError
from dynamix.events.records import read_events
from dynamix.events.run_folder import RunFolder
from dynamix_lab.emulator import Emulation, load_scenario
from dynamix_lab.emulator.devices import DeviceSteps
from dynamix_lab.experiment.clusters import cluster_of
from dynamix_lab.experiment.places import Place
from dynamix_lab.opponents.launch import LiveJob, LiveRanks, LiveRun, paced
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
    with cluster_of(name, RunFolder("small", tmp_path / "run")) as cluster:
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
    with cluster_of("virtual", RunFolder("small", tmp_path / "run")) as cluster:
        first, second, other = (cluster.run(TRIALS["goodput"], place, seed, LIMITS) for seed in (3, 3, 4))
    assert first == second
    assert first.evaluations != other.evaluations


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
