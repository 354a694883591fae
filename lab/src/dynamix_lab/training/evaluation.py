"""Paired comparison of policies on simulated clusters: how much longer each takes for the same progress.

`dynamix policy evaluate` prints the table.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dynamix.errors import ConfigError, UsageError
from dynamix.policies.goodput import Goodput
from dynamix.policies.proportional import LBBSP
from dynamix.policies.protocol import Policy
from dynamix.policies.registry import make_policy
from dynamix.policies.static import Static
from dynamix.window import Floats
from dynamix_lab.baselines.cannikin import Cannikin
from dynamix_lab.installed import how_to_install
from dynamix_lab.simulator import (
    BREAKING,
    CONFORMING,
    DEVELOPMENT,
    ClusterEnv,
    Clusters,
    HedgedReference,
    LaggedReference,
    rollout_path,
)
from dynamix_lab.training.worlds import MIXED, check_world, lr_rule_of, sample_world

Factory = Callable[[ClusterEnv], Policy]
Tell = Callable[[str, float], None]
BASELINES: dict[str, Factory] = {"static": lambda _: Static(), "lb_bsp": lambda _: LBBSP()}
VALIDATION_INTERVALS = (10, 5, 2)
RULES: dict[str, Factory] = {"cannikin": lambda _: Cannikin(), "goodput": lambda _: Goodput()}


def named(name: str) -> Factory:
    """Makes the policy of a name."""
    return lambda _: make_policy(name)


def follow(make: Factory, clusters: Clusters, *, seed: int, windows: int, **settings: Any) -> Floats:
    """Seconds and progress (windows + 1, 2, C) of a policy from equal shares on; `settings` of `ClusterEnv`."""
    env = ClusterEnv(clusters, seed=seed, **settings)
    return rollout_path(make(env), env, windows)


def times_to_common_progress(paths: Mapping[str, Floats]) -> dict[str, Floats]:
    """Seconds (C,) each policy needs for the progress that all of them reach."""
    target = np.min([path[-1, 1] for path in paths.values()], axis=0)
    return {
        name: np.array([np.interp(target[c], path[:, 1, c], path[:, 0, c]) for c in range(len(target))])
        for name, path in paths.items()
    }


def times_to_progress(factories: Mapping[str, Factory], clusters: Clusters, **settings: Any) -> dict[str, Floats]:
    """Seconds (C,) each policy needs for the progress that all of them reach; `settings` of `follow`."""
    return times_to_common_progress({name: follow(make, clusters, **settings) for name, make in factories.items()})


def evaluate_families(
    policies: Mapping[str, Factory],
    seeds: Sequence[int],
    *,
    families: Sequence[str] = (*CONFORMING, *BREAKING),
    workers: Sequence[int] = (2, 8, 32, 256),
    rows: int = 1024,
    windows: int = 80,
    hedged: bool = True,
    progress: Tell | None = None,
) -> dict[str, Any]:
    """Compare policies on the calibrated families or other worlds (`worlds.py`): `cells` by "family-W", and `summary`.

    rows     clusters * W per seed, at least 4 and at most 64 clusters
    hedged   False omits the hedged reference, which takes most of the time at large W, and with it `gap_closed`

    Static, LB-BSP, Cannikin and the goodput rule are always added. A cell has, for every policy, `lagged`'s time over
    its time (`geometric_mean`, `worst_decile`), paired ratios to Cannikin's and the goodput rule's times with their
    95 % intervals (above 1: faster), and `gap_closed` = (G - G_lbbsp) / (G_hedged - G_lbbsp), G being 1 / geometric
    mean time. It is None if hedged is less than 1 % ahead.
    """
    factories: dict[str, Factory] = {"lagged": LaggedReference, **BASELINES, **RULES, **policies}
    if hedged:
        factories["hedged"] = HedgedReference
    cells: dict[str, Any] = {}
    names = [(family, w) for w in workers for family in families]
    for i, (family, w) in enumerate(names):
        gathered: dict[str, list[Floats]] = {name: [] for name in factories}
        for seed in seeds:
            world, rule = sample_world(family, min(max(rows // w, 4), 64), w, seed), lr_rule_of(family)
            paths = {n: follow(make, world, seed=seed, windows=windows, lr_rule=rule) for n, make in factories.items()}
            for name, taken in times_to_common_progress(paths).items():
                gathered[name].append(np.log(taken))
        cells[f"{family}-{w}"] = _cell({name: np.concatenate(logs) for name, logs in gathered.items()})
        if progress is not None:
            progress(f"{family}, W={w}", (i + 1) / len(names))
    return {"cells": cells, "summary": {name: _over_cells(cells, name) for name in factories if name != "lagged"}}


def log_speeds(
    policies: Mapping[str, Factory],
    seeds: Sequence[int],
    *,
    families: Sequence[str],
    workers: Sequence[int],
    rows: int,
    windows: int,
    tell: Callable[[str], None] = lambda what: None,
) -> dict[str, dict[int, Floats]]:
    """Log of policies' speeds over the goodput rule's, for every cluster, by policy and number of workers.

    rows   clusters * W per family and seed, at least 4 and at most 64 clusters
    """
    found: dict[str, dict[int, list[Floats]]] = {name: {w: [] for w in workers} for name in policies}
    factories: dict[str, Factory] = {"": lambda _: Goodput(), **policies}
    for w in workers:
        for family in families:
            tell(f"{family}, W={w}")
            for seed in seeds:
                world, rule = sample_world(family, min(max(rows // w, 4), 64), w, seed), lr_rule_of(family)
                times = times_to_progress(factories, world, seed=seed, windows=windows, lr_rule=rule)
                for name in policies:
                    found[name][w].append(np.log(times[""] / times[name]))
    return {name: {w: np.concatenate(logs) for w, logs in by_w.items()} for name, by_w in found.items()}


def speeds_with_intervals(logs: Mapping[int, Floats]) -> dict[str, list[float]]:
    """For one policy's `log_speeds`: `paired` by number of workers, and "all" of them together."""
    return {**{str(w): paired(log) for w, log in logs.items()}, "all": paired(np.concatenate(list(logs.values())))}


def validation_score(
    make: Factory, seed: int, *, rows: int, windows: int, workers: tuple[int, ...] = (2, 8, 32, 128), world: str = MIXED
) -> float:
    """On clusters like those of training: mean over W of mean and worst decile of the goodput rule's time / its own.

    Windows have 10, 5 or 2 steps, by number of workers.
    """
    scores = []
    for i, w in enumerate(workers):
        interval = VALIDATION_INTERVALS[i % len(VALIDATION_INTERVALS)]
        clusters, rule = _validation(world, w, seed, rows, windows, interval)
        mine = follow(make, clusters, seed=seed, windows=windows, interval=interval, lr_rule=lr_rule_of(world))
        times = times_to_common_progress({"rule": rule, "it": mine})
        ratio = times["rule"] / times["it"]
        scores.append(0.5 * (float(np.exp(np.log(ratio).mean())) + float(np.quantile(ratio, 0.1))))
    return float(np.mean(scores))


@functools.lru_cache(maxsize=8)
def _validation(world: str, workers: int, seed: int, rows: int, windows: int, interval: int) -> tuple[Clusters, Floats]:
    """Validation clusters of one W and the goodput rule's path on them."""
    clusters, rule = sample_world(world, min(max(rows // workers, 8), 64), workers, seed), lr_rule_of(world)
    how: dict[str, Any] = {"seed": seed, "windows": windows, "interval": interval, "lr_rule": rule}
    return clusters, follow(lambda _: Goodput(), clusters, **how)


def _cell(logs: Mapping[str, Floats]) -> dict[str, Any]:
    mean = {name: float(np.exp(-taken.mean())) for name, taken in logs.items()}
    gap = mean.get("hedged", 0.0) - mean["lb_bsp"]
    return {
        name: {
            **summary(np.exp(logs["lagged"] - taken)),
            "over_goodput": paired(logs["goodput"] - taken),
            "over_cannikin": paired(logs["cannikin"] - taken),
            "gap_closed": round((mean[name] - mean["lb_bsp"]) / gap, 3) if gap > 0.01 * mean["lb_bsp"] else None,
        }
        for name, taken in logs.items()
        if name != "lagged"
    }


def summary(ratio: Floats) -> dict[str, float]:
    """Geometric mean and worst decile of ratios (C,)."""
    mean, worst = round(float(np.exp(np.log(ratio).mean())), 4), round(float(np.quantile(ratio, 0.1)), 4)
    return {"geometric_mean": mean, "worst_decile": worst, "clusters": float(len(ratio))}


def paired(log_ratio: Floats) -> list[float]:
    """Geometric mean and 95 % interval (Student's t, over pairs); for a single pair the interval is the mean."""
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise UsageError(f"comparing policies needs SciPy: {how_to_install('bench')}") from error
    middle, pairs = float(log_ratio.mean()), len(log_ratio)
    half = float(stats.t.ppf(0.975, pairs - 1) * stats.sem(log_ratio)) if pairs > 1 else 0.0
    return [round(float(np.exp(x)), 4) for x in (middle, middle - half, middle + half)]


def _over_cells(cells: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Medians over cells, and the cells with the policy ahead of or behind the goodput rule (interval excludes 1)."""
    scores = [cell[name] for cell in cells.values()]
    gaps = [score["gap_closed"] for score in scores if score["gap_closed"] is not None]
    return {
        "geometric_mean": round(float(np.median([score["geometric_mean"] for score in scores])), 4),
        "worst_decile": round(float(np.median([score["worst_decile"] for score in scores])), 4),
        "gap_closed": round(float(np.median(gaps)), 3) if gaps else None,
        "ahead_of_goodput": [cell for cell, all_scores in cells.items() if all_scores[name]["over_goodput"][1] > 1],
        "behind_goodput": [cell for cell, all_scores in cells.items() if all_scores[name]["over_goodput"][2] < 1],
    }


def chosen_cells(families: str | None, workers: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Parse a user's comma-separated lists. Raises `ConfigError` for unknown entries.

    >>> chosen_cells("pai-steady", "2,8")
    (('pai-steady',), (2, 8))
    """
    names = tuple(families.split(",")) if families else (*CONFORMING, *BREAKING, *DEVELOPMENT)
    for name in names:
        check_world(name)
    counts = workers.split(",")
    if not all(count.isdecimal() and int(count) >= 1 for count in counts):
        raise ConfigError("workers", workers, "numbers of 1 or more, comma-separated", "say 2,8,32")
    return names, tuple(map(int, counts))
