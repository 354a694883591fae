"""`dynamix bench opponents`: every row tuned alike and run on the virtual clock, place by place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from dynamix.errors import ConfigError
from dynamix_lab.harness.reference import references
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.opponents.buckets import gradient_buckets
from dynamix_lab.opponents.runs import RunLimits, TrialRun
from dynamix_lab.opponents.trial import LocalSettings, Trial
from dynamix_lab.opponents.tuning import EITHER, TriedTrial, TuningSpace, grid, neighbours, tune
from dynamix_lab.opponents.virtual import INTERVAL, run_virtual
from dynamix_lab.opponents.world import DeviceWorld
from dynamix_lab.statistics import who_wins
from dynamix_lab.suites.fidelity.quota_world import QuotaWorld, quota_costs
from dynamix_lab.suites.opponents import pages
from dynamix_lab.suites.opponents.places import JobNumbers, job_numbers, outages
from dynamix_lab.suites.opponents.plan import USUAL, Place, check_rows, recorded_runs, tuned_trials
from dynamix_lab.suites.opponents.regimes import EXTRAS, is_regime
from dynamix_lab.suites.opponents.verdict import ratios, verdict
from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS

REGIME_LONGER = 4
GIVE_UP = 2.0  # a run of the tuning ends at so many times the best one of its row and seed
REPEATED = ("lb_bsp", "local", "goodput", "dynamix", "stigmergic")  # of rows taken over: those that may change
WITHOUT_LIMIT = {"device-slow-link": "device-even"}  # the same devices, with links that limit nothing
SAME_TRIAL = {"stigmergic": "dynamix"}  # a held row of these was tuned as the other one
DISTURBANCE = 1000  # apart from the seed of model and data; all rows of one seed share both


@dataclass(frozen=True, slots=True)
class OpponentsPlan:
    """What one call runs.

    places   of `Place.of`
    rows     of the table, "single" and "static" among them
    seeds    fresh pairs on which each row's winner is confirmed
    seed     the first of them
    tuning   seeds of the tuning, by successive halving; none: each row takes the first of its grid (a smoke run)
    held     result.json of a finished run: its rows are what they were tuned to there. A row that chooses how workers
             meet (`EITHER`) takes what that policy was tuned to over gradients or over parameters, by `tuning`. Where
             that run has no row `stigmergic`, it takes what `dynamix` was tuned to, so that who decides is all that
             differs
    tuned    rows that are tuned all the same, as every row of that run was
    tuned_at   a place of that run, whose trials all places here take, and where `tuned` rows are tuned; None: each
             place has its own
    """

    places: tuple[str, ...]
    rows: tuple[str, ...] = USUAL
    seeds: int = 5
    seed: int = 0
    tuning: tuple[int, ...] = TUNING_SEEDS
    held: str | None = None
    tuned: tuple[str, ...] = ()
    tuned_at: str | None = None

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        check_rows(self.rows)
        keys = [Place.of(text).key for text in self.places]
        if not keys or len(set(keys)) < len(keys):
            raise ConfigError("places", ", ".join(self.places), "one or more that differ", "name scenario/workload")
        used = set(self.fresh) & set(TUNING_SEEDS)
        if self.seeds < 1 or self.seed < 0 or used:
            allowed = f"1 or more from 0 on, without {', '.join(map(str, TUNING_SEEDS))}, on which rows are tuned"
            raise ConfigError("seed, seeds", (self.seed, self.seeds), allowed, "take other seeds")
        for text in self.places:
            job_numbers(Place.of(text).workload)
            if self.held is not None:
                for row in self.rows:
                    if row not in self.tuned:
                        held_trials(self.held, self.tuned_at or text, row)
        for row in self.tuned:
            if self.held is None or row not in self.rows:
                raise ConfigError("tuned", row, f"one of {', '.join(self.rows)}, beside held rows", "give --held too")
        if self.tuned_at is not None and (self.held is None or self._of_other_jobs):
            allowed = "a place of the held run, with the same job as every place here"
            raise ConfigError("tuned_at", self.tuned_at, allowed, "give --held too, or tune these places")

    @property
    def _of_other_jobs(self) -> list[str]:
        job = Place.of(self.tuned_at).workload if self.tuned_at is not None else None
        return [text for text in self.places if Place.of(text).workload != job]

    @property
    def fresh(self) -> list[int]:
        """The seeds of the pairs."""
        return list(range(self.seed, self.seed + self.seeds))


@dataclass(frozen=True)
class OpponentsSuite(Suite):
    """A cell is a row at a place: its tuning, and the runs of its winner. Cells do not need each other."""

    plan: OpponentsPlan
    name: str = "opponents"
    grows: ClassVar[frozenset[str]] = frozenset({"places"})

    def facts(self) -> dict[str, Any]:
        places = {text: Place.of(text).load().sha256 for text in self.plan.places}
        return {"cluster": "virtual", "mechanisms": {}, "seeds": self.plan.fresh, "scenario_sha256": places}

    def cells(self) -> list[Cell]:
        return [Cell(f"{Place.of(text).key}-{row}", (text, row)) for text in self.plan.places for row in self.plan.rows]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        text, row = cell.what
        torch.set_num_threads(1)  # these nets are small: threads would wait for each other
        place = Place.of(text)
        job = job_at(place)
        run = functools.partial(run_at, place, job)
        held = None if row in self.plan.tuned else self.plan.held
        trial, tried, trials = tuned_trial(self.plan.tuned_at or text, row, held, self.plan.tuning)
        known = {} if held is None else recorded_runs(Path(held), text, row, trial)
        runs = confirmed(self.plan.fresh, lambda seed: summary(run(trial, seed), job), known, again=row in REPEATED)
        twin = Place(WITHOUT_LIMIT[place.scenario], place.workload) if place.scenario in WITHOUT_LIMIT else None
        free = [run_at(twin, job, trial, seed) for seed in self.plan.fresh] if twin and row in EITHER else []
        return {
            "place": text,
            "row": row,
            "trial": trial.to_dict(),
            "at_edge": [] if held is not None else at_edge(trial, [one.trial for one in tried] or trials),
            "tried": [one.to_dict() for one in tried],
            "recorded": sum("curve" not in one for one in runs),
            "runs": runs,
            "without_limit": [summary(done, job) for done in free],
        }

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        by_place: dict[str, dict[str, Any]] = {}
        for cell in cells.values():
            by_place.setdefault(cell["place"], {})[cell["row"]] = cell
        found = {text: concluded(rows) for text, rows in by_place.items() if {"single", "static"} <= set(rows)}
        names = [row for row in self.plan.rows if all(row in part["rows"] for part in found.values())]
        lists = {row: [part["times_s"][row] for part in found.values()] for row in names}
        return {
            "target": None,
            "policies": {row: {"time_to_target_s": [t for times in lists[row] for t in times]} for row in names},
            "ratios": {},
            "places": found,
        }

    def table(self, result: Mapping[str, Any]) -> str:
        return pages.markdown(result)

    def page(self, result: Mapping[str, Any]) -> str:
        return pages.page(result)


@functools.cache
def tuned_trial(
    text: str, row: str, held: str | None, seeds: tuple[int, ...]
) -> tuple[Trial, list[TriedTrial], list[Trial]]:
    """A row's winner at a place, what was tried for it, and the grid; of a finished run's trials where one is held."""
    place = Place.of(text)
    job = job_at(place)
    space = space_of(place, job)
    trials = grid(row, space) if held is None else held_trials(held, text, row)
    if held is not None and len(trials) > 1:
        return *tune(trials, Impatient(place, job), job.worth, seeds=seeds), trials
    if held is None and seeds:
        near = functools.partial(neighbours, space=space)
        return *tune(trials, Impatient(place, job), job.worth, seeds=seeds, near=near), trials
    return trials[0], [], trials


def confirmed(
    seeds: Sequence[int], run: Callable[[int], dict[str, Any]], known: Mapping[int, dict[str, Any]], *, again: bool
) -> list[dict[str, Any]]:
    """A winner's runs, by seed. Runs of an earlier result stand; `again`: if the first of them takes as long once more.

    >>> done = confirmed([0, 1, 2], lambda seed: {"time_to_target_s": 4.0, "limit_s": 9.0, "fresh": True}, {
    ...     seed: {"time_to_target_s": 4.0, "limit_s": 9.0} for seed in (0, 1)}, again=True)
    >>> ["fresh" in one for one in done]
    [True, False, True]
    """
    runs: dict[int, dict[str, Any]] = {} if again else dict(known)
    repeated = next((seed for seed in seeds if seed in known), None) if again else None
    if repeated is not None:
        runs[repeated] = run(repeated)
        if math.isclose(_time(runs[repeated]), _time(known[repeated]), rel_tol=1e-6):
            runs = {**known, **runs}
    return [runs[seed] if seed in runs else run(seed) for seed in seeds]


def held_trials(result: str, place: str, row: str) -> list[Trial]:
    """The trials of a row among which to choose, by what a finished run was tuned to at a place.

    Raises `ConfigError` for places and rows that it does not hold, `StateError` for a file that is none.
    """
    known, _ = tuned_trials(Path(result))
    if place not in known:
        raise ConfigError("places", place, ", ".join(known), "tune it first")
    if row in known[place]:
        return [Trial.from_dict(known[place][row])]
    if row in SAME_TRIAL and (other := SAME_TRIAL[row]) in known[place]:
        return [replace(Trial.from_dict(known[place][other]), row=row, policy=row)]
    policy = row.removesuffix("-auto")
    ways = [known[place][name] for name in (policy, f"{policy}-parameters") if name in known[place]]
    if row not in EITHER or not ways:
        raise ConfigError(f"rows of {place}", row, ", ".join(known[place]), "tune it first")
    either = LocalSettings(period="auto")
    return [replace(Trial.from_dict(way), row=row, local=either) for way in ways]


def job_at(place: Place) -> JobNumbers:
    """The job's numbers; in a regime, whose links may be slow, runs get longer."""
    job = job_numbers(place.workload)
    return replace(job, limit_s=REGIME_LONGER * job.limit_s) if is_regime(place.scenario) else job


@dataclass(frozen=True)
class Impatient:
    """Runs trials of one row for `tune`, none for longer than twice the best so far: it could not win any more."""

    place: Place
    job: JobNumbers
    best: dict[int, float] = field(default_factory=dict)

    def __call__(self, trial: Trial, seed: int) -> TrialRun:
        limit = min(self.job.limit_s, GIVE_UP * self.best.get(seed, math.inf))
        done = run_at(self.place, replace(self.job, limit_s=limit), trial, seed)
        self.best[seed] = min(self.best.get(seed, math.inf), self.job.worth(done))
        return done


def run_at(place: Place, job: JobNumbers, trial: Trial, seed: int) -> TrialRun:
    """One run of a trial at a place, to the job's target or its limits."""
    workload = make_workload(place.workload)
    world = world_at(place, trial, seed)
    others = references(place.load(), seed=DISTURBANCE + seed, clock=lambda: float(world.clock_s[0]))
    limits = RunLimits(
        time_s=job.limit_s, samples=job.limit_samples, target=job.target, every_samples=job.every_samples
    )
    return run_virtual(trial, workload, workload.make_data(seed), world, seed=seed, limits=limits, others=others)


def world_at(place: Place, trial: Trial, seed: int) -> DeviceWorld | QuotaWorld:
    """The virtual cluster that a run of a trial with this seed meets."""
    scenario, model = place.load(), make_workload(place.workload).make_model(0)
    if scenario.device is not None:
        return DeviceWorld(
            scenario,
            seed=DISTURBANCE + seed,
            batch_size=trial.batch_size,
            buckets=gradient_buckets(model),
            outages=outages(place.scenario),
            extras=EXTRAS if is_regime(place.scenario) else None,
            interval=INTERVAL,
        )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return QuotaWorld(
        scenario,
        quota_costs(),
        seed=DISTURBANCE + seed,
        gradient_bytes=size,
        batch_size=trial.batch_size,
        longest_s=job_numbers(place.workload).limit_s,
    )


def space_of(place: Place, job: JobNumbers) -> TuningSpace:
    """What the grids of a place are made of, the same for every row."""
    return TuningSpace(job.rates, place.load().workers, job.budget, batch_sizes=job.batch_sizes, periods=job.periods)


def at_edge(trial: Trial, trials: Sequence[Trial]) -> list[str]:
    """Where a winner is at an end of what was tried, so that a better one may lie beyond.

    Gives "learning_rate", "batch_size", both or none. Rates are those of the winner's own batch. Where only two batches
    were tried there is no inside, so they do not count.
    """
    rates = sorted({one.learning_rate for one in trials if one.batch_size == trial.batch_size})
    sizes = sorted({one.batch_size for one in trials})
    found = ["learning_rate"] if trial.learning_rate in (rates[0], rates[-1]) else []
    return found + (["batch_size"] if len(sizes) > 2 and trial.batch_size in (sizes[0], sizes[-1]) else [])


def summary(run: TrialRun, job: JobNumbers) -> dict[str, Any]:
    """What is kept of a run: its curve, and when it arrived."""
    kept = run.to_dict()
    return {
        "seed": run.seed,
        "time_to_target_s": run.time_to_score(job.target),
        "limit_s": job.limit_s,
        "time_s": run.time_s,
        "samples": run.samples,
        "steps": run.steps,
        "samples_by_worker": kept["samples_by_worker"],
        "curve": {name: kept["evaluations"][name] for name in ("time_s", "samples", "loss", "score")},
    }


def concluded(rows: Mapping[str, Any]) -> dict[str, Any]:
    """One place: times by row (a run that did not arrive counts with the limit), the verdict, ratios, the first."""
    times = {row: [_time(run) for run in cell["runs"]] for row, cell in rows.items()}
    speeds = [host.cpu for host in Place.of(next(iter(rows.values()))["place"]).load().hosts]
    return {
        "times_s": times,
        "speeds_sum": sum(speeds) / max(speeds),
        "arrived": {row: [run["time_to_target_s"] is not None for run in cell["runs"]] for row, cell in rows.items()},
        "samples": {row: [run["samples"] for run in cell["runs"]] for row, cell in rows.items()},
        "recorded": sum(cell.get("recorded", 0) for cell in rows.values()),
        "without_limit_s": {row: [_time(run) for run in cell.get("without_limit", [])] for row, cell in rows.items()},
        "verdict": verdict(times).to_dict(),
        "ratios": ratios(times),
        "first": who_wins(times).to_dict(),
        "rows": {row: {"trial": cell["trial"], "at_edge": cell["at_edge"]} for row, cell in rows.items()},
    }


def _time(run: Mapping[str, Any]) -> float:
    reached = run["time_to_target_s"]
    return float(run["limit_s"]) if reached is None or not math.isfinite(reached) else float(reached)
