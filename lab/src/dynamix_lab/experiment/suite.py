"""Runs an experiment: its cells, and their conclusions. The harness stores, resumes and records (`harness.suite`)."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from dynamix.events.run_folder import RunFolder, commit
from dynamix_lab.emulator.cluster import Mechanism
from dynamix_lab.experiment import table
from dynamix_lab.experiment.clusters import REPEATS, Cluster, cluster_of
from dynamix_lab.experiment.experiment import POLICIES, Experiment, Row, Tuning, file_key
from dynamix_lab.experiment.measures import OF_BUDGET, SETTINGS
from dynamix_lab.experiment.places import Place
from dynamix_lab.harness.runs import policy_facts
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.opponents.runs import TrialRun
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.opponents.tuning import TriedTrial, TuningSpace, grid, neighbours, tune
from dynamix_lab.statistics import balanced_order

SHOWN = ("title", "about", "against", "beside", "ours")  # fields that change only tables
GIVE_UP = 2.0  # a tuning run ends at this many times the best time of its row and seed


@dataclass(frozen=True, slots=True)
class TableCase:
    """A case of a table: a setting at a place, with a recipe for `batch` samples if rows have recipes."""

    setting: str
    place: Place
    batch: int | None

    @property
    def key(self) -> str:
        """The case as part of file names."""
        return f"{self.setting}-{self.place.key}" + ("" if self.batch is None else f"-b{self.batch}")


@dataclass(frozen=True)
class ExperimentSuite(Suite):
    """A cell is a row of a case with all its seeds, or with one of them if runs share a machine.

    mechanism   for emulated devices
    """

    plan: Experiment
    mechanism: Mechanism = "auto"
    grows: ClassVar[frozenset[str]] = frozenset({"places", "settings", "batches", *SHOWN})

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.plan.name

    @property
    def shares_a_machine(self) -> bool:
        """Whether one run may influence the next through the machine, so that rows take turns."""
        return self.plan.cluster != "virtual"

    def facts(self) -> dict[str, Any]:
        hashes = {text: Place.of(text).load().sha256 for text in self.plan.places}
        files = {name: of_policy for name, of_policy in self._policies.items() if len(of_policy) > 1}
        about = {"cluster": self.plan.cluster, "seeds": self.plan.all_seeds, "scenario_sha256": hashes}
        return {**about, "policy_files": files}

    @property
    def _policies(self) -> dict[str, dict[str, str]]:
        """What is known of each policy, by name."""
        return {row.policy: policy_facts(row.policy, POLICIES) for row in self.plan.rows if row.policy is not None}

    def bound_to(self) -> dict[str, Any]:
        jobs = {place.workload: place.job for place in map(Place.of, self.plan.places)}
        numbers = {f"numbers of {name}": asdict(job) for name, job in jobs.items()}
        policies = {f"policy {name}": of_policy for name, of_policy in self._policies.items()}
        return {"commit": commit(), **numbers, **policies}

    def cases(self) -> list[TableCase]:
        """All cases, place by place."""
        plan = self.plan
        batches: Sequence[int | None] = plan.batches or (None,)
        places = [Place.of(text, plan.budget) for text in plan.places]
        return [TableCase(s, place, b) for place in places for b in batches for s in plan.settings]

    def cells(self) -> list[Cell]:
        return [cell for case in self.cases() for cell in self._cells_of(case)]

    def _cells_of(self, case: TableCase) -> list[Cell]:
        seeds = self.plan.all_seeds
        rows = {row.name: row for row in self.plan.rows_at(case.place, case.setting)}
        if not self.shares_a_machine:
            return [Cell(f"{case.key}-{file_key(name)}", (case, row, seeds)) for name, row in rows.items()]
        orders = {seed: balanced_order(list(rows), seed) if len(seeds) > 1 else list(rows) for seed in seeds}
        turns = [(seed, name) for seed, names in orders.items() for name in names]
        return [Cell(f"{case.key}-{seed}-{file_key(name)}", (case, rows[name], [seed])) for seed, name in turns]

    def means(self, folder: RunFolder) -> contextlib.AbstractContextManager[Cluster]:
        """The cluster. With a single seed, which is only a look, no run is repeated."""
        repeats = REPEATS if self.plan.seeds > 1 else 0
        return cluster_of(self.plan.cluster, folder, mechanism=self.mechanism, repeats=repeats)

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep the seeds that all rows of a case have, as rows are compared in pairs. Keep all of the first seed."""
        if not self.shares_a_machine:
            return found
        kept: dict[str, Any] = {}
        for case in self.cases():
            cells = self._cells_of(case)
            partly = {cell.what[2][0] for cell in cells if cell.key not in found} - {self.plan.first_seed}
            kept |= {cell.key: found[cell.key] for cell in cells if cell.key in found and cell.what[2][0] not in partly}
        return kept

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        return self.row_of(context.means, *cell.what)

    def _trial(self, case: TableCase, row: Row) -> Trial:
        assert case.batch is not None
        return row.trial(case.place.job, case.setting, case.batch, case.place.load().workers)

    def row_of(self, cluster: Cluster, case: TableCase, row: Row, seeds: Sequence[int]) -> dict[str, Any]:
        """Run a row of a case. Returns its trial, how it was tuned, and its runs."""
        said: dict[str, Any] = {}
        if self.plan.tuning is None:
            trial = self._trial(case, row)
        else:
            trial, tried = tuned(cluster, case, row.name, self.plan.tuning)
            said = {"tried": [one.to_dict() for one in tried], "at_edge": at_edge(trial, [one.trial for one in tried])}
        runs = [self._made(cluster, case, trial, seed) for seed in seeds]
        return {"rows": {row.name: {"trial": trial.to_dict(), **said, "runs": runs}}, "mechanisms": cluster.mechanisms}

    def _made(self, cluster: Cluster, case: TableCase, trial: Trial, seed: int) -> dict[str, Any]:
        """Make a run and return what its cell stores: all but the end of each step."""
        run = cluster.run(trial, case.place, seed, SETTINGS[case.setting].limits(case.place))
        seen = {"waiting": run.waiting, "sizes": run.sizes} if self.shares_a_machine else {}
        return {**run.to_dict(), "meetings_s": [round(run.time_s, 6)], "overrun": run.overrun, **seen}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        found = [part for case in self.cases() if (part := self._concluded(case, cells))["rows"]]
        mechanisms: dict[str, str] = next((cell["mechanisms"] for cell in cells.values()), {})
        return {"mechanisms": mechanisms, "cases": found}

    def _concluded(self, case: TableCase, cells: Mapping[str, Any]) -> dict[str, Any]:
        """A case's result: the figures of each row's runs, as columns by seed."""
        rows: dict[str, dict[str, Any]] = {}
        for part in self._of(case, cells):
            for name, row in part["rows"].items():
                at = rows.setdefault(name, {"trial": row["trial"], "at_edge": row.get("at_edge", [])})
                for run in row["runs"]:
                    for column, value in read(case, run).items():
                        at.setdefault(column, []).append(value)
        place, batch, job = case.place, case.batch, case.place.job
        least_s = None
        if batch is not None and case.setting in OF_BUDGET:
            lost = () if self.shares_a_machine else place.outages  # emulated hosts are never lost
            least_s = {seed: place.least_s(seed, batch, lost) for seed in self.plan.all_seeds}
        return {
            **{"setting": case.setting, "place": f"{place.scenario}/{place.workload}", "batch": batch},
            **{"target": job.target, "budget": job.budget, "least_s": least_s},
            "rows": {row.name: rows[row.name] for row in self.plan.rows if row.name in rows},
        }

    def _of(self, case: TableCase, cells: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The finished cells of the case."""
        for cell in self.cells():
            if cell.what[0] == case and cell.key in cells:
                yield cells[cell.key]

    def table(self, result: Mapping[str, Any]) -> str:
        return table.markdown(result)

    def page(self, result: Mapping[str, Any]) -> str:
        return table.page(result)


def read(case: TableCase, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run that its cell stores."""
    run = TrialRun.from_dict(kept)
    found = SETTINGS[case.setting].read(run, case.place)
    seen = {name: kept[name] for name in ("waiting", "sizes") if name in kept}
    return {
        **{"seed": run.seed, "seconds": round(found.seconds, 6), "arrived": found.arrived, "diverged": run.diverged},
        **{"score": round(found.score, 6), "samples": run.samples, "steps": run.steps, "overrun": kept["overrun"]},
        **seen,
    }


@functools.lru_cache(maxsize=1)
def _space(place: Place, schedules: tuple[tuple[str, float], ...]) -> TuningSpace:
    job = place.job
    return TuningSpace(
        job.rates,
        place.load().workers,
        job.budget,
        batch_sizes=job.batch_sizes,
        periods=job.periods,
        schedules=schedules,
    )


def tuned(cluster: Cluster, case: TableCase, row: str, tuning: Tuning) -> tuple[Trial, list[TriedTrial]]:
    """A row's best trial at a place, and all that were tried. Without seeds, the first of its grid."""
    space = _space(case.place, tuning.schedules)
    trials = grid(row, space)
    if not tuning.seeds:
        return trials[0], []
    runs = _Impatient(cluster, case)
    near = functools.partial(neighbours, space=space)
    return tune(trials, runs, runs.worth, seeds=tuning.seeds, near=near, climbs=tuning.climbs)


@dataclass
class _Impatient:
    """Runs trials of one row for `tune`. Ends a run at twice the best time so far, because it cannot win any more."""

    cluster: Cluster
    case: TableCase
    best: dict[int, float] = field(default_factory=dict)

    def __call__(self, trial: Trial, seed: int) -> TrialRun:
        best = self.best.get(seed, math.inf)
        limits = SETTINGS[self.case.setting].limits(self.case.place, GIVE_UP * best)
        done = self.cluster.run(trial, self.case.place, seed, limits)
        self.best[seed] = min(best, self.worth(done))
        return done

    def worth(self, run: TrialRun) -> float:
        """Seconds until it arrived; infinite if it did not."""
        found = SETTINGS[self.case.setting].read(run, self.case.place)
        return found.seconds if found.arrived else math.inf


def at_edge(trial: Trial, trials: Sequence[Trial]) -> list[str]:
    """The dimensions in which the best trial is at an edge of the grid, so that a better one may lie outside.

    They are some of learning_rate, batch_size, budget (of a falling rate) and steps (between averagings). Only trials
    with the same schedule are compared. A dimension with two values has no inside, so it does not count.
    """
    alike = [one for one in trials if one.schedule == trial.schedule]
    read: dict[str, Callable[[Trial], float]] = {
        "learning_rate": lambda one: float(f"{one.learning_rate:.2g}"),
        "batch_size": lambda one: one.batch_size,
    }
    if trial.schedule != "constant":
        read["budget"] = lambda one: one.budget or 0
    if trial.local is not None:
        read["steps"] = lambda one: 0 if one.local is None else one.local.steps
    found = []
    for name, of in read.items():
        same = [one for one in alike if one.batch_size == trial.batch_size] if name == "learning_rate" else alike
        values = {of(one) for one in same}
        if len(values) > 2 and of(trial) in (min(values), max(values)):
            found.append(name)
    return found
