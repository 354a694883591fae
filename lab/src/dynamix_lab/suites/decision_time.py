"""What one decision costs on one thread: features, memory, rule, network, guard, projection; and its events line."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamix.events.records import EventLog
from dynamix.policies import make_policy
from dynamix.runtime.arguments import watched
from dynamix.runtime.decision import Decider
from dynamix.runtime.job import Closing, JobFacts
from dynamix.simulator import ClusterEnv, sample_family
from dynamix.window import Bounds, Window

WORKERS = (4, 64, 1024)
DECISIONS, FIRST = 300, 10  # the first ones load code and learn where they are
FAMILY, SEED = "affine-slowdowns", 30_001
GOAL_MS = 5.0


def decision_times(policy: str, *, workers: int, decisions: int = DECISIONS) -> dict[str, float]:
    """Milliseconds of a decision of `policy` on a simulated cluster with slowdowns, as a live job would ask it: learned
    policies are watched by a guard there, and rank 0 writes a line to events.jsonl after each decision.

    cpu, cpu_p99      of the deciding thread for decision and line: median, 99th percentile
    decision, line    medians of the two alone
    median, least     of both by the clock, which other processes lengthen
    line_bytes        median length of the line

    Raises `ConfigError` for unknown policies.
    """
    chosen = watched(make_policy(policy), None)
    env = ClusterEnv(sample_family(FAMILY, 1, workers, SEED), seed=SEED)
    bounds, window = _bounds_of_one(env.bounds), env.reset()
    job = JobFacts(bounds, int(_first(window).batch_size.sum()))
    wall, deciding, writing = np.zeros((3, decisions + FIRST))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, EventLog(path := Path(folder) / "events.jsonl") as events:
            decider = Decider(chosen, job, events=events)
            for i in range(decisions + FIRST):
                one = _first(window)
                closing = Closing(i, one.batch_size, 10 * i, 10 * i, 10.0, 10 * i, 0)
                began, worked = time.perf_counter(), time.thread_time()
                sizes = chosen.decide(one, bounds)
                decided = time.thread_time()
                decider.witness(one, closing, job.change(np.asarray(sizes), 10 * i))
                writing[i], deciding[i] = time.thread_time() - decided, decided - worked
                wall[i] = time.perf_counter() - began
                window = env.step(sizes[None])
            lengths = [len(line) + 1 for line in path.read_bytes().splitlines()]
    finally:
        torch.set_num_threads(threads)
    wall_ms, decision_ms, line_ms = (1e3 * values[FIRST:] for values in (wall, deciding, writing))
    figures = {
        "cpu": np.median(decision_ms + line_ms),
        "cpu_p99": np.quantile(decision_ms + line_ms, 0.99),
        "decision": np.median(decision_ms),
        "line": np.median(line_ms),
        "median": np.median(wall_ms),
        "least": wall_ms.min(),
        "line_bytes": np.median(lengths),
    }
    return {name: round(float(value), 3) for name, value in figures.items()}


def _first(window: Window) -> Window:
    """The first of the clusters in a window, as its job's own controller would show it."""
    parts: dict[str, Any] = {f.name: np.asarray(getattr(window, f.name)[0]) for f in dataclasses.fields(window)}
    return Window(**parts)


def _bounds_of_one(bounds: Bounds) -> Bounds:
    low, high = bounds.low[0], bounds.high[0]
    return Bounds.of(len(low), low, high, quantum=bounds.quantum, max_change=bounds.max_change)
