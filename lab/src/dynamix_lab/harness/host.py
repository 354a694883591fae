"""The machine on which a measurement was made."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil

from dynamix.events.run_folder import machine, versions


def host() -> dict[str, Any]:
    """The machine and its present load: cpu, cores, memory_bytes, kernel, python, torch, load_average (1, 5, 15
    min).
    """
    known, installed = machine(), versions()
    return {
        "cpu": known["cpu"],
        "cores": known["cores"],
        "memory_bytes": int(psutil.virtual_memory().total),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": installed["python"],
        "torch": installed.get("torch"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def processor_times() -> tuple[float, float]:
    """Processor time of the machine so far: (stolen by the hypervisor, total). Stolen is 0 if it is not reported."""
    times = psutil.cpu_times()
    return getattr(times, "steal", 0.0), sum(times[:8])
