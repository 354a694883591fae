"""How even a fixed piece of work runs under the emulator's limits: `dynamix bench emulator-accuracy`.

A job is 50 ms of CPU time (hashing, which releases the interpreter's
lock), done by one thread or split evenly over two. Its stretch is wall time * share / CPU time: 1 is ideal.
Then, without limits, the CPU time of a fixed product of matrices: again and again, after pauses as hosts with a part of
a core have them, and after such pauses on processors that are kept awake. Last, device hosts (`device_accuracy`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix_lab.emulator import awake, limits
from dynamix_lab.emulator.cluster import Emulation, Mechanism
from dynamix_lab.emulator.limits import start_helper, stop_helper
from dynamix_lab.harness.suite import Tell, part_of, untold
from dynamix_lab.report import Table
from dynamix_lab.suites.device_accuracy import device_table, measure_devices

JOB_S = 0.050
JOBS = 50
SHARES = (0.17, 0.56)
PAUSE_S = 0.050
BIN_S = 2.0
BINS = 10

# Standard library only. Calibrates one block of hashing, then times `JOBS` jobs of the same number of blocks.
PROGRAM = """
import hashlib, json, sys, threading, time
threads, job_s, jobs = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
block = bytes(65536)
def work(blocks):
    for _ in range(blocks):
        hashlib.sha256(block)
best = 1e9
for _ in range(8):
    start = time.thread_time(); work(100); best = min(best, (time.thread_time() - start) / 100)
blocks = max(1, round(job_s / threads / best))
walls, cpus = [], []
for _ in range(jobs + 5):
    start, cpu = time.monotonic(), time.process_time()
    helpers = [threading.Thread(target=work, args=(blocks,)) for _ in range(threads - 1)]
    for helper in helpers: helper.start()
    work(blocks)
    for helper in helpers: helper.join()
    walls.append(time.monotonic() - start); cpus.append(time.process_time() - cpu)
print(json.dumps([walls[5:], cpus[5:]]))
"""


def measure(share: float, *, threads: int, period_s: float, mechanism: Mechanism) -> dict[str, Any]:
    """Wall times of equal jobs on one host: the share that was given, and percentiles of the jobs' stretch."""
    usual, limits.PERIOD_S = limits.PERIOD_S, period_s
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Emulation({"hosts": [{"cpu": share}]}, run_dir=folder, mechanism=mechanism) as cluster,
        ):
            cluster.throttle()
            cluster.launch([sys.executable, "-I", "-S", "-c", PROGRAM, str(threads), str(JOB_S), str(JOBS)])
            cluster.wait(180)
            walls, cpus = map(np.asarray, json.loads((Path(folder) / "rank0.out").read_text()))
            in_force = cluster.mechanisms["cpu"]
    finally:
        limits.PERIOD_S = usual
    # A job's CPU time itself varies with what the neighbouring core does; the limit answers for what it adds.
    stretch = walls * share / cpus
    low, middle, high = np.percentile(stretch, [5, 50, 95])
    spread = {"low": float(low), "median": float(middle), "high": float(high)}
    given, cv = float(cpus.sum() / walls.sum()), float(stretch.std() / stretch.mean())
    about = {"cpu": in_force, "share": share, "threads": threads, "period_ms": 1e3 * period_s}
    return {**about, "given": given, **spread, "cv": cv}


def after_pauses(pause_s: float) -> list[float]:
    """CPU time of the same product of matrices, ms: the median of each `BIN_S`."""
    a = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    medians = []
    for _ in range(BINS):
        times, end = [], time.monotonic() + BIN_S
        while time.monotonic() < end:
            began = time.thread_time()
            for _ in range(4):
                a @ a
            times.append(1e3 * (time.thread_time() - began))
            time.sleep(pause_s)
        medians.append(float(np.median(times)))
    return medians


def measure_all(*, only: str | None = None, tell: Tell = untold) -> dict[str, Any]:
    """`limits`: every mechanism, period and number of threads (`measure`). `pauses`: `after_pauses` without and with
    them. `devices`: `measure_devices`. `only` one of these names measures that part alone.
    """
    parts = {"limits": measure_limits, "pauses": measure_pauses, "devices": measure_devices}
    if only is not None and only not in parts:
        raise ConfigError("only", only, ", ".join(parts), "correct the name")
    chosen = [only] if only else list(parts)
    return {name: parts[name](tell=part_of(tell, i, len(chosen))) for i, name in enumerate(chosen)}


def measure_limits(*, tell: Tell = untold) -> list[dict[str, Any]]:
    """`measure` for every mechanism, period and number of threads."""
    cases: list[tuple[Mechanism, float]] = [("auto", 0.010), ("auto", 0.100), ("duty-cycle", 0.010)]
    each = [(share, threads, *case) for share in SHARES for threads in (1, 2) for case in cases]
    rows = []
    for i, (share, threads, mechanism, period_s) in enumerate(each):
        tell(f"{mechanism}, {share} of a core, {threads} threads", i / len(each))
        rows.append(measure(share, threads=threads, period_s=period_s, mechanism=mechanism))
    return rows


def measure_pauses(*, tell: Tell = untold) -> list[dict[str, Any]]:
    """`after_pauses` without pauses, with them, and with processors kept awake."""
    pauses = []
    for i, (pause_s, kept) in enumerate(((0.0, False), (PAUSE_S, False), (PAUSE_S, True))):
        tell("pauses", i / 3)
        helper = start_helper(awake.__file__, str(os.getpid())) if kept else None
        try:
            pauses.append({"pause_s": pause_s, "kept_awake": kept, "cpu_ms": after_pauses(pause_s)})
        finally:
            if helper is not None:
                stop_helper(helper, b"g")
    return pauses


def table(result: Mapping[str, Any]) -> str:
    """A Markdown table for each part that was measured."""
    makers = {"limits": limits_table, "pauses": pauses_table, "devices": device_table}
    return "\n".join(make(result[name]).markdown() for name, make in makers.items() if name in result)


def limits_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each of `measure_limits`."""
    keys = ("given", "low", "median", "high", "cv")
    return Table(
        ["cpu", "share", "threads", "period, ms", "given", "5 %", "median", "95 %", "std/mean"],
        [
            [r["cpu"], str(r["share"]), str(r["threads"]), f"{r['period_ms']:.0f}", *[f"{r[key]:.3f}" for key in keys]]
            for r in rows
        ],
    )


def pauses_table(parts: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each of `measure_pauses`."""
    return Table(
        [
            f"pauses of {1e3 * PAUSE_S:.0f} ms",
            "processors",
            "lowest, ms",
            "median",
            f"highest of {BINS} x {BIN_S:.0f} s",
        ],
        [
            [
                "yes" if part["pause_s"] else "no",
                "kept awake" if part["kept_awake"] else "as they are",
                *[f"{value:.3f}" for value in (min(ms), float(np.median(ms)), max(ms))],
            ]
            for part in parts
            for ms in [part["cpu_ms"]]
        ],
    )
