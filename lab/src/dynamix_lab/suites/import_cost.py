"""What `import dynamix; dynamix.Controller` costs beyond `import torch`: `dynamix bench import`.

Each run is a fresh interpreter that imports torch and then the controller, and reads two clocks after each: the wall's
and the processor's. The wall clock of a shared machine is noisy, so the goal is held against the processor's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from dynamix.errors import ConfigError, DynamixError

GOAL = 0.20  # of what `import torch` costs
TIMEOUT_S = 600.0
_SCRIPT = """
import json, time
def clocks(): return time.perf_counter(), time.process_time()
began = clocks()
import torch
torch_there = clocks()
import dynamix
dynamix.Controller
ended = clocks()
print(json.dumps([[b - a, c - b] for a, b, c in zip(began, torch_there, ended)]))
"""


def import_cost(runs: int = 7, *, tell: Callable[[str, float], Any] = lambda name, done: None) -> dict[str, Any]:
    """Medians over `runs` interpreters: seconds of both imports by both clocks, and the ratio of the second to the
    first.

    A first run, which fills the caches of the file system and of compiled modules, is not counted. Raises `ConfigError`
    for fewer than one run, `DynamixError` where the import fails.
    """
    if runs < 1:
        raise ConfigError("runs", runs, "1 or more", "use 7")
    measured: list[list[list[float]]] = []
    for index in range(runs + 1):
        measured.append(_one_run())
        tell("importing", (index + 1) / (runs + 1))
    result: dict[str, Any] = {"runs": runs, "goal": GOAL}
    for clock, name in enumerate(("wall", "processor")):
        pairs = [run[clock] for run in measured[1:]]
        result[name] = {
            "torch_s": median(of_torch for of_torch, _ in pairs),
            "controller_s": median(beyond for _, beyond in pairs),
            "ratio": median(beyond / of_torch for of_torch, beyond in pairs),
        }
    result["within"] = bool(result["processor"]["ratio"] <= GOAL)
    return result


def _one_run() -> list[list[float]]:
    """[[torch, beyond] wall seconds, [torch, beyond] processor seconds] of one fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise DynamixError(f"importing torch and dynamix.Controller failed:\n{done.stderr[-2000:]}")
    clocks: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return clocks


def lines(result: dict[str, Any]) -> list[str]:
    """The result for a person."""
    told = [
        f"{name} clock: import torch {c['torch_s']:.2f} s, dynamix.Controller beyond it {c['controller_s']:.2f} s, "
        f"{c['ratio']:.3f} of it"
        for name, c in ((name, result[name]) for name in ("wall", "processor"))
    ]
    return [
        *told,
        f"goal: at most {result['goal']:.2f} of it by the processor's clock; medians of {result['runs']} runs",
    ]
