"""What is attainable: shares decided with the scenario's true speeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynamix.model.split import split
from dynamix.policies.registry import OtherFactory
from dynamix.projection import project
from dynamix.window import Bounds, Ints, Window
from dynamix_lab.emulator import Scenario, host_speeds, load_scenario


class Reference:
    """Exact shares by the scenario's true host speeds over the coming window, at a constant global batch.

    It knows future disturbances, but uses the same controller as every policy: it starts with equal batches, and its
    decisions apply with the same delay. So it is a reference, not a bound. Of device hosts it knows a step's fixed time
    and time per sample, but not how costs differ between samples. Of other hosts it knows CPU shares, but no fixed
    costs.

    scenario  the emulator's scenario, or its name or path
    seed      of the disturbance
    clock     seconds since the disturbance started
    total     global batch to hold; None: the present one
    """

    def __init__(
        self, scenario: str | Scenario, *, seed: int, clock: Callable[[], float], total: int | None = None
    ) -> None:
        loaded = load_scenario(scenario)
        self._speeds: Callable[[float], list[float]] = lambda time_s: host_speeds(loaded, time_s, seed)
        self._clock, self._total, self._device = clock, total, loaded.device

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        now = self._clock()
        step_s = float(np.nanmax(window.step_time))
        ahead = now + step_s * (1 + np.arange(1 + int(np.max(window.steps))))
        # A worker's time for a share is proportional to the mean of 1/speed over the window.
        speed = 1.0 / np.mean(1.0 / np.array([self._speeds(t) for t in ahead]), axis=0)
        total = window.batch_size.sum(-1) if self._total is None else self._total
        wish = speed
        if self._device is not None and self._device.per_sample_ms > 0:
            fixed_s, sample_s = self._device.fixed_ms / 1000 / speed, self._device.per_sample_ms / 1000 / speed
            wish = split(np.asarray(total, dtype=np.float64), fixed_s, sample_s, bounds)
        return project(wish, bounds, total=total, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def references(
    scenario: str | Scenario, *, seed: int = 0, clock: Callable[[], float] = lambda: 0.0
) -> dict[str, OtherFactory]:
    """Policies that need a scenario, for `make_policy(name, others=...)`: reference, and reference:TOTAL with a global
    batch. The defaults only serve to check a name.

    >>> from dynamix.policies import make_policy
    >>> type(make_policy("reference:256", others=references("demo"))).__name__
    'Reference'
    """
    return {"reference": lambda total: Reference(scenario, seed=seed, clock=clock, total=total)}
