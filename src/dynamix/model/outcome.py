"""What a window achieved, from nothing but what a live job measures: log goodput, and against the job's own average."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamix.model.fitting import exposed_seconds, slowest_seconds
from dynamix.window import Floats, Window


def step_seconds(window: Window) -> Floats:
    """Seconds (...) of an optimizer step: the slowest worker's computing and the exchange nothing hides; NaN if unknown."""
    slowest = slowest_seconds(window)
    return np.asarray(slowest + np.nan_to_num(exposed_seconds(window)))


def log_goodput(window: Window) -> Floats:
    """log(samples/s * efficiency), (...), with Pollux's efficiency (phi + B0)/(phi + B); NaN where a part is unknown.

    >>> window = Window.of([64, 64], compute=0.5, communication=0.5, base_batch=128, noise=1e3, signal=1.0)
    >>> round(float(np.exp(log_goodput(window))), 6)                      # 128 samples in a second, at the base batch
    128.0
    """
    phi, total = window.noise_scale, window.global_batch
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(np.isposinf(phi), 0.0, np.log((phi + window.base_batch) / (phi + total)))
        return np.asarray(np.log(total) - np.log(step_seconds(window)) + gain)


class SlowAverage:
    """An exponential average (...) that ignores NaN; what a job's own past is worth as a reference.

    >>> average = SlowAverage(0.5)
    >>> [float(average.update(np.array(x))) for x in (2.0, np.nan, 4.0)]
    [2.0, 2.0, 3.0]
    """

    def __init__(self, weight: float = 0.05) -> None:
        self.weight = weight
        self.value: Floats | None = None

    def update(self, x: Floats) -> Floats:
        """The average after this value."""
        if self.value is None or self.value.shape != x.shape:
            self.value = np.asarray(x, np.float64)
        started = np.where(np.isnan(self.value), x, self.value)
        self.value = np.asarray(started + self.weight * np.where(np.isnan(x), 0.0, x - started))
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return {"value": None if self.value is None else self.value.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = None if state["value"] is None else np.asarray(state["value"], np.float64)
