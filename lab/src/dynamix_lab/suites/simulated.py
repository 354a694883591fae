"""Policies on simulated clusters, family by family and by number of workers: `dynamix bench tta --cluster simulator`
and `dynamix bench scaling`.

A cell is one family at one W. Its best static batch is chosen on tuning seeds; every policy, baseline and reference
then meets the same test clusters, and a time is that for the progress which all of them reach. Cells are saved as they
end, so a stopped suite goes on where it was.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import RunFolder, commit, machine
from dynamix.policies import make_policy
from dynamix.policies.protocol import Policy, boundary
from dynamix.policies.registry import policy_names
from dynamix.projection import project
from dynamix.simulator import (
    BREAKING,
    CONFORMING,
    FAMILIES,
    REFERENCES,
    ClusterEnv,
    Clusters,
    interior_share,
    rollout,
    sample_family,
)  # fmt: skip
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix_lab.harness.runs import is_learned
from dynamix_lab.report.suite_page import write_simulated_report
from dynamix_lab.statistics import paired_ratio

Factory = Callable[[ClusterEnv], Policy]
Tell = Callable[[str, float], None]
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
    """

    command: str
    cells: tuple[tuple[str, int], ...]
    policies: tuple[str, ...]
    seeds: tuple[int, ...] = TEST_SEEDS
    clusters: int = 48
    windows: int = 100
    interval: int = 5
    delay: int = 1
    references: tuple[str, ...] = ("lagged", "greedy", "hedged")

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        for family, workers in self.cells:
            if family not in FAMILIES or workers < 1:
                raise ConfigError(
                    "family, workers", (family, workers), f"{', '.join(FAMILIES)}; 1 or more", "check both"
                )
        for name in self.policies:
            make_policy(name)
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("matplotlib", "not installed", "installed", "pip install dynamix-lab")


def tta_suite(
    *, quick: bool, policies: Sequence[str] | None = None, families: Iterable[str] | None = None
) -> SimulatedPlan:
    """All held-out families at W = 8 and 32 (quick: 8)."""
    chosen = tuple(families or (*CONFORMING, *BREAKING))
    workers = (8,) if quick else (8, 32)
    cells = tuple((family, w) for family in chosen for w in workers)
    names = tuple(policies or policy_names())
    return SimulatedPlan("bench tta --cluster simulator" + (" --quick" if quick else ""), cells, names,
                 seeds=TEST_SEEDS[:1] if quick else TEST_SEEDS, clusters=16 if quick else 48,
                 windows=60 if quick else 100)  # fmt: skip


def scaling_suite(*, quick: bool, policies: Sequence[str] | None = None) -> SimulatedPlan:
    """Frequent slowdowns from 2 to 1,024 workers (quick: to 128)."""
    workers = (2, 8, 32, 128) if quick else (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    names = tuple(policies or policy_names())
    return SimulatedPlan("bench scaling" + (" --quick" if quick else ""), tuple(("affine-slowdowns", w) for w in workers), names,
                 seeds=TEST_SEEDS[:1] if quick else TEST_SEEDS[:2], clusters=16, windows=60)  # fmt: skip


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


def run_suite(suite: SimulatedPlan, folder: RunFolder, *, tell: Tell = lambda what, done: None) -> dict[str, Any]:
    """Run what `folder` does not hold yet; writes run.json, a file per cell, result.json, table.md, report.html."""
    suite.check()
    facts: dict[str, Any] = {"schema": SCHEMA, "command": suite.command, "cluster": "simulator", "mechanisms": {},
             "seeds": list(suite.seeds), "suite": json.loads(json.dumps(asdict(suite)))}  # fmt: skip
    before = folder.read_run()
    if before and before.get("suite") != facts["suite"]:
        raise ConfigError("suite", suite.command, f"the one begun in {folder.path}", "resume with the same arguments")
    folder.write_run(**facts)
    cells: dict[str, Any] = {}
    for i, (family, workers) in enumerate(suite.cells):
        name = f"{family}-{workers}"
        path = folder.path / "cells" / f"{name}.json"
        if not path.exists():
            tell(name, i / len(suite.cells))
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(run_cell(suite, family, workers), allow_nan=False), encoding="utf-8")
        cells[name] = json.loads(path.read_text(encoding="utf-8"))
    result = {**facts, "commit": commit(), "machine": machine(), **_joined(cells), "cells": cells}
    folder.write_result(result)
    (folder.path / "table.md").write_text(markdown(cells), encoding="utf-8")
    write_simulated_report(folder.path / "report.html", result)
    return result


def _joined(cells: dict[str, Any]) -> dict[str, Any]:
    """All cells together, each weighing the same: `policies` has lists over `pairs`, the names of the cells."""
    keys = ("time_to_target_s", "time_over_static", "lagged_over_time", "worst_decile")
    names = next(iter(cells.values()))["policies"]
    lists = {name: {key: [cell["policies"][name][key] for cell in cells.values()] for key in keys} for name in names}
    over = {name: paired_ratio(part["time_over_static"], [1.0] * len(cells)) for name, part in lists.items()}
    ratios = {f"{name}/static": ratio.to_dict() for name, ratio in over.items() if name != "static"}
    return {"pairs": list(cells), "target": None, "policies": lists, "ratios": ratios}


def run_cell(suite: SimulatedPlan, family: str, workers: int) -> dict[str, Any]:
    """One family at one W: times relative to the lagged reference, and the share of the attainable cut."""
    clusters = max(1, min(suite.clusters, 4096 // workers))
    factor = _best_static(suite, family, workers, clusters)
    factories: dict[str, Factory] = {"static": lambda _: StaticAt(factor)}
    factories |= {name: _by_name(name) for name in suite.policies if name != "static"}
    references = list(suite.references)
    factories |= {name: REFERENCES[name] for name in references}
    taken: dict[str, list[Floats]] = {name: [] for name in factories}
    interior: list[float] = []
    for seed in suite.seeds:
        world = sample_family(family, clusters, workers, seed)
        times, inside = times_to_progress(factories, world, suite, seed)
        interior.append(inside)
        for name, values in times.items():
            taken[name].append(values)
    all_times = {name: np.concatenate(values) for name, values in taken.items()}
    return _scores(all_times, references, factor) | {"interior_share": round(float(np.mean(interior)), 3)}


def _by_name(name: str) -> Factory:
    return lambda _: make_policy(name)


def _best_static(suite: SimulatedPlan, family: str, workers: int, clusters: int) -> float:
    factories: dict[str, Factory] = {str(f): (lambda _, f=f: StaticAt(f)) for f in SWEEP}  # type: ignore[misc]
    logs = np.zeros(len(SWEEP))
    for seed in TUNING_SEEDS:
        times, _ = times_to_progress(factories, sample_family(family, clusters, workers, seed), suite, seed)
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

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        return project(self.policy.decide(window, bounds), bounds, current=window.batch_size)


def times_to_progress(
    factories: Mapping[str, Factory], clusters: Clusters, suite: SimulatedPlan, seed: int
) -> tuple[dict[str, Floats], float]:
    """Seconds (C,) each needs for the progress all reach, and the share of interior sizes of "lagged" over its run."""
    paths, inside = {}, math.nan
    for name, make in factories.items():
        policy, env, windows = world_of(
            make, clusters, seed=seed, windows=suite.windows, interval=suite.interval, delay=suite.delay
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


def markdown(cells: dict[str, Any]) -> str:
    """Rows are cells, columns policies: time of the lagged reference / time of the policy, mean / worst decile."""
    names = list(next(iter(cells.values()))["policies"])
    lines = ["| cell | attainable cut (by) | interior | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for name, cell in cells.items():
        scores = [f"{p['lagged_over_time']:.3f} / {p['worst_decile']:.3f}" for p in cell["policies"].values()]
        head = f"{name} | {100 * cell['attainable_cut']:.0f} % ({cell['attained_by']}) | {100 * cell['interior_share']:.0f} %"
        lines.append(f"| {head} | " + " | ".join(scores) + " |")
    return "\n".join(lines) + "\n"
