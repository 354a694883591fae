"""A static job on device hosts is observed, and then balanced: is the promised gain reached?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dynamix.errors import StateError
from dynamix.observe.run import conclude
from dynamix_lab.emulator.run import emulate
from dynamix_lab.suites.observe import job
from dynamix_lab.suites.observe.cases import observing

# By name: relative speeds, fixed and per-sample milliseconds at speed 1, batch of each, and the rate of all links.
PLACES: dict[str, dict[str, Any]] = {
    "one-slow": {"speeds": (1.0, 1.0, 1.0, 0.4), "fixed_ms": 10.0, "per_sample_ms": 1.5, "batch": 32, "rate": None},
    "generations": {"speeds": (1.0, 0.9, 0.5, 0.3), "fixed_ms": 20.0, "per_sample_ms": 1.5, "batch": 32, "rate": None},
    "fixed-costs": {"speeds": (1.0, 0.7, 0.5), "fixed_ms": 50.0, "per_sample_ms": 1.0, "batch": 32, "rate": None},
    "slow-links": {"speeds": (1.0, 1.0, 0.5), "fixed_ms": 15.0, "per_sample_ms": 1.5, "batch": 32, "rate": 50.0},
    "even": {"speeds": (1.0, 1.0, 1.0), "fixed_ms": 15.0, "per_sample_ms": 1.5, "batch": 32, "rate": None},
}
STEPS = 160
TAIL = 0.4  # of a batch: each rank's last one of an epoch
ROUNDS = 8  # full batches of an epoch before that
_TIMEOUT_S = 600.0


def run_place(name: str, policy: str, folder: Path) -> dict[str, Any]:
    """The gain promised for the static job, and the one that `policy` with a fixed global batch reaches."""
    place = PLACES[name]
    given = given_to(place, STEPS, 128)
    observed = folder / "observed"
    static = paced(place, observing(observed, given), folder / "static")
    promised = conclude(observed)["gains"]
    command = [sys.executable, job.__file__, json.dumps({**given, "policy": policy})]
    balanced = paced(place, command, folder / policy)
    reached = balanced["samples_per_s"] / static["samples_per_s"]
    balance = promised["balance"]
    return {
        "promised": balance["median"],
        "low": balance["low"],
        "high": balance["high"],
        "reached": reached,
        "off": balance["median"] / reached - 1,
        "sizes": promised["sizes"],
        "grounded": promised["grounded"],
        "overruns": [static["overruns"], balanced["overruns"]],
        "steps": [static["steps"], balanced["steps"]],
    }


def given_to(place: dict[str, Any], steps: int, width: int) -> dict[str, Any]:
    """The settings of the place's job."""
    epoch = len(place["speeds"]) * (ROUNDS * place["batch"] + round(TAIL * place["batch"]))
    return {"steps": steps, "batch": place["batch"], "samples": epoch, "width": width, "clock": True}


def paced(place: dict[str, Any], command: list[str], folder: Path) -> dict[str, Any]:
    """Samples a second of the job on the place's hosts, and its devices' steps and overruns.

    A place may have `rates` for each link instead of one, and a `schedule`.
    """
    rates = place.get("rates") or [place["rate"]] * len(place["speeds"])
    hosts = [{"cpu": speed, "rate_mbit_s": rate} for speed, rate in zip(place["speeds"], rates, strict=True)]
    device = {name: place[name] for name in ("fixed_ms", "per_sample_ms")}
    scenario = {"name": "observed", "description": "Device hosts.", "hosts": hosts, "device": device}
    scenario |= {"schedule": place.get("schedule", [])}
    result = emulate(scenario, command, out=folder, timeout_s=_TIMEOUT_S, echo=None)
    if result["exit_code"]:
        raise StateError(f"the job on device hosts ended with {result['exit_code']}: see {folder}/ranks")
    said = (folder / "ranks/0/rank0.out").read_text(encoding="utf-8").splitlines()
    pace = json.loads(next(line for line in reversed(said) if line.startswith("{")))
    steps = result["device_steps"]
    return {**pace, "overruns": sum(one["overruns"] for one in steps), "steps": sum(one["steps"] for one in steps)}
