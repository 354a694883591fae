"""Runs an experiment: its cells, and what they come to. The harness keeps, resumes and records (`harness.suite`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dynamix_lab.experiment import table
from dynamix_lab.experiment.clusters import Cluster, cluster_of
from dynamix_lab.experiment.experiment import Experiment, Row, Tuning
from dynamix_lab.experiment.measures import SETTINGS
from dynamix_lab.experiment.places import Place
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.opponents.runs import TrialRun
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.opponents.tuning import TriedTrial, TuningSpace, grid, neighbours, tune
from dynamix_lab.statistics import balanced_order

GIVE_UP = 2.0  # a run of the tuning ends at so many times the best one of its row and seed


@dataclass(frozen=True, slots=True)
class TableCase:
    """What a table compares rows in: a setting at a place, with a recipe for `batch` samples if rows have one."""

    setting: str
    place: Place
    batch: int | None

    @property
    def key(self) -> str:
        """For names of files."""
        return f"{self.setting}-{self.place.key}" + ("" if self.batch is None else f"-b{self.batch}")


@dataclass(frozen=True)
class ExperimentSuite(Suite):
    """A cell is a row of a case with all its seeds, or, if runs share a machine, a seed of a case with all its rows."""

    plan: Experiment
    grows: ClassVar[frozenset[str]] = frozenset({"places", "settings", "batches"})

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.plan.name

    @property
    def shares_a_machine(self) -> bool:
        """Whether a run may find the machine as the one before left it, so that rows take turns."""
        return self.plan.cluster != "virtual"

    def facts(self) -> dict[str, Any]:
        hashes = {text: Place.of(text).load().sha256 for text in self.plan.places}
        return {"cluster": self.plan.cluster, "seeds": self.plan.all_seeds, "scenario_sha256": hashes}

    def cases(self) -> list[TableCase]:
        """Place by place."""
        plan = self.plan
        batches: Sequence[int | None] = plan.batches or (None,)
        return [TableCase(s, Place.of(text), b) for text in plan.places for b in batches for s in plan.settings]

    def cells(self) -> list[Cell]:
        if self.shares_a_machine:
            return [Cell(f"{c.key}-{seed}", (c, seed)) for c in self.cases() for seed in self.plan.all_seeds]
        rows = [(case, row) for case in self.cases() for row in self.plan.rows_at(case.place)]
        return [Cell(f"{case.key}-{file_key(row.name)}", (case, row)) for case, row in rows]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        case, what = cell.what
        with cluster_of(self.plan.cluster, context.folder.path / "ranks" / cell.key) as cluster:
            if not self.shares_a_machine:
                return self.row_of(cluster, case, what)
            names = balanced_order([row.name for row in self.plan.rows_at(case.place)], what)
            rows = {row.name: row for row in self.plan.rows}
            found = {}
            for at, name in enumerate(names):
                context.tell(f"{cell.key}: {name}", at / len(names))
                trial = self._trial(case, rows[name])
                found[name] = {"trial": trial.to_dict(), "runs": [self._made(cluster, case, trial, what)]}
            return {"rows": found, "mechanisms": cluster.mechanisms}

    def _trial(self, case: TableCase, row: Row) -> Trial:
        assert case.batch is not None
        return row.trial(case.place.job, case.setting, case.batch, case.place.load().workers)

    def row_of(self, cluster: Cluster, case: TableCase, row: Row) -> dict[str, Any]:
        """A row of a case: its trial, how it was tuned, and its runs."""
        said: dict[str, Any] = {}
        if self.plan.tuning is None:
            trial = self._trial(case, row)
        else:
            trial, tried = tuned(cluster, case, row.name, self.plan.tuning)
            said = {"tried": [one.to_dict() for one in tried], "at_edge": at_edge(trial, [one.trial for one in tried])}
        runs = [self._made(cluster, case, trial, seed) for seed in self.plan.all_seeds]
        return {"rows": {row.name: {"trial": trial.to_dict(), **said, "runs": runs}}, "mechanisms": cluster.mechanisms}

    def _made(self, cluster: Cluster, case: TableCase, trial: Trial, seed: int) -> dict[str, Any]:
        setting = SETTINGS[case.setting]
        run = cluster.run(trial, case.place, seed, setting.limits(case.place))
        return summary(run, setting.read(run, case.place))

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        found = [part for case in self.cases() if (part := self._concluded(case, cells))["rows"]]
        mechanisms: dict[str, str] = next((cell["mechanisms"] for cell in cells.values()), {})
        return {"mechanisms": mechanisms, "cases": found}

    def _concluded(self, case: TableCase, cells: Mapping[str, Any]) -> dict[str, Any]:
        """A case: each row's readings, by seed, as columns."""
        rows: dict[str, dict[str, Any]] = {}
        for part in self._of(case, cells):
            for name, row in part["rows"].items():
                at = rows.setdefault(name, {"trial": row["trial"], "at_edge": row.get("at_edge", [])})
                for run in row["runs"]:
                    for column in COLUMNS:
                        at.setdefault(column, []).append(run[column])
        order = [row.name for row in self.plan.rows if row.name in rows]
        speeds = [host.cpu for host in case.place.load().hosts]
        batch = case.batch
        return {
            "setting": case.setting,
            "place": f"{case.place.scenario}/{case.place.workload}",
            "batch": batch,
            "speeds_sum": sum(speeds) / max(speeds),
            "least_s": None if batch is None else [case.place.least_s(s, batch) for s in self.plan.all_seeds],
            "rows": {name: rows[name] for name in order},
        }

    def _of(self, case: TableCase, cells: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The cells of a case that are there."""
        for cell in self.cells():
            if cell.what[0] == case and cell.key in cells:
                yield cells[cell.key]

    def table(self, result: Mapping[str, Any]) -> str:
        return table.markdown(result)

    def page(self, result: Mapping[str, Any]) -> str:
        return table.page(result)


COLUMNS = ("seed", "seconds", "arrived", "score", "samples", "steps", "overrun")


def summary(run: TrialRun, reading: Any) -> dict[str, Any]:
    """What is kept of a run: what was read from it, and its curve."""
    kept = run.to_dict()
    return {
        **{"seed": run.seed, "seconds": round(reading.seconds, 6), "arrived": reading.arrived},
        **{"score": round(reading.score, 6), "samples": run.samples, "steps": run.steps, "overrun": run.overrun},
        "samples_by_worker": kept["samples_by_worker"],
        "curve": kept["evaluations"],
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
    """A row's winner at a place, and all that was tried for it; without seeds the first of its grid."""
    space = _space(case.place, tuning.schedules)
    trials = grid(row, space)
    if not tuning.seeds:
        return trials[0], []
    runs = _Impatient(cluster, case)
    near = functools.partial(neighbours, space=space)
    return tune(trials, runs, runs.worth, seeds=tuning.seeds, near=near, climbs=tuning.climbs)


@dataclass
class _Impatient:
    """Runs trials of one row for `tune`, none for longer than twice the best so far: it could not win any more."""

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
    """How a winner is at an end of what was tried, so that a better one may lie beyond.

    Gives "learning_rate", "batch_size", both or none. Rates are those of the winner's own batch and schedule. Two
    batches have no inside, so they do not count.
    """
    rates = sorted(
        {t.learning_rate for t in trials if (t.batch_size, t.schedule) == (trial.batch_size, trial.schedule)}
    )
    sizes = sorted({one.batch_size for one in trials})
    found = ["learning_rate"] if rates and trial.learning_rate in (rates[0], rates[-1]) else []
    return found + (["batch_size"] if len(sizes) > 2 and trial.batch_size in (sizes[0], sizes[-1]) else [])


def file_key(name: str) -> str:
    """A row's name as a part of a file's.

    >>> file_key("static, sqrt(W) r0")
    'static-sqrt-W-r0'
    """
    return "-".join("".join(c if c.isalnum() or c == "_" else " " for c in name).split())
