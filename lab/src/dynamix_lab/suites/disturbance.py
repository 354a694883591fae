"""The DBS paper's own disturbance on simulated clusters: `dynamix bench disturbance`.

Each epoch a worker is hit with chance 0.1. For 4 to 20 epochs it is then slower by the ratio of 5 to 10 s to an epoch
of 15 to 60 s (arXiv 2007.11831 and its code; the epoch's length is ours). A cell has workers that are otherwise equal,
or that differ as in the simulator's families, at one W. `dbs` decides once an epoch, all others once a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.policies.protocol import boundary
from dynamix.window import Floats
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Page, Section, Table, measured, percent, provenance
from dynamix_lab.simulator import ClusterEnv, Clusters, rollout_path, sample_family
from dynamix_lab.simulator.network import step_time
from dynamix_lab.statistics import paired_ratio
from dynamix_lab.training.evaluation import times_to_common_progress

KINDS = ("alike", "unlike")
STATIC = "static"  # equal shares at the user's batch size: the paper's baseline
CHANCE, EXTRA_S, EPOCH_S, EPOCHS_HIT = 0.1, (5.0, 10.0), (15.0, 60.0), 12.0  # 12 in the mean, uniform in 4 to 20
SEEDS = (740_001,)


@dataclass(frozen=True, slots=True)
class DisturbancePlan:
    """The settings of one call.

    cells        (kind of `KINDS`, W)
    clusters     per seed; every cluster is a pair
    epoch_steps  optimizer steps per epoch
    interval     optimizer steps per window
    """

    cells: tuple[tuple[str, int], ...] = tuple((kind, workers) for kind in KINDS for workers in (4, 8, 32))
    policies: tuple[str, ...] = (STATIC, "dbs", "lb_bsp", "goodput", "dynamix")
    seeds: tuple[int, ...] = SEEDS
    clusters: int = 24
    epochs: int = 20
    epoch_steps: int = 100
    interval: int = 10
    delay: int = 1

    @classmethod
    def of(cls, *, quick: bool) -> DisturbancePlan:
        """All cells, or a few short trainings of four workers."""
        return cls((("alike", 4),), clusters=6, epochs=5, epoch_steps=40) if quick else cls()

    def check(self) -> None:
        """Raise `ConfigError` before anything runs."""
        for kind, workers in self.cells:
            if kind not in KINDS or workers < 2:
                raise ConfigError("kind, workers", (kind, workers), f"{', '.join(KINDS)}; 2 or more", "check both")
        if STATIC not in self.policies:
            raise ConfigError("policies", self.policies, f"{STATIC} among them", "others are compared with it")
        for name in self.policies:
            make_policy(name)


@dataclass(frozen=True)
class DisturbanceSuite(Suite):
    """`dynamix bench disturbance`."""

    plan: DisturbancePlan
    name: str = "disturbance"

    def facts(self) -> dict[str, Any]:
        return {"cluster": "simulator", "mechanisms": {}, "scenario_sha256": None, "seeds": list(self.plan.seeds)}

    def cells(self) -> list[Cell]:
        return [Cell(f"{kind}-{workers}", (kind, workers)) for kind, workers in self.plan.cells]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        kind, workers = cell.what
        times: dict[str, list[float]] = {name: [] for name in self.plan.policies}
        for seed in self.plan.seeds:
            clusters = disturbed(kind, self.plan, workers, seed)
            paths = {name: _path(name, clusters, self.plan, seed) for name in self.plan.policies}
            for name, taken in times_to_common_progress(paths).items():
                times[name] += [round(float(each), 4) for each in taken]
        over = {name: paired_ratio(taken, times[STATIC]).to_dict() for name, taken in times.items()}
        return {"times_s": times, "time_over_static": over}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        return {"pairs": list(cells), "target": None, "cells": dict(cells)}

    def table(self, result: Mapping[str, Any]) -> str:
        return table(result).markdown()

    def page(self, result: Mapping[str, Any]) -> str:
        sections = [Section(table=table(result))]
        return Page(result["command"], sections, lead=[provenance(result)], details=measured(result)).html()


def disturbed(kind: str, plan: DisturbancePlan, workers: int, seed: int) -> Clusters:
    """Quiet clusters with the disturbance, in units of their own epochs at equal shares."""
    c = sample_family("affine-quiet", plan.clusters, workers, seed)
    rng = np.random.default_rng([seed, workers, 17])
    if kind == "alike":
        first = (slice(None), slice(0, 1))
        cap = None if c.memory_cap is None else np.broadcast_to(c.memory_cap[first], c.shape)
        alpha, beta = (np.broadcast_to(part[first], c.shape) for part in (c.alpha, c.beta))
        c = replace(c, alpha=alpha, beta=beta, memory_cap=cap)
    slowest = c.costs.seconds(np.broadcast_to((c.base_batch / workers)[:, None], c.shape)).max(-1)
    epoch_s = (plan.epoch_steps * step_time(slowest, c.exchange_s, c.overlap))[:, None] * np.ones(c.shape)
    theirs_s = rng.uniform(*EPOCH_S, (c.shape[0], 1)) * np.ones(c.shape)
    c = replace(c, slow_off_s=epoch_s / CHANCE, slow_on_s=EPOCHS_HIT * epoch_s, slow_even=np.ones(c.shape[0], bool))
    return replace(c, slow_weakest=1 + EXTRA_S[0] / theirs_s, slow_strongest=1 + EXTRA_S[1] / theirs_s)


def _path(name: str, clusters: Clusters, plan: DisturbancePlan, seed: int) -> Floats:
    """Seconds and progress (windows + 1, 2, C)."""
    policy = make_policy(name)
    by_epoch = boundary(policy) == "epoch"
    steps, delay = (plan.epoch_steps, 0) if by_epoch else (plan.interval, plan.delay)
    env = ClusterEnv(clusters, seed=seed, interval=steps, delay=delay)
    windows = plan.epochs * plan.epoch_steps // steps
    return rollout_path(policy, env, windows)


def table(result: Mapping[str, Any]) -> Table:
    """A row per cell: by how much each policy cuts the static job's time, with 95 % intervals over clusters."""
    cells = result["cells"]
    names = [name for name in next(iter(cells.values()))["time_over_static"] if name != STATIC]
    rows = [
        [cell, str(len(of["times_s"][STATIC])), *(_cut(of["time_over_static"][name]) for name in names)]
        for cell, of in cells.items()
    ]
    return Table(["cell", "clusters", *(f"{name}: time cut" for name in names)], rows)


def _cut(ratio: Mapping[str, Any]) -> str:
    return f"{percent(1 - ratio['median'])} ({percent(1 - ratio['high'])}-{percent(1 - ratio['low'])})"
