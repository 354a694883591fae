"""`dynamix bench stigmergy`: workers that decide for themselves against central policies, in the simulator.

Scenario by scenario and by number of workers: time for the progress that all reach, paired by cluster. Then what is
left when whoever decides, or the store, is dead from half way on; what a quarter of the workers gone does; how long a
slowdown is felt; what the traces and their decay are worth; and what a decision costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies.registry import make_policy
from dynamix.policies.stigmergic.field import Decay
from dynamix.policies.stigmergic.policy import Parameters, StigmergicPolicy, pretrained
from dynamix.simulator import LaggedReference, rollout_path, sample_family
from dynamix.training.evaluation import times_to_common_progress
from dynamix.window import Floats
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.statistics import mean_interval, paired_ratio
from dynamix_lab.suites.stigmergy.cost import decision_costs
from dynamix_lab.suites.stigmergy.report import markdown, page
from dynamix_lab.suites.stigmergy.worlds import FAMILIES, Factory, OwnPace, Phase, SlowedEnv, phases_of, play, vanishing

TEST_SEEDS = (730_001, 730_002)
FADES = {"no-decay": 0.0, "fast-decay": 0.98}
FAILING = ("dynamix", "stigmergic")
COST = "decision-cost"


@dataclass(frozen=True, slots=True)
class StigmergyPlan:
    """What one call runs: every scenario at every W, and the failures, recovery and ablations at some of them.

    seeds, clusters   a pair is a cluster; at least 30 of them in every cell of a full call
    windows           decisions per run; at W of `large` or more a third of them
    """

    scenarios: tuple[str, ...] = tuple(FAMILIES)
    workers: tuple[int, ...] = (4, 8, 32, 1024)
    failing_workers: tuple[int, ...] = (8, 32)
    seeds: tuple[int, ...] = TEST_SEEDS
    clusters: int = 16
    rows: int = 16_384  # clusters times W of a seed, at most
    windows: int = 72
    large: int = 512
    interval: int = 5
    delay: int = 1
    ablated: tuple[str, ...] = ("drifting", "slowdowns")
    recovery: tuple[int, int] = (20, 40)  # windows before a slowdown, and after it
    resamples: int = 4000  # of the bootstrap
    cost_workers: tuple[int, ...] = (10, 100, 1000, 10_000)

    @classmethod
    def of(cls, *, quick: bool) -> StigmergyPlan:
        """All of it (some twenty minutes on one core), or a look in about two."""
        if not quick:
            return cls()
        return cls(
            workers=(4, 8, 32),
            failing_workers=(8,),
            seeds=TEST_SEEDS[:1],
            clusters=6,
            windows=60,
        )

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        for scenario in self.scenarios:
            if scenario not in FAMILIES:
                raise ConfigError("scenario", scenario, ", ".join(FAMILIES), "check the spelling")
        if min(self.workers, default=0) < 2:
            raise ConfigError("workers", self.workers, "2 or more each", "one worker has nobody to leave traces for")

    def cells(self) -> list[str]:
        """Names of what is run: KIND-W, or ablations-SCENARIO-W."""
        each = [f"{scenario}-{w}" for w in self.workers if w < self.large for scenario in self.scenarios]
        for w in self.failing_workers:
            each += [f"failures-{w}", f"vanished-{w}", f"recovery-{w}", *[f"ablations-{s}-{w}" for s in self.ablated]]
        return each + [f"{scenario}-{w}" for w in self.workers if w >= self.large for scenario in self.scenarios]

    def sizes(self, workers: int) -> tuple[int, int]:
        """Clusters a seed and windows at W workers."""
        return max(1, min(self.clusters, self.rows // workers)), self.windows // (3 if workers >= self.large else 1)


def run_cell(plan: StigmergyPlan, name: str) -> dict[str, Any]:
    """One of `StigmergyPlan.cells()`, by name."""
    kind, _, w = name.rpartition("-")
    runs = {"failures": run_failures, "vanished": run_vanished, "recovery": run_recovery}
    if kind in runs:
        return runs[kind](plan, int(w))
    if kind.startswith("ablations-"):
        return run_ablations(plan, kind.removeprefix("ablations-"), int(w))
    return run_scenario(plan, kind, int(w))


def _named(name: str) -> Factory:
    return lambda _: make_policy(name)


def rivals() -> dict[str, Factory]:
    """Who meets in every scenario. `static` is what ratios are to; `local` knows nothing of others."""
    return {
        "static": _named("static"),
        "dbs": _named("dbs"),
        "lb_bsp": _named("lb_bsp"),
        "local": lambda _: OwnPace(),
        "dynamix": _named("dynamix"),
        "stigmergic": _named("stigmergic"),
    }


def variants() -> dict[str, Factory]:
    """The rule with something taken away; the learned numbers stay as they are."""
    learned = pretrained().parameters

    def faded(alpha: float) -> Factory:
        return lambda _: StigmergicPolicy(learned, decay=Decay(alpha=alpha, beta=1.0, start=0.0))

    return {
        "static": _named("static"),
        "stigmergic": _named("stigmergic"),
        "no-traces": lambda _: StigmergicPolicy(learned, shared=False),
        **{name: faded(alpha) for name, alpha in FADES.items()},
        "no-noise": lambda _: StigmergicPolicy(replace(learned, push=0.0)),
        "no-grow-shrink": lambda _: StigmergicPolicy(replace(learned, damp=0.0)),
        "by-hand": lambda _: StigmergicPolicy(Parameters()),
    }


def compare(
    plan: StigmergyPlan,
    factories: Mapping[str, Factory],
    worlds: Callable[[int], list[Phase]],
    extra: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """All of them on the worlds of every seed: times over all clusters, ratios to static, and those of `extra`."""
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
    extra = [("stigmergic", base) for base in ("dbs", "lb_bsp", "dynamix")]
    return compare(plan, rivals(), lambda seed: phases_of(scenario, clusters, workers, windows, seed), extra)


def run_ablations(plan: StigmergyPlan, scenario: str, workers: int) -> dict[str, Any]:
    """What traces and their decay are worth."""
    clusters, windows = plan.sizes(workers)
    factories = variants()
    extra = [(name, "stigmergic") for name in factories if name not in ("static", "stigmergic")]
    return compare(plan, factories, lambda seed: phases_of(scenario, clusters, workers, windows, seed), extra)


def run_failures(plan: StigmergyPlan, workers: int) -> dict[str, Any]:
    """From half way on nobody decides: the arbiter of a central policy, or the store of the stigmergic one, is dead.

    `gain_left` is what remains of a policy's own gain, (1 - t_dead / t_static) / (1 - t_whole / t_static). A central
    policy that every rank runs for itself on gathered observations has no arbiter to lose, nor has the stigmergic one:
    both keep all of it.
    """
    clusters, windows = plan.sizes(workers)
    taken: dict[str, list[Floats]] = {}
    for seed in plan.seeds:
        phases = phases_of("slowdowns", clusters, workers, windows, seed)
        paths = {"static": play(_named("static"), phases, seed=seed, interval=plan.interval, delay=plan.delay)}
        for name in FAILING:
            for dead, after in (("", None), ("-dead", windows // 2)):
                paths[name + dead] = play(
                    _named(name), phases, seed=seed, interval=plan.interval, delay=plan.delay, dies_after=after
                )
        for name, values in times_to_common_progress(paths).items():
            taken.setdefault(name, []).append(values)
    cell = _scored({name: np.concatenate(values) for name, values in taken.items()}, plan)
    over = {name: cell["ratios"][f"{name}/static"]["median"] for name in taken if name != "static"}
    left = {name: round((1 - over[f"{name}-dead"]) / (1 - over[name]), 3) for name in FAILING if over[name] < 0.99}
    return {**cell, "gain_left": left}


def run_vanished(plan: StigmergyPlan, workers: int) -> dict[str, Any]:
    """Half way a quarter of the workers are gone, and the job starts again on the others from even shares."""
    clusters, windows = plan.sizes(workers)
    names = ("static", "dbs", "lb_bsp", "dynamix", "stigmergic")
    return compare(plan, {n: _named(n) for n in names}, lambda seed: vanishing(clusters, workers, windows, seed))


def run_recovery(plan: StigmergyPlan, workers: int) -> dict[str, Any]:
    """Windows after a lasting slowdown of one worker (2.5 times) until two in a row make 95 % of the lagged reference's
    progress per second; `after` where that never came."""
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
        return run_cell(self.plan, cell.key)

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        return found if _scenarios(found) else {}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        costs = cells.get(COST, {"decision_us": []})
        played = {name: cell for name, cell in cells.items() if name != COST}
        return {**_joined(_scenarios(cells), self.plan), "cells": played, **costs}

    def table(self, result: Mapping[str, Any]) -> str:
        return markdown(result)

    def page(self, result: Mapping[str, Any]) -> str:
        return page(result)


def _scenarios(cells: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cell for name, cell in cells.items() if name.rpartition("-")[0] in FAMILIES}


def _joined(cells: Mapping[str, Any], plan: StigmergyPlan) -> dict[str, Any]:
    """The scenarios together, each weighing the same: `policies` has lists over `pairs_of`, ratios are bootstrapped
    over cells too.
    """
    names = next(iter(cells.values()))["policies"]
    times = {name: {cell: part["policies"][name]["times_s"] for cell, part in cells.items()} for name in names}
    ratios = {
        f"{name}/{base}": paired_ratio(times[name], times[base], resamples=plan.resamples).to_dict()
        for name, base in [(name, "static") for name in names if name != "static"]
        + [("stigmergic", "dbs"), ("stigmergic", "dynamix")]
    }
    lists = {
        name: {"time_to_target_s": [part["policies"][name]["time_to_target_s"] for part in cells.values()]}
        for name in names
    }
    return {"pairs": list(cells), "policies": lists, "ratios": ratios}
