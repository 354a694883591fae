"""How even a fixed piece of work runs under the emulator's limits: python -m dynamix_lab.suites.emulator_accuracy

Prints the tables of docs/design/emulator.md. A job is 50 ms of CPU time (hashing, which releases the interpreter's
lock), done by one thread or split evenly over two. Its stretch is wall time * share / CPU time: 1 is ideal.
Then, without limits, the CPU time of a fixed product of matrices: again and again, after pauses as hosts with a part of a
core have them, and after such pauses on processors that are kept awake.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.emulator import awake, limits
from dynamix.emulator.cluster import Emulation, Mechanism
from dynamix.emulator.limits import start_helper, stop_helper

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
    return {
        "cpu": in_force, "share": share, "threads": threads, "period_ms": 1e3 * period_s,
        "given": cpus.sum() / walls.sum(), "low": low, "median": middle, "high": high,
        "cv": stretch.std() / stretch.mean(),
    }  # fmt: skip


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


def main() -> None:
    """Every mechanism, period and number of threads, one after the other; then pauses."""
    cases: list[tuple[Mechanism, float]] = [("auto", 0.010), ("auto", 0.100), ("duty-cycle", 0.010)]
    print("| cpu | share | threads | period, ms | given | 5 % | median | 95 % | std/mean |")
    print("|---|---|---|---|---|---|---|---|---|")
    for share in SHARES:
        for threads in (1, 2):
            for mechanism, period_s in cases:
                r = measure(share, threads=threads, period_s=period_s, mechanism=mechanism)
                numbers = " | ".join(f"{r[key]:.3f}" for key in ("given", "low", "median", "high", "cv"))
                print(f"| {r['cpu']} | {share} | {threads} | {r['period_ms']:.0f} | {numbers} |", flush=True)
    print(
        f"\n| pauses of {1e3 * PAUSE_S:.0f} ms | processors | lowest, ms | median | highest of {BINS} x {BIN_S:.0f} s |"
    )
    print("|---|---|---|---|---|")
    for pause_s, kept in ((0.0, False), (PAUSE_S, False), (PAUSE_S, True)):
        helper = start_helper(awake.__file__, str(os.getpid())) if kept else None
        found = after_pauses(pause_s)
        if helper is not None:
            stop_helper(helper, b"g")
        numbers = " | ".join(f"{value:.3f}" for value in (min(found), float(np.median(found)), max(found)))
        print(f"| {'yes' if pause_s else 'no'} | {'kept awake' if kept else 'as they are'} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
