"""Runs trials on a cluster: on the virtual clock, or as real processes on emulated devices."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

import torch

from dynamix.events.run_folder import RunFolder
from dynamix.policies.registry import parse_name
from dynamix_lab.emulator import Emulation
from dynamix_lab.emulator.cluster import Mechanism
from dynamix_lab.experiment.experiment import POLICIES
from dynamix_lab.experiment.places import DISTURBANCE, Place
from dynamix_lab.harness.folder import adopt_events
from dynamix_lab.harness.runs import PolicyRun
from dynamix_lab.opponents.launch import LiveJob, LiveRanks, LiveRun, paced
from dynamix_lab.opponents.runs import RunLimits, TrialRun
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.opponents.virtual import fastest_worker, run_virtual
from dynamix_lab.tasks import make_workload

REPEATS = 3  # repetitions of a run whose devices overran


class Cluster(Protocol):
    """Runs trials at places. A context manager, which closes it.

    mechanisms   the mechanisms of its hosts; empty if they are simulated
    """

    mechanisms: dict[str, str]

    def run(self, trial: Trial, place: Place, seed: int, limits: RunLimits) -> TrialRun:
        """Make one run. The same seed means the same data, weights, order of samples and disturbances."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class VirtualClock:
    """Real training in this process, with time from a simulated cluster. Runs repeat to the last digit."""

    def __init__(self) -> None:
        self.mechanisms = dict[str, str]()

    def run(self, trial: Trial, place: Place, seed: int, limits: RunLimits) -> TrialRun:
        torch.set_num_threads(1)  # for such small nets threads would only wait for each other
        workload = make_workload(place.workload)
        world = place.world(seed, trial.batch_size)
        return run_virtual(trial, workload, workload.make_data(seed), world, seed=seed, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class EmulatedDevices:
    """Real processes, sockets and links. Each process computes as long as its device would.

    Ranks are started once for a place and a seed, and are reused for the next trial if both stay the same. If too many
    steps of a run overran their device, it is repeated, at most `repeats` times; if the last one overran, it says so.

    folder      where ranks write; decisions of all runs go to its events.jsonl
    mechanism   of the emulation: "auto", "privileged" or "duty-cycle" (no root)
    mechanisms  the mechanisms of the last run's hosts
    """

    def __init__(self, folder: RunFolder, *, mechanism: Mechanism = "auto", repeats: int = REPEATS) -> None:
        self.folder, self.mechanisms = folder, dict[str, str]()
        self._mechanism, self._repeats = mechanism, repeats
        self._started: tuple[tuple[Place, int, RunLimits], LiveRanks] | None = None
        self._stack = contextlib.ExitStack()

    def run(self, trial: Trial, place: Place, seed: int, limits: RunLimits) -> TrialRun:
        ranks, name = self._ranks(place, seed, limits), trial.row
        # Ranks work in folders of their own, so a policy's path must be absolute.
        found = trial.policy and str(parse_name(trial.policy, others=POLICIES).absolute())

        def make(attempt: int) -> LiveRun:
            return ranks.run(f"{name}, again {attempt}" if attempt else name, replace(trial, policy=found))

        live = paced(make, repeats=self._repeats)
        events = adopt_events(self.folder, ranks.events(live.name), policy=name, seed=seed)
        seen = PolicyRun(name, seed, place.job.target, events=events, step_ends_s=list(live.run.meetings_s))
        sizes = tuple((time_s, tuple(of_workers)) for time_s, of_workers in seen.sizes_over_time)
        waiting = None if math.isnan(seen.wait_fraction) else round(seen.wait_fraction, 6)
        return replace(live.run, trial=trial, overrun=live.overrun, waiting=waiting, sizes=sizes)

    def _ranks(self, place: Place, seed: int, limits: RunLimits) -> LiveRanks:
        wanted = place, seed, limits
        if self._started is not None and self._started[0] == wanted:
            return self._started[1]
        self.__exit__(None, None, None)
        scenario = place.load()
        fastest = fastest_worker(place.world(seed, 1), scenario.workers)
        file = Path(place.scenario)
        name = str(file.resolve()) if file.is_file() else place.scenario
        job = LiveJob(place.workload, seed, name, DISTURBANCE + seed, limits, fastest=fastest)
        folder, disturbed = self.folder.path / "ranks" / f"{place.key}-{seed}", DISTURBANCE + seed
        emulation = Emulation(scenario, seed=disturbed, run_dir=folder, mechanism=self._mechanism, keep_awake=True)
        hosts = self._stack.enter_context(emulation)
        self.mechanisms = hosts.mechanisms
        ranks = self._stack.enter_context(LiveRanks(hosts, job))
        self._started = wanted, ranks
        return ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._started = None
        self._stack.close()


def cluster_of(name: str, folder: RunFolder, *, mechanism: Mechanism = "auto", repeats: int = REPEATS) -> Cluster:
    """The cluster with this name in an experiment's file. Real processes write to `folder`."""
    if name == "virtual":
        return VirtualClock()
    return EmulatedDevices(folder, mechanism=mechanism, repeats=repeats)
