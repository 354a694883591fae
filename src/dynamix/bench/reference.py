"""What is attainable: shares decided with the scenario file in hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynamix.emulator import host_speeds, load_scenario
from dynamix.window import Bounds, Ints, Window, project


class Reference:
    """Exact shares by the scenario's true host speeds over the coming window, at a constant global batch.

    Clairvoyant about the disturbance, but it drives the same controller as every policy: it starts from equal batches
    and its answer takes force with the same delay. It is a reference, not a bound: it knows CPU shares, not the fixed
    costs of a step.

    scenario  name or path of the emulator's scenario
    seed      of the disturbance
    clock     seconds since the disturbance started
    """

    def __init__(self, scenario: str, *, seed: int, clock: Callable[[], float]) -> None:
        loaded = load_scenario(scenario)
        self._speeds: Callable[[float], list[float]] = lambda time_s: host_speeds(loaded, time_s, seed)
        self._clock = clock

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        now = self._clock()
        step_s = float(np.nanmax(window.step_time))
        ahead = now + step_s * (1 + np.arange(1 + int(window.steps)))
        # A worker's time for a share is the sum over moments of 1/speed.
        speed = 1.0 / np.mean(1.0 / np.array([self._speeds(t) for t in ahead]), axis=0)
        return project(speed, bounds, total=window.batch_size.sum(-1), current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
