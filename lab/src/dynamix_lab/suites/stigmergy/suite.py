"""`dynamix bench stigmergy`: workers that decide for themselves compared with central policies, in the simulator.

By scenario and number of workers: time for the progress that all reach, paired by cluster. Then the effect of losing a
quarter of the workers, how long a slowdown is felt, the value of the traces (the rule's numbers are learned again for
each ablation), and the cost of a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies.stigmergic.policy import pretrained
from dynamix.window import Floats
from dynamix_lab.harness.suite import Cell, Context, Suite, Tell, untold
from dynamix_lab.report import sections_markdown
from dynamix_lab.simulator import LaggedReference, rollout_path, sample_family
from dynamix_lab.statistics import mean_interval, paired_ratio
from dynamix_lab.suites.stigmergy.ablations import ABLATIONS, Learning
from dynamix_lab.suites.stigmergy.cost import decision_costs
from dynamix_lab.suites.stigmergy.report import page, sections
from dynamix_lab.suites.stigmergy.worlds import FAMILIES, Factory, OwnPace, Phase, SlowedEnv, phases_of, play, vanishing
from dynamix_lab.training.evaluation import named, times_to_common_progress

TEST_SEEDS = (730_001, 730_002)
BASES = ("dbs", "lb_bsp", "goodput", "dynamix")  # baselines of `stigmergic`, besides static
ABLATION = "ablation-"  # prefix of a cell's key
SHIPPED, LEARNED = "shipped numbers", "learned anew"
COST = "decision-cost"


@dataclass(frozen=True, slots=True)
class StigmergyPlan:
    """The settings of one call: every scenario at every W, and losses, recovery and ablations at W of `studied`.

    seeds, clusters   a pair is a cluster; at least 30 of them in every cell of a full call
    windows           decisions per run; a third of them if W is `large` or more
    """

    scenarios: tuple[str, ...] = tuple(FAMILIES)
    workers: tuple[int, ...] = (4, 8, 32, 1024)
    studied: tuple[int, ...] = (8, 32)
    seeds: tuple[int, ...] = TEST_SEEDS
    clusters: int = 16
    rows: int = 16_384  # clusters times W per seed, at most
    windows: int = 72
    large: int = 512
    interval: int = 5
    delay: int = 1
    ablated: tuple[str, ...] = ("drifting", "slowdowns")
    ablations: tuple[str, ...] = tuple(ABLATIONS)
    learning: Learning = field(default_factory=Learning)
    recovery: tuple[int, int] = (20, 40)  # windows before a slowdown, and after it
    resamples: int = 4000  # of the bootstrap
    cost_workers: tuple[int, ...] = (10, 100, 1000, 10_000)

    @classmethod
    def of(cls, *, quick: bool) -> StigmergyPlan:
        """The full plan (about an hour on one core), or a quick look in about two minutes."""
        if not quick:
            return cls()
        return cls(
            workers=(4, 8, 32),
            studied=(8,),
            ablations=("no-traces",),
            learning=Learning((1, 1, 0, 0), 6),
            seeds=TEST_SEEDS[:1],
            clusters=6,
            windows=60,
        )

    def check(self) -> None:
        """Raise `ConfigError` before anything runs."""
        for scenario in self.scenarios:
            if scenario not in FAMILIES:
                raise ConfigError("scenario", scenario, ", ".join(FAMILIES), "check the spelling")
        if min(self.workers, default=0) < 2:
            raise ConfigError("workers", self.workers, "2 or more each", "one worker has nobody to leave traces for")
        for name in self.ablations:
            if name not in ABLATIONS:
                raise ConfigError("ablations", name, ", ".join(ABLATIONS), "check the spelling")

    def cells(self) -> list[str]:
        """Names of the cells: KIND-W, or ablation-NAME."""
        each = [f"{scenario}-{w}" for w in self.workers if w < self.large for scenario in self.scenarios]
        each += [f"{kind}-{w}" for w in self.studied for kind in ("vanished", "recovery")]
        each += [f"{ABLATION}{name}" for name in self.ablations]
        return each + [f"{scenario}-{w}" for w in self.workers if w >= self.large for scenario in self.scenarios]

    def sizes(self, workers: int) -> tuple[int, int]:
        """Clusters per seed and windows at W workers."""
        return max(1, min(self.clusters, self.rows // workers)), self.windows // (3 if workers >= self.large else 1)


def run_cell(plan: StigmergyPlan, name: str, tell: Tell = untold) -> dict[str, Any]:
    """Run one of `StigmergyPlan.cells()`, by name."""
    if name.startswith(ABLATION):
        return run_ablation(plan, name.removeprefix(ABLATION), tell)
    kind, _, w = name.rpartition("-")
    runs = {"vanished": run_vanished, "recovery": run_recovery}
    if kind in runs:
        return runs[kind](plan, int(w))
    return run_scenario(plan, kind, int(w))


def rivals() -> dict[str, Factory]:
    """The policies compared in every scenario. Ratios are to `static`; `local` knows nothing of other workers."""
    names = ("static", "dbs", "lb_bsp", "goodput", "local", "dynamix", "stigmergic")
    return {name: (lambda _: OwnPace()) if name == "local" else named(name) for name in names}


def compare(
    plan: StigmergyPlan,
    factories: Mapping[str, Factory],
    worlds: Callable[[int], list[Phase]],
    extra: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Run all on the worlds of every seed: times over all clusters, ratios to static, and those of `extra`."""
    taken: dict[str, list[Floats]] = {name: [] for name in factories}
    for seed in plan.seeds:
        phases = worlds(seed)
        paths = {
            n: play(make, phases, seed=seed, interval=plan.interval, delay=plan.delay) for n, make in factories.items()
        }
        for name, values in times_to_common_progress(paths).items():
            taken[name].append(values)
    return _scored({name: np.concatenate(values) for name, values in taken.items()}, plan, extra)


def _scored(times: Mapping[str, Floats], plan: StigmergyPlan, extra: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    wanted = [(name, "static") for name in times if name != "static"] + list(extra)
    ratios = {
        f"{a}/{b}": paired_ratio(times[a].tolist(), times[b].tolist(), resamples=plan.resamples).to_dict()
        for a, b in wanted
    }
    policies = {
        name: {
            "time_to_target_s": round(float(np.exp(np.log(t).mean())), 3),
            "times_s": [round(float(x), 3) for x in t],
        }
        for name, t in times.items()
    }
    return {"pairs": len(times["static"]), "policies": policies, "ratios": ratios}


def run_scenario(plan: StigmergyPlan, scenario: str, workers: int) -> dict[str, Any]:
    """One scenario at one W."""
    clusters, windows = plan.sizes(workers)
    extra = [("stigmergic", base) for base in BASES]
    return compare(plan, rivals(), lambda seed: phases_of(scenario, clusters, workers, windows, seed), extra)


def run_ablation(plan: StigmergyPlan, name: str, tell: Tell) -> dict[str, Any]:
    """An ablation's cost over the shipped rule, with numbers learned for it and with the shipped ones.

    validation   reference's time over the rule's on validation clusters: numbers set by hand, then those of each stage
    places       SCENARIO-W -> the cell
    """
    rule, learned = ABLATIONS[name], plan.learning.learned(name, tell)
    shipped = pretrained().parameters
    factories: dict[str, Factory] = {
        "static": named("static"),
        "stigmergic": named("stigmergic"),
        SHIPPED: lambda _: rule(shipped),
        LEARNED: lambda _: rule(learned.parameters),
    }
    extra = [(SHIPPED, "stigmergic"), (LEARNED, "stigmergic")]
    places = {}
    for scenario in plan.ablated:
        for workers in plan.studied:
            clusters, windows = plan.sizes(workers)
            worlds = partial(phases_of, scenario, clusters, workers, windows)
            places[f"{scenario}-{workers}"] = compare(plan, factories, worlds, extra)
    about = {"parameters": asdict(learned.parameters), "validation": learned.about["validation"]}
    return {**about, "places": places}


def run_vanished(plan: StigmergyPlan, workers: int) -> dict[str, Any]:
    """Halfway, a quarter of the workers are lost, and the job restarts on the others with equal shares."""
    clusters, windows = plan.sizes(workers)
    names = ("static", "dbs", "lb_bsp", "goodput", "dynamix", "stigmergic")
    return compare(plan, {n: named(n) for n in names}, lambda seed: vanishing(clusters, workers, windows, seed))


def run_recovery(plan: StigmergyPlan, workers: int) -> dict[str, Any]:
    """Windows after a lasting slowdown of one worker (2.5 times) until two in a row have 95 % of the lagged reference's
    progress per second; `after` if that never happened."""
    (clusters, _), (before, after) = plan.sizes(workers), plan.recovery
    factories = {name: make for name, make in rivals().items() if name != "dbs"} | {"lagged": LaggedReference}
    windows: dict[str, list[Floats]] = {name: [] for name in factories if name != "lagged"}
    for seed in plan.seeds:
        world = sample_family("affine-quiet", clusters, workers, seed)
        rates = {name: _rates(make, world, plan, seed, before, before + after) for name, make in factories.items()}
        for name, mine in windows.items():
            good = rates[name][before:] >= 0.95 * rates["lagged"][before:]
            twice = good[:-1] & good[1:]
            mine.append(np.where(twice.any(0), twice.argmax(0), after).astype(np.float64))
    found = {name: np.concatenate(values) for name, values in windows.items()}
    return {
        "pairs": len(found["static"]),
        "windows": {name: _recovered(values, after, plan.resamples) for name, values in found.items()},
    }


def _recovered(windows: Floats, after: int, resamples: int) -> dict[str, Any]:
    known = mean_interval(windows, resamples=resamples)
    return {
        "median": float(np.median(windows)),
        "mean": round(known.mean, 2),
        "interval_of_mean": [round(known.low, 2), round(known.high, 2)],
        "recovered": round(float((windows < after).mean()), 3),
    }


def _rates(make: Factory, world: Any, plan: StigmergyPlan, seed: int, before: int, windows: int) -> Floats:
    """Progress per second of every window, (windows, C)."""
    env = SlowedEnv(world, seed=seed, interval=plan.interval, delay=plan.delay)
    env.from_window = before
    path = np.diff(rollout_path(make(env), env, windows), axis=0)
    return np.asarray(path[:, 1] / path[:, 0])


@dataclass(frozen=True)
class StigmergySuite(Suite):
    """`dynamix bench stigmergy`. Its last cell is the cost of a decision, which other processes would lengthen."""

    plan: StigmergyPlan
    name: str = "stigmergy"
    grows: ClassVar[frozenset[str]] = frozenset({"scenarios", "workers"})

    def facts(self) -> dict[str, Any]:
        about: dict[str, Any] = {"cluster": "simulator", "mechanisms": {}, "scenario_sha256": None, "target": None}
        return {**about, "seeds": list(self.plan.seeds)}

    def cells(self) -> list[Cell]:
        return [*(Cell(name) for name in self.plan.cells()), Cell(COST)]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        if cell.key == COST:
            return {"decision_us": decision_costs(self.plan.cost_workers)}
        return run_cell(self.plan, cell.key, context.tell)

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        return found if _scenarios(found) else {}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        costs = cells.get(COST, {"decision_us": []})
        played = {name: cell for name, cell in cells.items() if name != COST}
        return {**_joined(_scenarios(cells), self.plan), "cells": played, **costs}

    def table(self, result: Mapping[str, Any]) -> str:
        return sections_markdown(sections(result))

    def page(self, result: Mapping[str, Any]) -> str:
        return page(result)


def _scenarios(cells: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cell for name, cell in cells.items() if name.rpartition("-")[0] in FAMILIES}


def _joined(cells: Mapping[str, Any], plan: StigmergyPlan) -> dict[str, Any]:
    """The scenarios together, with equal weights: `policies` has lists over `pairs_of`; ratios are also bootstrapped
    over cells.
    """
    names = next(iter(cells.values()))["policies"]
    times = {name: {cell: part["policies"][name]["times_s"] for cell, part in cells.items()} for name in names}
    ratios = {
        f"{name}/{base}": paired_ratio(times[name], times[base], resamples=plan.resamples).to_dict()
        for name, base in [(name, "static") for name in names if name != "static"]
        + [("stigmergic", base) for base in BASES]
    }
    lists = {
        name: {"time_to_target_s": [part["policies"][name]["time_to_target_s"] for part in cells.values()]}
        for name in names
    }
    return {"pairs": list(cells), "policies": lists, "ratios": ratios}
