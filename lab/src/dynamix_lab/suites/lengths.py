"""What it is worth to know what samples cost, on simulated clusters: `dynamix bench lengths`.

On the families whose samples cost unlike much, every policy meets the same clusters twice: with samples cut by their
number, their costs unknown, and with rounds cut by cost and windows that know it (`batch_sampler(lengths=...)`). All
times are those for the progress that every policy reaches in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.window import Floats
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Page, Section, Table, measured, provenance, with_interval
from dynamix_lab.simulator import DEVELOPMENT, Clusters, rollout, sample_family, with_lengths
from dynamix_lab.statistics import paired_ratio
from dynamix_lab.suites.simulated import TEST_SEEDS, Projected, StaticAt, world_of
from dynamix_lab.training.evaluation import times_to_common_progress

FAMILIES = ("data-dependent", "data-dependent-wide")
POLICIES = ("static", "lb_bsp", "goodput", "dynamix")
RULE = "goodput"  # that others are compared with
MOST_ROWS = 8192  # workers of all clusters of a seed
WAYS = ("without", "with")


@dataclass(frozen=True, slots=True)
class LengthsPlan:
    """What one call runs.

    cells      (family, W)
    clusters   of each seed, where W allows
    windows    decisions per run
    """

    cells: tuple[tuple[str, int], ...]
    policies: tuple[str, ...] = POLICIES
    seeds: tuple[int, ...] = TEST_SEEDS
    clusters: int = 48
    windows: int = 100
    interval: int = 5
    delay: int = 1

    @classmethod
    def of(cls, *, quick: bool) -> LengthsPlan:
        """Both families at W = 8, 32 and 256, or a few clusters of the milder one."""
        if quick:
            return cls((("data-dependent", 8),), seeds=TEST_SEEDS[:1], clusters=16, windows=40)
        return cls(tuple((family, workers) for family in FAMILIES for workers in (8, 32, 256)))

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        for family, workers in self.cells:
            if family not in FAMILIES or workers < 2:
                raise ConfigError("family, workers", (family, workers), f"{', '.join(FAMILIES)}; 2 or more", "check")
        if RULE not in self.policies:
            raise ConfigError("policies", self.policies, f"{RULE} among them", "others are compared with it")
        for name in self.policies:
            make_policy(name)


@dataclass(frozen=True)
class LengthsSuite(Suite):
    """`dynamix bench lengths`."""

    plan: LengthsPlan
    name: str = "lengths"

    def facts(self) -> dict[str, Any]:
        return {"cluster": "simulator", "mechanisms": {}, "scenario_sha256": None, "seeds": list(self.plan.seeds)}

    def cells(self) -> list[Cell]:
        return [Cell(f"{family}-{workers}", (family, workers)) for family, workers in self.plan.cells]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        family, workers = cell.what
        return run_cell(self.plan, family, workers)

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        return {"pairs": list(cells), "target": None, "cells": dict(cells)}

    def table(self, result: Mapping[str, Any]) -> str:
        return table(result).markdown()

    def page(self, result: Mapping[str, Any]) -> str:
        sections = [Section(table=table(result))]
        return Page(result["command"], sections, lead=[provenance(result)], details=measured(result)).html()


def run_cell(plan: LengthsPlan, family: str, workers: int) -> dict[str, Any]:
    """By policy: its speed over the rule's without and with lengths, and its speed with over that without."""
    assert family in DEVELOPMENT
    clusters = max(4, min(plan.clusters, MOST_ROWS // workers))
    times: dict[str, list[Floats]] = {}
    for seed in plan.seeds:
        world = sample_family(family, clusters, workers, seed)
        paths = {
            f"{name} {way}": _path(plan, name, with_lengths(world) if way == "with" else world, seed)
            for name in plan.policies
            for way in WAYS
        }
        for key, taken in times_to_common_progress(paths).items():
            times.setdefault(key, []).append(taken)
    all_times = {key: np.concatenate(taken).tolist() for key, taken in times.items()}
    found: dict[str, Any] = {}
    for name in plan.policies:
        own = {way: all_times[f"{name} {way}"] for way in WAYS}
        over = {way: paired_ratio(all_times[f"{RULE} {way}"], own[way]).to_dict() for way in WAYS}
        found[name] = {**over, "gain": paired_ratio(own["without"], own["with"]).to_dict()}
    return {"clusters": len(all_times[f"{RULE} with"]), "policies": found}


def _path(plan: LengthsPlan, name: str, clusters: Clusters, seed: int) -> Floats:
    """Seconds and progress (windows + 1, 2, C)."""
    policy, env, windows = world_of(
        lambda _: StaticAt(1.0) if name == "static" else make_policy(name),
        clusters,
        seed=seed,
        windows=plan.windows,
        interval=plan.interval,
        delay=plan.delay,
    )
    return np.array([(env.clock_s, env.progress) for _ in rollout(Projected(policy), env, windows)])


def table(result: Mapping[str, Any]) -> Table:
    """A row for each policy of each cell: speeds, with 95 % intervals over clusters."""
    rows = [
        [cell, str(of["clusters"]), name, *(with_interval(part[way]) for way in (*WAYS, "gain"))]
        for cell, of in result["cells"].items()
        for name, part in of["policies"].items()
    ]
    over = [f"speed over {RULE}, {way} lengths" for way in WAYS]
    return Table(["cell", "clusters", "policy", *over, "speed with lengths over without"], rows)
