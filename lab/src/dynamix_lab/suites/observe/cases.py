"""Observed jobs with a known slow rank: does the report name the rank and the slow part?"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import StateError
from dynamix.observe.run import conclude
from dynamix_lab.emulator.run import emulate
from dynamix_lab.suites.observe import job

PARTS = ("forward", "backward", "data", "network")
FORWARD_S, BACKWARD_S = 0.02, 0.04  # of every rank's step, sleeping, so that other load on this machine hardly matters
STEPS = 60
LEAST_S, MOST_S = 0.03, 0.08  # extra time of the slow rank
FAST_MBIT_S, SLOW_MBIT_S = 400.0, 25.0
WIDTH = 256  # of layers whose gradients take some 100 ms on a slow link
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """A job with so many ranks, the part in which rank `slow` is slow, and for how long it sleeps there per step."""

    part: str
    ranks: int
    slow: int
    sleep_s: float


def draw_cases(count: int, seed: int) -> list[Case]:
    """Parts in turn; random ranks, slow rank and delay. A slow link can be identified only with three ranks or more."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        part = PARTS[i % len(PARTS)]
        ranks = int(rng.integers(3 if part == "network" else 2, 5))
        delay_s = round(float(rng.uniform(LEAST_S, MOST_S)), 4)
        found.append(Case(part, ranks, int(rng.integers(ranks)), 0.0 if part == "network" else delay_s))
    return found


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Run the case's job under `python -m dynamix.observe`. Returns what it named, and whether that is right."""
    observed = folder / "observed"
    told = {"part": case.part, "slow": case.slow, "sleep_s": case.sleep_s, "steps": STEPS}
    asleep = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S}
    if case.part == "network":
        command = observing(observed, {"steps": STEPS // 2, "width": WIDTH, "clock": True, **asleep})
        rates = [SLOW_MBIT_S if rank == case.slow else FAST_MBIT_S for rank in range(case.ranks)]
        hosts = [{"cpu": 1.0, "rate_mbit_s": rate} for rate in rates]
        device = {"fixed_ms": 1.0, "per_sample_ms": 0.0}
        scenario = {"name": "slow-link-of-one", "description": "One slow link.", "hosts": hosts, "device": device}
        emulate(scenario, command, out=folder / "emulated", timeout_s=_TIMEOUT_S, echo=None)
    else:
        launch(observing(observed, {**told, **asleep}), case.ranks)
    result = conclude(observed)
    right = result["rank"] == case.slow and result["part"] == case.part
    names = ("rank", "part", "verdict", "step_s", "busy_s", "wait_s", "exchange_s", "slow_link", "link_ratio")
    return {"right": right, **{name: result[name] for name in names}}


def observing(folder: Path, given: dict[str, Any]) -> list[str]:
    """The command of each rank."""
    return [sys.executable, "-m", "dynamix.observe", "--out", str(folder), job.__file__, json.dumps(given)]


def launch(command: list[str], ranks: int) -> str:
    """Run it on every local rank, over loopback. Returns rank 0's standard output. Raises `StateError` if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    usual = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    usual |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(command, env={**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
        for rank in range(ranks)
    ]
    try:
        said = [one.communicate(timeout=_TIMEOUT_S) for one in started]
    finally:
        for one in started:
            one.kill()
    for rank, (one, (_, errors)) in enumerate(zip(started, said, strict=True)):
        if one.returncode:
            raise StateError(f"rank {rank} of the observed job ended with {one.returncode}: {errors[-1000:]}")
    return str(said[0][0])
