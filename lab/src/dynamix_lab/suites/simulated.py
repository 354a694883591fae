"""Policies on simulated clusters by number of workers: `dynamix bench scaling`.

A cell is one family at one W. Its best static batch is chosen on tuning seeds; every policy, baseline and reference
then meets the same test clusters, and a time is that for the progress which all of them reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.policies.protocol import Policy, boundary
from dynamix.policies.registry import policy_names
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix_lab.harness.runs import is_learned
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Page, Section, Table, legend_beside, look, measured, new_figure, percent, provenance
from dynamix_lab.simulator import (
    FAMILIES,
    REFERENCES,
    ClusterEnv,
    Clusters,
    interior_share,
    rollout,
    sample_family,
)
from dynamix_lab.statistics import paired_ratio
from dynamix_lab.suites.outside import Sampler, load_families, source_sha256

Factory = Callable[[ClusterEnv], Policy]
SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0)  # static batches tried, as factors on the base batch
TUNING_SEEDS, TEST_SEEDS = (700_001, 700_002), tuple(range(710_001, 710_006))
EPOCH_WINDOWS = 20  # windows in an epoch, for policies that decide per epoch


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    """What one call runs.

    cells        (family, W)
    seeds        test seeds; `clusters` clusters each, and every cluster is a pair
    windows      decisions per run
    references   names of `REFERENCES`; "planned" costs W^2 simulations a decision
    families_from   MODULE:FUNCTION of families from outside (`outside.load_families`), beside the shipped ones
    """

    cells: tuple[tuple[str, int], ...]
    policies: tuple[str, ...]
    seeds: tuple[int, ...] = TEST_SEEDS
    clusters: int = 48
    windows: int = 100
    interval: int = 5
    delay: int = 1
    references: tuple[str, ...] = ("lagged", "greedy", "hedged")
    families_from: str | None = None

    def check(self) -> None:
        """Raises `ConfigError` before anything runs; every family from outside is drawn once."""
        outside = self.outside()
        known = (*FAMILIES, *outside)
        for family, workers in self.cells:
            if family not in known or workers < 1:
                raise ConfigError("family, workers", (family, workers), f"{', '.join(known)}; 1 or more", "check both")
            if family in outside:
                outside[family](2, workers, self.seeds[0])
        for name in self.policies:
            make_policy(name)

    def outside(self) -> dict[str, Sampler]:
        """The families from outside, by name."""
        return {} if self.families_from is None else load_families(self.families_from)

    def sample(self, family: str, count: int, workers: int, seed: int) -> Clusters:
        """Clusters of a family, shipped or from outside."""
        if family in FAMILIES:
            return sample_family(family, count, workers, seed)
        return self.outside()[family](count, workers, seed)


def scaling_plan(
    *, quick: bool, policies: Sequence[str] | None = None, families_from: str | None = None
) -> SimulatedPlan:
    """Frequent slowdowns, or every family from outside, from 2 to 1,024 workers (quick: to 128)."""
    workers = (2, 8, 32, 128) if quick else (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    chosen = ("affine-slowdowns",) if families_from is None else tuple(load_families(families_from))
    return SimulatedPlan(
        tuple((family, w) for family in chosen for w in workers),
        tuple(policies or policy_names()),
        seeds=TEST_SEEDS[:1] if quick else TEST_SEEDS[:2],
        clusters=16,
        windows=60,
        families_from=families_from,
    )


class StaticAt:
    """Equal sizes at `factor` times the base batch, for ever."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        even = np.broadcast_to(window.base_batch[..., None] / window.workers, window.batch_size.shape)
        return project(even * self.factor, bounds)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class SimulatedSuite(Suite):
    """`dynamix bench scaling`."""

    plan: SimulatedPlan
    name: str = "scaling"

    def facts(self) -> dict[str, Any]:
        return {"cluster": "simulator", "mechanisms": {}, "scenario_sha256": None, "seeds": list(self.plan.seeds)}

    def bound_to(self) -> dict[str, Any]:
        """The file of the families from outside: half of a run on others would be a run on neither."""
        place = self.plan.families_from
        return {} if place is None else {"families_sha256": source_sha256(place)}

    def cells(self) -> list[Cell]:
        return [Cell(f"{family}-{workers}", (family, workers)) for family, workers in self.plan.cells]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        family, workers = cell.what
        return run_cell(self.plan, family, workers)

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        return {**_joined(cells), "cells": dict(cells)}

    def table(self, result: Mapping[str, Any]) -> str:
        return table(result).markdown()

    def page(self, result: Mapping[str, Any]) -> str:
        over_workers = len({family for family, _ in self.plan.cells}) == 1
        figure = _over_workers(result["cells"]) if over_workers else _over_cells(result["cells"])
        said = (
            "Simulated clusters. A cell is the lagged reference's time over the policy's for the same progress: "
            "geometric mean / worst decile of the clusters. Above 1 is faster than the reference."
        )
        sections = [Section(table=table(result)), Section(figure=figure, caption="Geometric means of the same ratio.")]
        return Page(result["command"], sections, lead=[said, provenance(result)], details=measured(result)).html()


def _joined(cells: Mapping[str, Any]) -> dict[str, Any]:
    """All cells together, each weighing the same: `policies` has lists over `pairs`, the names of the cells."""
    keys = ("time_to_target_s", "time_over_static", "lagged_over_time", "worst_decile")
    names = next(iter(cells.values()))["policies"]
    lists = {name: {key: [cell["policies"][name][key] for cell in cells.values()] for key in keys} for name in names}
    over = {name: paired_ratio(part["time_over_static"], [1.0] * len(cells)) for name, part in lists.items()}
    ratios = {f"{name}/static": ratio.to_dict() for name, ratio in over.items() if name != "static"}
    return {"pairs": list(cells), "target": None, "policies": lists, "ratios": ratios}


def run_cell(plan: SimulatedPlan, family: str, workers: int) -> dict[str, Any]:
    """One family at one W: times relative to the lagged reference, and the share of the attainable cut."""
    clusters = max(1, min(plan.clusters, 4096 // workers))
    factor = _best_static(plan, family, workers, clusters)
    factories: dict[str, Factory] = {"static": lambda _: StaticAt(factor)}
    factories |= {name: _by_name(name) for name in plan.policies if name != "static"}
    references = list(plan.references)
    factories |= {name: REFERENCES[name] for name in references}
    taken: dict[str, list[Floats]] = {name: [] for name in factories}
    interior: list[float] = []
    for seed in plan.seeds:
        world = plan.sample(family, clusters, workers, seed)
        times, inside = times_to_progress(factories, world, plan, seed)
        interior.append(inside)
        for name, values in times.items():
            taken[name].append(values)
    all_times = {name: np.concatenate(values) for name, values in taken.items()}
    return _scores(all_times, references, factor) | {"interior_share": round(float(np.mean(interior)), 3)}


def _by_name(name: str) -> Factory:
    return lambda _: make_policy(name)


def _best_static(plan: SimulatedPlan, family: str, workers: int, clusters: int) -> float:
    factories: dict[str, Factory] = {str(f): (lambda _, f=f: StaticAt(f)) for f in SWEEP}  # type: ignore[misc]
    logs = np.zeros(len(SWEEP))
    for seed in TUNING_SEEDS:
        times, _ = times_to_progress(factories, plan.sample(family, clusters, workers, seed), plan, seed)
        logs += [np.log(times[name]).mean() for name in factories]
    return SWEEP[int(np.argmin(logs))]


def world_of(
    make: Factory, clusters: Clusters, *, seed: int, windows: int, interval: int, delay: int
) -> tuple[Policy, ClusterEnv, int]:
    """A policy, its environment, and in how many windows it decides there: one that decides per epoch gets windows that
    long, and its answers wait for nothing."""
    env = ClusterEnv(clusters, seed=seed, interval=interval, delay=delay)
    policy = make(env)
    if boundary(policy) != "epoch":
        return policy, env, windows
    env = ClusterEnv(clusters, seed=seed, interval=EPOCH_WINDOWS * interval, delay=0)
    return policy, env, -(-windows // EPOCH_WINDOWS)


class Projected:
    """`policy` whose answers are held to the bounds, as a live job holds them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def window_length(self) -> Ints | None:
        """Steps (C,) of the next window, where the policy says it."""
        return getattr(self.policy, "window_length", None)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        return project(self.policy.decide(window, bounds), bounds, current=window.batch_size)


def times_to_progress(
    factories: Mapping[str, Factory], clusters: Clusters, plan: SimulatedPlan, seed: int
) -> tuple[dict[str, Floats], float]:
    """Seconds (C,) each needs for the progress all reach, and the share of interior sizes of "lagged" over its run."""
    paths, inside = {}, math.nan
    for name, make in factories.items():
        policy, env, windows = world_of(
            make, clusters, seed=seed, windows=plan.windows, interval=plan.interval, delay=plan.delay
        )
        path: list[tuple[Floats, Floats]] = []
        shares: list[float] = []
        for window in rollout(Projected(policy), env, windows):
            path.append((env.clock_s, env.progress))
            if name == "lagged":
                shares.append(interior_share(window.batch_size, clusters).mean())
        paths[name] = np.array(path)
        inside = float(np.mean(shares[1:])) if shares else inside
    target = np.min([path[-1, 1] for path in paths.values()], axis=0)
    return {
        name: np.array([np.interp(target[c], path[:, 1, c], path[:, 0, c]) for c in range(len(target))])
        for name, path in paths.items()
    }, inside


def _scores(times: dict[str, Floats], references: list[str], factor: float) -> dict[str, Any]:
    static = times["static"]
    over = {name: np.log(t / static) for name, t in times.items()}
    mean = {name: float(np.exp(log.mean())) for name, log in over.items()}
    best = min(
        (name for name in mean if name != "static" and not is_learned(name)),
        key=lambda name: mean[name],
    )
    cut = 1 - mean[best]
    return {
        "static_factor": factor,
        "attainable_cut": round(cut, 4),
        "attained_by": best,
        "clusters": len(static),
        "policies": {
            name: {
                "time_to_target_s": round(float(np.exp(np.log(t).mean())), 3),
                "time_over_static": round(mean[name], 4),
                "lagged_over_time": round(float(np.exp(np.log(times["lagged"] / t).mean())), 4),
                "worst_decile": round(float(np.quantile(times["lagged"] / t, 0.1)), 4),
                "fraction_of_cut": round((1 - mean[name]) / cut, 3) if cut > 0.005 else None,
                "reference": name in references,
            }
            for name, t in times.items()
        },
    }


def table(result: Mapping[str, Any]) -> Table:
    """Rows are cells, columns policies: time of the lagged reference / time of the policy, mean / worst decile."""
    cells = result["cells"]
    head = ["cell", "attainable cut (by)", "interior", *next(iter(cells.values()))["policies"]]
    rows = [
        [
            name,
            f"{percent(cell['attainable_cut'])} ({cell['attained_by']})",
            percent(cell["interior_share"]),
            *[f"{p['lagged_over_time']:.3f} / {p['worst_decile']:.3f}" for p in cell["policies"].values()],
        ]
        for name, cell in cells.items()
    ]
    return Table(head, rows)


def _over_workers(cells: Mapping[str, Any]) -> Any:
    """Every policy's ratio against the number of workers."""
    figure, (axes,) = new_figure()
    workers = [int(cell.rpartition("-")[2]) for cell in cells]
    for i, name in enumerate(next(iter(cells.values()))["policies"]):
        ratios = [cell["policies"][name]["lagged_over_time"] for cell in cells.values()]
        axes.plot(workers, ratios, marker="o", ms=3, label=name, **look(i))
    axes.set(xscale="log", xlabel="workers", ylabel="time of lagged / time")
    axes.set_xticks(workers, [str(count) for count in workers])
    axes.minorticks_off()
    legend_beside(axes, columns=2)
    return figure


def _over_cells(cells: Mapping[str, Any]) -> Any:
    """Every policy's ratio in each cell."""
    figure, (axes,) = new_figure(height=1.5 + 0.28 * len(cells))
    for i, name in enumerate(next(iter(cells.values()))["policies"]):
        ratios = [cell["policies"][name]["lagged_over_time"] for cell in cells.values()]
        filled = None if i < 8 else "none"
        axes.plot(ratios, range(len(cells)), "o", ms=5, label=name, color=look(i)["color"], mfc=filled)
    axes.set(yticks=range(len(cells)), xlabel="time of lagged / time (1: as fast as the lagged reference)")
    axes.set_yticklabels(list(cells))
    axes.invert_yaxis()
    axes.grid(axis="y", lw=0.4)
    legend_beside(axes, columns=2)
    return figure
