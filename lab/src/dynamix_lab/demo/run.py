"""`dynamix demo`: every row of one job on emulated device hosts, seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dynamix.events.run_folder import RunFolder, commit, machine
from dynamix_lab.demo.report import about_hosts, say_end, write_report
from dynamix_lab.demo.rows import SOURCE, WORKLOAD
from dynamix_lab.demo.settings import CENSOR_FACTOR, DemoSettings
from dynamix_lab.demo.watch import DemoWatch, scoring
from dynamix_lab.emulator import Emulation, Scenario, load_scenario
from dynamix_lab.experiment.places import DISTURBANCE, Place
from dynamix_lab.experiment.verdict import SINGLE, verdict
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.finished import FinishedSeeds, facts_of
from dynamix_lab.harness.folder import read_run
from dynamix_lab.harness.host import host
from dynamix_lab.harness.runs import AGAIN, PolicyRun, summarise
from dynamix_lab.opponents.launch import LiveJob, LiveRanks, LiveRun, until_paced
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.opponents.virtual import fastest_worker
from dynamix_lab.statistics import censored
from dynamix_lab.tasks import make_workload

REPEATS = 3  # of a run whose devices overran, where pairs are compared
_NOT_KNOWN = ("overhead_s", "seconds_per_step")  # of rows that are no policies


def run_demo(
    settings: DemoSettings, folder: RunFolder, *, display: Display | None = None
) -> tuple[dict[str, Any], bool]:
    """Run all rows for all seeds; returns result.json and whether every run reached its end.

    Writes run.json, events.jsonl, result.json and report.html to `folder`. Seeds that `folder` has finished already
    are not run again. When interrupted, what is finished is summarised before `KeyboardInterrupt` goes on. Raises
    `DynamixError`s of bad settings, of the emulator, or of a lost worker; nothing is left running.
    """
    settings.check()
    torch.set_num_threads(1)
    return _Demo(settings, folder, display or Display(target=settings.job.target)).run()


class _Demo:
    """One call."""

    def __init__(self, settings: DemoSettings, folder: RunFolder, display: Display) -> None:
        self.settings, self.folder, self.display = settings, folder, display
        self.scenario = load_scenario(settings.scenario)
        self.facts = _facts(settings, self.scenario)
        self.facts["mechanisms"] = read_run(folder).get("mechanisms", {})
        self.started_on = host()
        self.runs: list[PolicyRun] = []  # finished, and those of the seed that goes on

    def run(self) -> tuple[dict[str, Any], bool]:
        settings, kept = self.settings, FinishedSeeds(self.folder, self.facts)
        finished = kept.load(self.facts["seeds"], self.display.say)
        self.runs = [run for of_seed in finished.values() for run in of_seed]
        try:
            with self.display.live():
                for seed in (seed for seed in self.facts["seeds"] if seed not in finished):
                    before = list(self.runs)
                    self.runs = before + self._pair(seed)
                    kept.save(seed, self.runs)
        except KeyboardInterrupt:
            self.runs = kept.whole(self.runs)
            if self.runs:
                self._conclude(interrupted=True)
                self.display.say(f"interrupted: go on with --resume --out {self.folder.path}")
            raise
        result = self._conclude()
        return result, all(settings.quick or run.time_to_target_s is not None for run in self.runs)

    def _pair(self, seed: int) -> list[PolicyRun]:
        """Every row once with this seed."""
        self.display.say(f"seed {seed}: making data, starting {WORKLOAD} on emulated devices")
        found: dict[str, PolicyRun] = {}

        def make(trials: Mapping[str, Trial], attempt: int) -> list[LiveRun]:
            if attempt:
                self.display.say(f"seed {seed}: too many late steps, again: {', '.join(trials)}")
            made, runs = self._launch(seed, trials, attempt)
            found.update({run.policy: run for run in made})
            return runs

        repeats = REPEATS if self.settings.seeds > 1 and not self.settings.quick else 0
        until_paced(make, self.settings.for_ranks(self.settings.order(seed)), repeats=repeats)
        return [found[name] for name in self.settings.trials]

    def _launch(self, seed: int, trials: Mapping[str, Trial], attempt: int) -> tuple[list[PolicyRun], list[LiveRun]]:
        """One start of the ranks: runs as the demo keeps them, and as the launch saw them."""
        settings, scenario = self.settings, self.scenario
        workload = make_workload(WORKLOAD)
        world = Place(settings.scenario, WORKLOAD).world(seed, next(iter(trials.values())).batch_size)
        job = LiveJob(
            WORKLOAD,
            seed,
            settings.scenario_path,
            DISTURBANCE + seed,
            settings.limits,
            fastest=fastest_worker(world, scenario.workers),
        )
        ranks = self.folder.path / "ranks" / (f"{seed}-{attempt}" if attempt else str(seed))
        with Emulation(
            scenario, seed=DISTURBANCE + seed, run_dir=ranks, mechanism=settings.mechanism, keep_awake=True
        ) as hosts:
            self.facts["mechanisms"] = hosts.mechanisms
            self.folder.write_run(**self.facts, host=self.started_on)
            self.display.say(about_hosts(hosts.mechanisms))
            before = len(self.runs)
            with (
                DemoWatch(
                    hosts,
                    self.folder,
                    self.display,
                    self.runs,
                    trials,
                    scoring(workload, seed),
                    seed=seed,
                    attempt=attempt,
                    target=settings.job.target,
                    stops=not settings.quick,
                ) as watch,
                LiveRanks(hosts, job, watch=watch, snapshots=True) as started,
            ):
                runs = [started.run(name, trial) for name, trial in trials.items()]
        return self.runs[before:], runs

    def _conclude(self, *, interrupted: bool = False) -> dict[str, Any]:
        """Write result.json and report.html of the runs, and say what they hold."""
        said = {"interrupted": True} if interrupted else {}
        result = {
            **self.facts,
            **said,
            "commit": commit(),
            "machine": machine(),
            **summarise(self.runs, censor_factor=CENSOR_FACTOR),
        }
        trials = self.settings.trials
        for name, part in result["policies"].items():
            mine = [run for run in self.runs if run.policy == name]
            for key in _NOT_KNOWN:
                del part[key]
            part["trial"] = trials[name].to_dict()
            part["overruns"] = [[device.overruns for device in run.devices] for run in mine]
            part["overrun"] = [run.overrun for run in mine]
        if "dynamix" in result["policies"]:
            result["policies"]["dynamix"]["policy"] = result["settings"]["policy"]
        result["verdict"] = verdict_of(result["policies"])
        self.folder.write_result(result)
        write_report(self.folder.path / "report.html", self.runs, result, self.scenario)
        say_end(self.display, self.runs, result)
        self.display.say(f"report: {self.folder.path / 'report.html'}")
        return result


def _facts(settings: DemoSettings, scenario: Scenario) -> dict[str, Any]:
    return facts_of(
        scenario,
        {seed: settings.order(seed) for seed in range(settings.seed, settings.seed + settings.seeds)},
        command=settings.command,
        workload=WORKLOAD,
        target=settings.job.target,
        quick=settings.quick,
        settings={**settings.facts(), "quick": settings.quick, "tuned_by": SOURCE},
    )


def verdict_of(policies: Mapping[str, Mapping[str, Sequence[float | None]]]) -> dict[str, Any] | None:
    """Does distributing pay? A run that did not arrive counts at three times static's time; None where rows are
    missing, or static never arrived.

    >>> verdict_of({"single": {"time_to_target_s": [90.0]}, "static": {"time_to_target_s": [40.0]}})["sentence"]
    'Distributing pays: static is 2.25 times as fast as the fastest worker alone.'
    """
    if SINGLE not in policies or "static" not in policies:
        return None
    times = {name: part["time_to_target_s"] for name, part in policies.items() if name != AGAIN}
    arrived = [i for i, time_s in enumerate(times["static"]) if time_s is not None]
    if not arrived:
        return None
    bounds = [CENSOR_FACTOR * float(times["static"][i] or 0.0) for i in arrived]
    kept = {name: censored([of_row[i] for i in arrived], bounds).tolist() for name, of_row in times.items()}
    return verdict(kept).to_dict()
