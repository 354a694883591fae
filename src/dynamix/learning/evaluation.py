"""Paired comparison of policies on simulated clusters: how much longer each takes for the same progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dynamix.policies.base import Policy
from dynamix.policies.proportional import LBBSP
from dynamix.policies.static import Static
from dynamix.simulator import ClusterEnv, Clusters, LaggedReference, sample_clusters
from dynamix.window import Floats

Factory = Callable[[ClusterEnv], Policy]
BASELINES: dict[str, Factory] = {"static": lambda _: Static(), "lb_bsp": lambda _: LBBSP()}


def times_to_progress(
    factories: Mapping[str, Factory], clusters: Clusters, *, seed: int, windows: int, interval: int, delay: int
) -> dict[str, Floats]:
    """Seconds (C,) each policy needs for the progress that all of them reach within `windows` decisions."""
    paths = {}
    for name, make in factories.items():
        env = ClusterEnv(clusters, seed=seed, interval=interval, delay=delay)
        policy, window = make(env), env.reset()
        path = [(env.clock_s, env.progress)]
        for _ in range(windows):
            window = env.step(policy.decide(window, env.bounds))
            path.append((env.clock_s, env.progress))
        paths[name] = np.array(path)
    target = np.min([path[-1, 1] for path in paths.values()], axis=0)
    return {
        name: np.array([np.interp(target[c], path[:, 1, c], path[:, 0, c]) for c in range(len(target))])
        for name, path in paths.items()
    }


def evaluate(
    policies: Mapping[str, Factory],
    seeds: Sequence[int],
    *,
    workers: Sequence[int] = (2, 4, 8, 32),
    clusters: int = 64,
    windows: int = 100,
    interval: int = 5,
    delay: int = 1,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Time of the lagged reference / time of the policy, by W: geometric mean and worst decile over clusters and seeds.

    `policies` maps names to factories of a fresh policy for an environment; static and LB-BSP are always added. 1 is
    the reference; above 1 is faster than it. `progress(what, fraction done)` is called after each seed.
    """
    factories: dict[str, Factory] = {"reference": LaggedReference, **BASELINES, **policies}
    result: dict[str, Any] = {}
    for i, w in enumerate(workers):
        ratios: dict[str, list[Floats]] = {name: [] for name in factories}
        for j, seed in enumerate(seeds):
            world = sample_clusters(clusters, w, seed)
            times = times_to_progress(factories, world, seed=seed, windows=windows, interval=interval, delay=delay)
            for name, taken in times.items():
                ratios[name].append(times["reference"] / taken)
            if progress is not None:
                progress(f"W={w}", (i * len(seeds) + j + 1) / (len(workers) * len(seeds)))
        result[str(w)] = {name: _summary(np.concatenate(r)) for name, r in ratios.items() if name != "reference"}
    return result


def _summary(ratio: Floats) -> dict[str, float]:
    return {
        "geometric_mean": round(float(np.exp(np.log(ratio).mean())), 4),
        "worst_decile": round(float(np.quantile(ratio, 0.1)), 4),
        "clusters": float(len(ratio)),
    }
