"""`dynamix bench opponents --live RESULT`: what the virtual clock tuned, on emulated hosts, on one progress curve."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from dynamix.errors import ConfigError
from dynamix.events.run_folder import commit, machine
from dynamix_lab.emulator import Emulation
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.opponents.launch import LiveJob, LiveRun, launch, until_paced
from dynamix_lab.opponents.runs import RunLimits, TrialRun
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.opponents.virtual import fastest_worker, run_virtual
from dynamix_lab.opponents.world import DeviceWorld
from dynamix_lab.statistics import a_a, balanced_order, paired_ratio, who_wins
from dynamix_lab.suites.opponents import live_pages
from dynamix_lab.suites.opponents.places import JobNumbers, job_numbers
from dynamix_lab.suites.opponents.plan import AGAIN, TWICE, Place, check_names, tuned_trials
from dynamix_lab.suites.opponents.verdict import OVER, SINGLE, over, ratios, verdict
from dynamix_lab.suites.opponents.virtual import DISTURBANCE, world_at
from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS
from dynamix_lab.yardstick import ProgressCurve

REPEATS = 3  # of a run whose devices overran
BEYOND_S = 3.0  # after the clock time at which runs are compared, so that each has a snapshot there
SNAPSHOTS = 40  # of a run
CURVE_BUDGETS = 6  # samples of the reference curve, in budgets of its job


@dataclass(frozen=True, slots=True)
class LivePlan:
    """What one call runs.

    trials   place -> row -> what it was tuned to
    curves   place -> what static was tuned to, by which the job's reference curve is made
    seeds    pairs at each place, the first of them `seed`
    time_s   clock time at which runs are compared
    tuned_by   commit of the virtual run that tuned them
    """

    trials: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Any]
    seeds: int
    seed: int
    time_s: float
    tuned_by: str = field(default="")

    @classmethod
    def of(
        cls,
        result: Path,
        *,
        places: Sequence[str] | None,
        rows: Sequence[str] | None,
        seeds: int,
        seed: int,
        time_s: float,
    ) -> LivePlan:
        """The plan for what `result`, a virtual run's result.json, was tuned to.

        Raises `ConfigError` for places and rows that it does not hold, `StateError` for a file that is none.
        """
        known, commit = tuned_trials(result)
        for name in places or ():
            if name not in known:
                raise ConfigError("places", name, ", ".join(known), "tune it first")
        chosen = {place: dict(known[place]) for place in places or known}
        curves = {}
        for place, trials in chosen.items():
            if "static" not in trials:
                raise ConfigError(f"rows of {place}", ", ".join(trials), "static among them", "tune it too")
            curves[place] = trials["static"]
            for row in rows or ():
                if row not in trials:
                    raise ConfigError(f"rows of {place}", row, ", ".join(trials), "tune it first")
            chosen[place] = {row: trials[row] for row in rows or trials}
        return cls(chosen, curves, seeds, seed, time_s, commit)

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        if self.seeds < 1 or self.seed < 0 or set(self.fresh) & set(TUNING_SEEDS):
            raise ConfigError("seed, seeds", (self.seed, self.seeds), "1 or more, not the tuning seeds", "take others")
        if not 5 <= self.time_s < math.inf:
            raise ConfigError("seconds", self.time_s, "5 or more", "compare later")
        for text, trials in self.trials.items():
            check_names(tuple(trials))
            place = Place.of(text)
            job_numbers(place.workload)
            if place.load().device is None:
                allowed = "scenarios of device hosts, whose times scatter little"
                raise ConfigError("places", text, allowed, "take hosts with a device")

    @property
    def fresh(self) -> list[int]:
        """The seeds of the pairs."""
        return list(range(self.seed, self.seed + self.seeds))

    def names(self, place: str) -> list[str]:
        """Rows of a place, and those that run twice."""
        rows = list(self.trials[place])
        return rows + [f"{row}{AGAIN}" for row in TWICE if row in rows]

    def trial(self, place: str, name: str) -> Trial:
        """What a run does."""
        return Trial.from_dict(self.trials[place][name.removesuffix(AGAIN)])


@dataclass(frozen=True)
class LiveSuite(Suite):
    """A cell is the reference curve of a job, or one pair at a place: every row once, in balanced order."""

    plan: LivePlan
    name: str = "opponents-live"
    grows: ClassVar[frozenset[str]] = frozenset({"seeds", "trials", "curves"})

    def facts(self) -> dict[str, Any]:
        hashes = {text: Place.of(text).load().sha256 for text in self.plan.trials}
        return {"cluster": "emulator", "seeds": self.plan.fresh, "scenario_sha256": hashes}

    def bound_to(self) -> dict[str, Any]:
        return {"machine": machine(), "commit": commit()}

    def cells(self) -> list[Cell]:
        jobs = {Place.of(text).workload: text for text in reversed(list(self.plan.trials))}  # by its first place
        curves = [Cell(f"curve-{workload}", (text, None)) for workload, text in jobs.items()]
        return curves + self._pairs()

    def _pairs(self) -> list[Cell]:
        """Every place gets its first pair before any gets its second."""
        pairs = [(text, seed) for seed in self.plan.fresh for text in self.plan.trials]
        return [Cell(f"{Place.of(text).key}-{seed}", (text, seed)) for text, seed in pairs]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        text, seed = cell.what
        torch.set_num_threads(1)  # these nets are small: threads would wait for each other
        place = Place.of(text)
        if seed is None:
            return reference_curve(place, Trial.from_dict(self.plan.curves[text])).to_dict()
        names = balanced_order(self.plan.names(text), seed)
        trials = {name: self.plan.trial(text, name) for name in names}
        made = functools.partial(self._made, place, seed, context)
        mechanisms = dict[str, str]()
        runs = until_paced(lambda chosen, attempt: made(chosen, attempt, mechanisms), trials, repeats=REPEATS)
        return {
            **{"place": text, "seed": seed, "order": names, "mechanisms": mechanisms},
            "runs": {run.name: kept(run) for run in runs},
        }

    def _made(
        self,
        place: Place,
        seed: int,
        context: Context,
        trials: Mapping[str, Trial],
        attempt: int,
        mechanisms: dict[str, str],
    ) -> list[LiveRun]:
        scenario = place.load()
        end_s = self.plan.time_s + BEYOND_S
        first = next(iter(trials.values()))
        job = LiveJob(
            place.workload,
            seed,
            place.scenario,
            DISTURBANCE + seed,
            RunLimits(time_s=end_s, every_s=end_s / SNAPSHOTS),
            fastest=fastest_worker(world_at(place, first, seed), scenario.workers),
        )
        folder = context.folder.path / "ranks" / f"{place.key}-{seed}-{attempt}"
        with Emulation(scenario, seed=DISTURBANCE + seed, run_dir=folder, keep_awake=True) as hosts:
            mechanisms.update(hosts.mechanisms)
            return launch(hosts, job, trials)

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        curves = {key: cell for key, cell in found.items() if key.startswith("curve-")}
        pairs = {key: cell for key, cell in found.items() if key not in curves}
        return {**curves, **pairs} if pairs and len(curves) == len(self.cells()) - len(self._pairs()) else {}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        curves = {
            key.removeprefix("curve-"): ProgressCurve.from_dict(cell)
            for key, cell in cells.items()
            if key.startswith("curve-")
        }
        by_place: dict[str, list[Mapping[str, Any]]] = {}
        for key, cell in cells.items():
            if not key.startswith("curve-"):
                by_place.setdefault(cell["place"], []).append(cell)
        places = {
            text: concluded(
                pairs, curves[Place.of(text).workload], job_numbers(Place.of(text).workload), self.plan.time_s
            )
            for text, pairs in by_place.items()
        }
        until_s = self.plan.time_s + BEYOND_S
        for text, part in places.items():
            if "static" in part["steps"]:
                part["static_steps_virtual"] = static_steps(
                    Place.of(text), Trial.from_dict(self.plan.curves[text]), until_s
                )
        rows = [
            row for row in next(iter(self.plan.trials.values())) if all(row in p["seconds"] for p in places.values())
        ]
        mechanisms: dict[str, str] = next((p["mechanisms"] for pairs in by_place.values() for p in pairs), {})
        return {
            **{"mechanisms": mechanisms, "target": None, "tuned_by": self.plan.tuned_by},
            "policies": {row: {"seconds": [t for p in places.values() for t in p["seconds"][row]]} for row in rows},
            "ratios": over_places(places, rows),
            "a_a": a_a_of(places),
            "curves": {name: curve.to_dict() for name, curve in curves.items()},
            "places": places,
        }

    def table(self, result: Mapping[str, Any]) -> str:
        return live_pages.markdown(result)

    def page(self, result: Mapping[str, Any]) -> str:
        return live_pages.page(result)


def reference_curve(place: Place, trial: Trial) -> ProgressCurve:
    """The job's: static at what it was tuned to at the first place, on the tuning seeds. Samples teach alike on any
    clock, so the virtual one serves."""
    workload, job = make_workload(place.workload), job_numbers(place.workload)
    limits = RunLimits(samples=CURVE_BUDGETS * job.budget, every_samples=job.every_samples)
    runs = [
        run_virtual(trial, workload, workload.make_data(seed), world_at(place, trial, seed), seed=seed, limits=limits)
        for seed in TUNING_SEEDS
    ]
    points = [[(float(e.samples), e.loss) for e in run.evaluations] for run in runs]
    return ProgressCurve.of(place.workload, points, about={"trial": trial.to_dict(), "seeds": list(TUNING_SEEDS)})


def static_steps(place: Place, trial: Trial, until_s: float) -> float:
    """Steps of `trial` by `until_s` on the virtual clock, equal batches held: what live runs are compared with."""
    world = world_at(place, trial, 0)
    assert isinstance(world, DeviceWorld)
    world.reset()
    steps = world.steps
    while world.clock_s[0] < until_s:
        _, whole_s = world.advance()
        steps += 1
    return float(steps - (world.clock_s[0] - until_s) / whole_s[0])


def kept(live: LiveRun) -> dict[str, Any]:
    """What is kept of a run: its curve, what its devices did, and where it stood."""
    known, run = live.to_dict(), live.run.to_dict()
    return {
        **{name: known[name] for name in ("devices", "stolen")},
        **{"overrun": live.overrun, "steps": run["steps"], "samples_by_worker": run["samples_by_worker"]},
        "evaluations": run["evaluations"],
    }


def concluded(
    pairs: Sequence[Mapping[str, Any]], curve: ProgressCurve, job: JobNumbers, time_s: float
) -> dict[str, Any]:
    """One place: seconds per 1,000 equivalent samples by row and pair, and what else is reported."""
    names = [name for name in pairs[0]["runs"] if all(name in pair["runs"] for pair in pairs)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    about: dict[str, dict[str, list[float | None]]] = {
        name: {"equivalent_samples": [], "samples": [], "time_to_target_s": [], "beyond_curve": []} for name in names
    }
    for pair in pairs:
        for name in names:
            run = pair["runs"][name]
            seen = run["evaluations"]
            times = [float(t) for t in seen["time_s"]]
            read = curve.read(times, [math.inf if loss is None else float(loss) for loss in seen["loss"]])
            seconds[name].append(read.seconds_per_1000(time_s))
            about[name]["equivalent_samples"].append(read.at(time_s))
            about[name]["samples"].append(float(np.interp(time_s, times, seen["samples"])))
            about[name]["time_to_target_s"].append(reached(run, job))
            about[name]["beyond_curve"].append(float(read.after))
    once = {name: values for name, values in seconds.items() if not name.endswith(AGAIN)}
    return {
        "pairs": [pair["seed"] for pair in pairs],
        "seconds": {name: [round(value, 5) for value in values] for name, values in seconds.items()},
        "about": about,
        "overruns": {
            name: [sum(d["overruns"] for d in pair["runs"][name]["devices"]) for pair in pairs] for name in names
        },
        "late": [f"{name} (seed {pair['seed']})" for pair in pairs for name in names if pair["runs"][name]["overrun"]],
        "steps": {name: [pair["runs"][name]["steps"] for pair in pairs] for name in names},
        "verdict": verdict(once).to_dict() if {SINGLE, "static"} <= once.keys() else None,
        "ratios": ratios(once),
        "first": who_wins(once).to_dict(),
    }


def reached(run: Mapping[str, Any], job: JobNumbers) -> float | None:
    """Seconds to the job's target; None where the run's clock ended first."""
    trained = {"trial": Trial("single", None, 1, 1.0).to_dict(), "seed": 0, "cluster": "live", "meetings_s": []}
    whole = {**trained, **{name: run[name] for name in ("evaluations", "samples_by_worker", "steps")}}
    return TrialRun.from_dict(whole).time_to_score(job.target)


def over_places(places: Mapping[str, Any], rows: Sequence[str]) -> dict[str, Any]:
    """Ratios of seconds over all places, each place weighing the same."""
    found = {}
    for other in over(rows, OVER):
        below = {text: part["seconds"][other] for text, part in places.items()}
        for row in (name for name in rows if name != other):
            above = {text: part["seconds"][row] for text, part in places.items()}
            found[f"{row}/{other}"] = paired_ratio(above, below).to_dict()
    return found


def a_a_of(places: Mapping[str, Any]) -> dict[str, Any] | None:
    """What rows that ran twice say of the machine, over all places; None for fewer than two pairs."""
    pairs = {
        row: tuple(
            [value for part in places.values() for value in part["seconds"].get(name, [])]
            for name in (row, f"{row}{AGAIN}")
        )
        for row in TWICE
    }
    static, adaptive = (pairs[row] for row in TWICE)
    if not len(static[1]) >= 2 <= len(adaptive[1]):
        return None
    return a_a((static[0], static[1]), (adaptive[0], adaptive[1]))
