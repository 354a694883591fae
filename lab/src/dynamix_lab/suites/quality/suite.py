"""`dynamix bench quality`: trained models of every row beside those of even shares, seed by seed.

A cell is a run. A first stage runs the pilot; the spread of its differences says how many pairs come next, and so on
until every interval is narrow enough or the plan's most pairs are run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.emulator import load_scenario
from dynamix_lab.harness.suite import Cell, Context, Suite, Tell, run_suite, untold
from dynamix_lab.opponents.buckets import gradient_buckets
from dynamix_lab.opponents.runs import RunLimits
from dynamix_lab.opponents.virtual import run_virtual
from dynamix_lab.opponents.world import DeviceWorld
from dynamix_lab.report import sections_markdown
from dynamix_lab.statistics import MeanInterval, paired_ratio, student_interval
from dynamix_lab.suites.quality import pages
from dynamix_lab.suites.quality.plan import DATA_SETS, EVEN, FLOOR, JOBS, ROWS, STATIC, QualityPlan

INTERVAL = 5  # optimizer steps in a window, as a controller has them
LAST_ROUND = 1.05  # times the samples: an opponent's rounds of local steps end with a whole one
DISTURBANCE = 1000  # apart from the seed of weights and order; all rows of one seed share both


@dataclass(frozen=True)
class QualitySuite(Suite):
    """Runs do not need each other. Those of one seed are pairs."""

    plan: QualityPlan
    name: str = "quality"
    grows: ClassVar[frozenset[str]] = frozenset({"jobs", "rows", "sized", "pilot", "max_pairs", "pairs", "equal_time"})

    def facts(self) -> dict[str, Any]:
        hashes = {self.plan.scenario: load_scenario(self.plan.scenario).sha256}
        return {"cluster": "virtual", "mechanisms": {}, "seeds": self.plan.seeds, "scenario_sha256": hashes}

    def bound_to(self) -> dict[str, Any]:
        return {"jobs": {name: asdict(self.plan.job(name)) for name in JOBS}}  # which are no part of the plan

    def cells(self) -> list[Cell]:
        plan = self.plan
        cells = []
        for at, seed in enumerate(plan.seeds):
            for job in plan.jobs:
                runs = [(job, row, seed) for row in plan.rows if at < plan.pairs_of(job, row)]
                cells += [Cell(key_of(*what), what) for what in runs]
                # Even shares are as long as they are; what others train in that time is known once both have run.
                longer = [what for what in runs if plan.equal_time and what[1] != EVEN]
                cells += [Cell(f"{key_of(*what)}-time", (*what, True)) for what in longer]
        return cells

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        torch.set_num_threads(1)  # these nets are small: threads would wait for each other
        job, row, seed, *at_time = cell.what
        if not at_time:
            return trained(self.plan, job, row, seed)
        even_s, own_s = (context.found[key_of(job, name, seed)]["time_s"] for name in (EVEN, row))
        of = self.plan.job(job)
        return trained(self.plan, job, row, seed, samples=round(of.train * of.epochs * even_s / own_s))

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        runs: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
        longer: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
        for cell in cells.values():
            kept = longer if cell.get("at_time") else runs
            kept.setdefault(cell["job"], {}).setdefault(cell["row"], {})[cell["seed"]] = cell
        jobs = {job: concluded(rows, self.plan) for job, rows in runs.items() if EVEN in rows}
        for job, timed in longer.items():
            jobs[job]["at_time"] = at_equal_time({EVEN: runs[job][EVEN], **timed})
        rows = [row for row in self.plan.rows if all(row in part["rows"] for part in jobs.values())]
        return {
            "target": None,
            "policies": {row: {"accuracy": [jobs[job]["rows"][row]["accuracy"] for job in jobs]} for row in rows},
            "ratios": {},
            "floor": FLOOR,
            "half_width": self.plan.half_width,
            "jobs": jobs,
        }

    def table(self, result: Mapping[str, Any]) -> str:
        return sections_markdown(pages.sections(result))

    def page(self, result: Mapping[str, Any]) -> str:
        return pages.page(result)


def key_of(job: str, row: str, seed: int) -> str:
    """Of the cell that trains a row on all samples of the job."""
    return f"{job}-{row}-{seed}"


def run_in_stages(
    plan: QualityPlan, folder: RunFolder, *, command: str | None = None, tell: Tell = untold, processes: int = 1
) -> dict[str, Any]:
    """The pilot, then as many pairs as its spread and that of every later stage ask for; the last stage's result."""
    while True:
        result = run_suite(QualitySuite(plan), folder, command=command, tell=tell, processes=processes)
        seen = {job: {r: of["points"] for r, of in part["rows"].items()} for job, part in result["jobs"].items()}
        more = plan.with_pairs(seen)
        if more == plan:
            return result
        plan = more


def trained(plan: QualityPlan, job: str, row: str, seed: int, samples: int | None = None) -> dict[str, Any]:
    """One run: the model's accuracy and cross-entropy on held-out samples when every sample was used as planned.

    samples   to train on, where they are not those of the job's epochs
    """
    of, trial = plan.job(job), plan.trial(job, row, samples)
    workload = of.load()
    data = workload.make_data(seed % DATA_SETS, train=of.train, test=plan.test)
    if len(data.train) != of.train or len(data.test) != plan.test:
        raise ConfigError("samples", (len(data.train), len(data.test)), f"{of.train}, {plan.test}", "take another job")
    world = DeviceWorld(
        load_scenario(plan.scenario),
        seed=DISTURBANCE + seed,
        batch_size=trial.batch_size,
        buckets=gradient_buckets(workload.make_model(0)),
        interval=INTERVAL,
    )
    limits = RunLimits(samples=samples or of.train * of.epochs)
    run = run_virtual(trial, workload, data, world, seed=seed, limits=limits, interval=INTERVAL, held_out=plan.test)
    last = run.evaluations[-1]
    return {
        **{"job": job, "row": row, "seed": seed, "trial": trial.to_dict(), "at_time": samples is not None},
        "accuracy": round(100 * last.score, 4),
        "cross_entropy": round(last.loss, 6) if math.isfinite(last.loss) else None,
        **{"samples": run.samples, "steps": run.steps, "time_s": round(run.time_s, 3)},
        "samples_by_worker": list(run.samples_by_worker),
    }


def concluded(rows: Mapping[str, Mapping[int, Mapping[str, Any]]], plan: QualityPlan) -> dict[str, Any]:
    """One job: every row over even shares, on the seeds that both have."""
    even = rows[EVEN]
    found = {}
    for name, runs in rows.items():
        seeds = sorted(set(runs) & set(even))
        mine, others = [runs[s] for s in seeds], [even[s] for s in seeds]
        most = 1.0 if ROWS[name].policy else LAST_ROUND
        if any(not b["samples"] <= a["samples"] <= most * b["samples"] for a, b in zip(mine, others, strict=True)):
            raise ConfigError("samples", [r["samples"] for r in mine], "as many as even shares", "train whole epochs")
        points = [round(a["accuracy"] - b["accuracy"], 4) for a, b in zip(mine, others, strict=True)]
        found[name] = {
            "pairs": len(seeds),
            "accuracy": _mean([run["accuracy"] for run in mine]),
            "cross_entropy": _mean([run["cross_entropy"] for run in mine]),
            "diverged": sum(run["cross_entropy"] is None for run in mine),
            "global_batch": _mean([run["samples"] / run["steps"] for run in mine]),
            "points": points,
            "accuracy_over_even": _plain(student_interval(points)),
            "cross_entropy_over_even": _plain(cross_entropy_over(mine, others)),
            "time_over_even": paired_ratio([r["time_s"] for r in mine], [r["time_s"] for r in others]).to_dict(),
            **_judged(points, plan, sized=name in plan.sized),
        }
    static = next(iter(even.values()))
    return {"samples": static["samples"], "trial": static["trial"], "seeds": sorted(even), "rows": found}


def at_equal_time(rows: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """One job: every row's accuracy after the time of even shares, over that of the best static row there.

    Which static row is best is seen afterwards, by its mean, which favours it.
    """
    seeds = sorted(set.intersection(*(set(runs) for runs in rows.values())))
    accuracy = {name: [runs[seed]["accuracy"] for seed in seeds] for name, runs in rows.items()}
    best = max((name for name in accuracy if name in STATIC), key=lambda name: float(np.mean(accuracy[name])))
    times = [rows[EVEN][seed]["time_s"] for seed in seeds]
    found = {}
    for name, mine in accuracy.items():
        points = [round(a - b, 4) for a, b in zip(mine, accuracy[best], strict=True)]
        found[name] = {
            "accuracy": _mean(mine),
            "points": points,
            "over_best_static": _plain(student_interval(points)),
            "samples_over_even": _mean([rows[name][s]["samples"] / rows[EVEN][s]["samples"] for s in seeds]),
            "time_over_even": paired_ratio([rows[name][s]["time_s"] for s in seeds], times).to_dict(),
        }
    return {"seeds": seeds, "best_static": best, "rows": found}


def cross_entropy_over(mine: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> MeanInterval:
    """The mean of the differences; nothing but NaN where a run diverged, as none of its figures means anything."""
    pairs = [(a["cross_entropy"], b["cross_entropy"]) for a, b in zip(mine, others, strict=True)]
    if any(value is None for pair in pairs for value in pair):
        return MeanInterval(math.nan, math.nan, math.nan)
    return student_interval([a - b for a, b in pairs])


def _judged(points: Sequence[float], plan: QualityPlan, *, sized: bool) -> dict[str, Any]:
    """How narrow the interval is, whether the cap on pairs kept it wider, and whether its lower end is high enough."""
    found = student_interval(points)
    half = found.mean - found.low
    wide = not half <= plan.half_width
    return {
        "half_width": round(half, 4) if math.isfinite(half) else None,
        "capped": sized and wide and len(points) >= plan.max_pairs,
        "reached": bool(found.low >= FLOOR),
    }


def _plain(found: MeanInterval) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 5) for name, value in found.to_dict().items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 4) if known else None
