"""How fast policies react on simulated clusters, by the length of their windows: `dynamix bench reaction`.

A cell is one family at one W. A policy with windows of 1, 2, 5 and 10 steps, and with windows whose length follows what
changes (`Controller(interval="auto")`), trains the same clusters for the same number of steps at least. A time is that
for the progress which all of them reach.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.policies.paced import FIRST, Paced
from dynamix.window import Floats
from dynamix_lab.emulator import load_scenario
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Section, Table, number, sections_markdown, with_interval
from dynamix_lab.simulator import FAMILIES, REFERENCES, ClusterEnv, Clusters, rollout, sample_family
from dynamix_lab.simulator.disturbances import Staircases
from dynamix_lab.statistics import paired_ratio
from dynamix_lab.suites.simulated import Projected

REPLAY = "pai-replay"
CHANGING = ("affine-slowdowns", "moving-neighbour", REPLAY, "pai-straggler", "pai-stragglers")
STEADY = ("affine-quiet", "data-dependent")
AUTO = "auto"
LENGTHS = ("1", "2", "5", "10", AUTO)
AGAINST = ("10", "5")  # 5: `Controller`'s default; it was 10 when the rule was made
DECISION_S = 0.003  # processor time of a decision of the goodput rule for 4 workers (`dynamix bench overhead`)
SEEDS = (730_001,)


@dataclass(frozen=True, slots=True)
class ReactionPlan:
    """What one call runs.

    cells       (family, W, clusters)
    policies    each with every length of `LENGTHS`; "lagged", which knows the costs that were true when a window
                closed, with windows of one and two steps beside them
    seeds       so many clusters each, and every cluster is a pair
    steps       optimizer steps of every cluster, at least
    delay       steps until a decision is in force
    """

    cells: tuple[tuple[str, int, int], ...]
    policies: tuple[str, ...] = ("goodput", "dynamix")
    seeds: tuple[int, ...] = SEEDS
    steps: int = 400
    delay: int = 1

    @classmethod
    def of(cls, *, quick: bool) -> ReactionPlan:
        """All families at 8 and 32 workers; quick: three at 8."""
        if quick:
            cells = tuple((family, 8, 8) for family in ("affine-slowdowns", REPLAY, "affine-quiet"))
            return cls(cells, ("goodput",), steps=150)
        return cls(tuple((family, *sizes) for sizes in ((8, 24), (32, 12)) for family in (*CHANGING, *STEADY)))

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        for cell in self.cells:
            if cell[0] not in (*FAMILIES, REPLAY) or min(cell[1:]) < 1:
                allowed = f"{', '.join((*FAMILIES, REPLAY))}; 1 or more"
                raise ConfigError("family, workers, clusters", cell, allowed, "check them")
        if min(self.steps, len(self.seeds)) < 1:
            raise ConfigError("steps, seeds", (self.steps, len(self.seeds)), "1 or more each", "leave them out")


def clusters_of(family: str, count: int, workers: int, seed: int) -> Clusters:
    """Clusters of a family of the simulator, or of the PAI replay: quiet ones, each of whose workers has a course of
    the emulator's scenario `pai-replay`, all from one moment of it."""
    if family != REPLAY:
        return sample_family(family, count, workers, seed)
    trace, rng = load_scenario(REPLAY).trace, np.random.default_rng([seed, workers])
    assert trace is not None
    assert trace.repeat_s is not None
    times, slower = np.array(trace.times_s), 1.0 / np.array(trace.factors)
    shape, course = (count, workers), rng.integers(0, slower.shape[1], (count, workers))
    stairs = Staircases(
        np.broadcast_to(times, (*shape, len(times))),
        slower.T[course],
        np.full(shape, trace.repeat_s),
        rng.uniform(0, trace.repeat_s, (count, 1)) * np.ones(shape),
    )
    return replace(sample_family("affine-quiet", count, workers, seed), stairs=stairs)


@dataclass(frozen=True)
class ReactionSuite(Suite):
    """`dynamix bench reaction`."""

    plan: ReactionPlan
    name: str = "reaction"

    def facts(self) -> dict[str, Any]:
        return {"cluster": "simulator", "mechanisms": {}, "scenario_sha256": None, "seeds": list(self.plan.seeds)}

    def cells(self) -> list[Cell]:
        return [Cell(f"{cell[0]}-{cell[1]}", cell) for cell in self.plan.cells]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        family, workers, count = cell.what
        rows = list(_rows(self.plan))
        times: dict[str, list[float]] = {f"{name} {length}": [] for name, length in rows}
        lengths: dict[str, list[float]] = {row: [] for row in times}
        for i, seed in enumerate(self.plan.seeds):
            clusters = clusters_of(family, count, workers, seed)
            paths, steps = {}, {}
            for j, (name, length) in enumerate(rows):
                context.tell(f"{name} {length}", (i * len(rows) + j) / (len(rows) * len(self.plan.seeds)))
                paths[f"{name} {length}"], steps[f"{name} {length}"] = _path(self.plan, clusters, seed, name, length)
            for row, taken in _times(paths).items():
                times[row] += [round(float(each), 4) for each in taken]
                lengths[row].append(steps[row])
        return {
            "times_s": times,
            "steps_of_a_window": {row: round(float(np.mean(found)), 2) for row, found in lengths.items()},
        }

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        rows = [f"{name} {length}" for name, length in _rows(self.plan)]
        ratios = {}
        for key, cell in cells.items():
            for row in rows:
                for other in dict.fromkeys(
                    f"{name} {steps}" for name in ("goodput", row.split()[0]) for steps in AGAINST
                ):
                    if row != other and other in cell["times_s"]:
                        faster = paired_ratio(cell["times_s"][other], cell["times_s"][row])
                        ratios[f"{key}: {row}/{other}"] = faster.to_dict()
        policies = {row: {"time_to_target_s": [cell["times_s"][row] for cell in cells.values()]} for row in rows}
        return {"target": None, "pairs": list(cells), "policies": policies, "ratios": ratios, "cells": dict(cells)}

    def table(self, result: Mapping[str, Any]) -> str:
        return sections_markdown(sections(result))


def sections(result: Mapping[str, Any]) -> list[Section]:
    """Speed of every row, against the goodput rule with windows of 10 steps and of 5, and how long windows were."""
    parts = []
    for against in AGAINST:
        text = [f"Speed over `goodput` with windows of {against} steps, above 1 is faster, with its 95 % interval."]
        parts.append(Section(f"Over {against} steps", text=text, table=_speeds(result, f"goodput {against}")))
    cells, head = result["cells"], ["cell"]
    rows = [row for row in result["policies"] if row.endswith(AUTO)]
    lengths = [[key, *[number(cell["steps_of_a_window"][row], 1) for row in rows]] for key, cell in cells.items()]
    text = ["Steps of a window where they follow what changes, in the mean over clusters and windows."]
    return [*parts, Section("Steps of a window", text=text, table=Table([*head, *rows], lengths))]


def _speeds(result: Mapping[str, Any], other: str) -> Table:
    rows = list(result["policies"])
    ratios = result["ratios"]
    body = [
        [key, *["1" if row == other else with_interval(ratios[f"{key}: {row}/{other}"], 3) for row in rows]]
        for key in result["pairs"]
    ]
    return Table(["cell", *rows], body)


def _rows(plan: ReactionPlan) -> Iterator[tuple[str, str]]:
    """Policy and length, in the order of the table: short fixed windows first."""
    for name in plan.policies:
        yield from ((name, length) for length in LENGTHS)
    yield from (("lagged", length) for length in LENGTHS[:2])


def _path(plan: ReactionPlan, clusters: Clusters, seed: int, name: str, length: str) -> tuple[Floats, float]:
    """Seconds and progress (windows, 2, C) of a run, and the mean length of its windows."""
    env = ClusterEnv(clusters, seed=seed, interval=FIRST if length == AUTO else int(length), delay=plan.delay)
    policy = REFERENCES[name](env) if name in REFERENCES else make_policy(name)
    path, steps = [], []
    if length == AUTO:
        policy = Paced(policy, clock=functools.partial(next, itertools.count(0.0, DECISION_S)))  # read twice a decision
    for window in rollout(Projected(policy), env):
        path.append((env.clock_s, env.progress))
        steps.append(float(window.steps.mean()))
        if env.counts.min() >= plan.steps:
            break
    return np.array(path), float(np.mean(steps))


def _times(paths: Mapping[str, Floats]) -> dict[str, Floats]:
    """Seconds (C,) that each took for the progress which all reach."""
    target = np.min([path[-1, 1] for path in paths.values()], axis=0)
    return {
        row: np.array([np.interp(target[c], path[:, 1, c], path[:, 0, c]) for c in range(len(target))])
        for row, path in paths.items()
    }
