"""Processor time of one decision: features, memory, rule, network, guard, projection, on one thread."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch

from dynamix.policies import make_policy
from dynamix.runtime.arguments import watched
from dynamix.simulator import ClusterEnv, sample_family
from dynamix.window import Bounds, Window

WORKERS, DECISIONS, FIRST = 1024, 300, 10  # the first ones load code and learn where they are
FAMILY, SEED = "affine-slowdowns", 30_001
GOAL_MS = 5.0


def decision_times(policy: str, *, workers: int = WORKERS, decisions: int = DECISIONS) -> dict[str, float]:
    """Milliseconds of a decision of `policy` on a simulated cluster with slowdowns, as a live job would ask it: learned
    policies are watched by a guard there.

    cpu, cpu_p99      of the deciding thread: median, 99th percentile
    median, least     by the clock, which other processes lengthen

    Raises `ConfigError` for unknown policies.
    """
    chosen = watched(make_policy(policy), None)
    env = ClusterEnv(sample_family(FAMILY, 1, workers, SEED), seed=SEED)
    bounds, window = _bounds_of_one(env.bounds), env.reset()
    took, busy = np.zeros((2, decisions + FIRST))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for i in range(decisions + FIRST):
            one = _first(window)
            began, worked = time.perf_counter(), time.thread_time()
            sizes = chosen.decide(one, bounds)
            took[i], busy[i] = time.perf_counter() - began, time.thread_time() - worked
            window = env.step(sizes[None])
    finally:
        torch.set_num_threads(threads)
    took_ms, cpu_ms = took[FIRST:] * 1e3, busy[FIRST:] * 1e3
    figures = {
        "cpu": np.median(cpu_ms),
        "cpu_p99": np.quantile(cpu_ms, 0.99),
        "median": np.median(took_ms),
        "least": took_ms.min(),
    }
    return {name: round(float(value), 3) for name, value in figures.items()}


def _first(window: Window) -> Window:
    """The first of the clusters in a window, as its job's own controller would show it."""
    parts: dict[str, Any] = {f.name: np.asarray(getattr(window, f.name)[0]) for f in dataclasses.fields(window)}
    return Window(**parts)


def _bounds_of_one(bounds: Bounds) -> Bounds:
    low, high = bounds.low[0], bounds.high[0]
    return Bounds.of(len(low), low, high, quantum=bounds.quantum, max_change=bounds.max_change)
