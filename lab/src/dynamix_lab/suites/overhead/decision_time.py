"""Times one decision on one thread: features, memory, rule, network, guard, projection; and its events line."""

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
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.facts.job_facts import ClosedWindow, JobFacts, Message
from dynamix.runtime.measure.row import ROW
from dynamix.window import Bounds, Window
from dynamix_lab.simulator import ClusterEnv, sample_family

WORKERS = (4, 64, 1024)
DECISIONS, FIRST = 300, 10  # the first ones load code and are not steady yet
FAMILY, SEED = "affine-slowdowns", 30_001
GOAL_MS = 5.0
MANY = (1024, 10_000)  # workers of `beside_times`
BESIDE_MS = 10.0  # goal for the larger
BESIDE_WINDOWS = 60  # at most, as all are alike


def decision_times(policy: str, *, workers: int, decisions: int = DECISIONS) -> dict[str, float]:
    """Milliseconds of a decision of `policy` on a simulated cluster with slowdowns, as in a live job: learned policies
    have a guard, and rank 0 writes a line to events.jsonl after each decision.

    cpu, cpu_p99      of the deciding thread for decision and line: median, 99th percentile
    decision, line    medians of each
    median, least     of both by the clock, which other processes lengthen
    line_bytes        median length of the line

    Raises `ConfigError` for unknown policies.
    """
    env = ClusterEnv(sample_family(FAMILY, 1, workers, SEED), seed=SEED)
    bounds, window = _bounds_of_one(env.bounds), env.reset()
    config = JobConfig(workers, policy, int(_first(window).batch_size.mean()), "adaptive")
    job, chosen = JobFacts(config), config.served
    wall, deciding, writing = np.zeros((3, decisions + FIRST))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, EventLog(path := Path(folder) / "events.jsonl") as events:
            decider = Decider(chosen, job, events=events)
            for i in range(decisions + FIRST):
                one = _first(window)
                closing = ClosedWindow(i, one.batch_size, 10 * i, 10 * i, 10.0, 10 * i, 0)
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


def beside_times(*, workers: int, windows: int = BESIDE_WINDOWS) -> dict[str, float]:
    """Processor milliseconds of rank 0 apart from the policy's own decision, medians per window of ten steps.

    rows, window, message, line   copying the gathered rows, making the `Window`, packing and unpacking the message, and
                                  the line of events.jsonl; `all`: their sum
    """
    rng = np.random.default_rng(SEED)
    sizes = np.full(workers, 64)
    job = JobFacts(JobConfig(workers, "static", 64, "adaptive"))
    block = torch.from_numpy(rng.uniform(0.5, 1.5, (workers, len(ROW) + 10)))
    block[:, :2] = torch.tensor([10.0, 10.0])  # rounds issued, steps counted
    spent = np.zeros((windows + FIRST, 4))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder) / "events.jsonl") as events:
            decider = Decider(make_policy("static"), job, events=events)
            for i in range(windows + FIRST):
                closing = ClosedWindow(i, sizes, 10 * i, 10 * i, 10.0, 10 * i, 0)
                marks = [time.thread_time()]
                rows = block.clone().numpy()
                marks.append(time.thread_time())
                window = decider.assemble(rows, closing)
                marks.append(time.thread_time())
                message = Message.unpack(job.change(sizes, 10 * i).pack())
                marks.append(time.thread_time())
                decider.witness(window, closing, message)
                marks.append(time.thread_time())
                spent[i] = np.diff(marks)
    finally:
        torch.set_num_threads(threads)
    medians = 1e3 * np.median(spent[FIRST:], axis=0)
    found = dict(zip(("rows", "window", "message", "line"), medians.tolist(), strict=True))
    return {name: round(value, 3) for name, value in {"all": float(medians.sum()), **found}.items()}


def _first(window: Window) -> Window:
    """The first cluster of a window, as its job's own controller would show it."""
    parts: dict[str, Any] = {f.name: np.asarray(getattr(window, f.name)[0]) for f in dataclasses.fields(window)}
    return Window(**parts)


def _bounds_of_one(bounds: Bounds) -> Bounds:
    low, high = bounds.low[0], bounds.high[0]
    return Bounds.of(len(low), low, high, quantum=bounds.quantum, max_change=bounds.max_change)
