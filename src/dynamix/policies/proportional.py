"""Batch sizes in proportion to measured speed, at a constant global batch: DBS and LB-BSP."""

from typing import Any, Literal

import numpy as np

from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window


def speeds(window: Window) -> Floats:
    """Samples per busy second, (..., W); NaN if not measured. Busy time excludes waiting and transfer."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(1.0 / window.seconds_per_sample)


def fill_unknown(speed: Floats) -> Floats:
    """Workers without a measurement get the mean speed of the others (all ones if none was measured)."""
    known = np.isfinite(speed) & (speed > 0)
    count = known.sum(-1, keepdims=True)
    mean = np.where(known, speed, 0.0).sum(-1, keepdims=True) / np.maximum(count, 1)
    return np.where(known, speed, np.where(count > 0, mean, 1.0))


def in_proportion(window: Window, speed: Floats) -> Floats:
    """Real sizes (..., W) in proportion to speed; those in force if no worker was measured."""
    measured = np.isfinite(speed).any(-1, keepdims=True)
    return np.where(measured, fill_unknown(speed), np.maximum(window.batch_size, 1e-9))


class DBS:
    """Dynamic Batch Size (arXiv 2007.11831): each epoch, shares d_i/t_i at the same global batch; first epoch equal.

    t_i is the epoch's time minus the time blocked in all-reduce. Sizes are rounded by largest remainder, so no sample
    is lost (the reference implementation's rounding loses some). Asked at epoch boundaries.

    >>> from dynamix.window import Bounds, Window
    >>> DBS().decide(Window.of([32, 32], compute=[1.0, 3.0]), Bounds.of(2)).tolist()
    [48, 16]
    """

    boundary: Literal["window", "epoch"] = "epoch"
    adapts = False

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        wish = in_proportion(window, speeds(window))
        return project(wish, bounds, total=window.batch_size.sum(-1), current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class LBBSP:
    """LB-BSP (Chen et al., SoCC 2020): DBS's rule every window, at the same global batch, on speeds whose log is
    smoothed exponentially.

    weight   of the newest window, in (0, 1]
    jump     a larger change of log speed is taken at once: it is a neighbour that came or went, not noise

    >>> from dynamix.window import Bounds, Window
    >>> LBBSP().decide(Window.of([32, 32], compute=[1.0, 3.0]), Bounds.of(2)).tolist()
    [48, 16]
    """

    boundary: Literal["window", "epoch"] = "window"
    adapts = False

    def __init__(self, weight: float = 0.5, jump: float = 0.25) -> None:
        self.weight, self.jump = weight, jump
        self.log_speed: Floats | None = None  # (..., W); NaN if a worker was never measured

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        with np.errstate(divide="ignore", invalid="ignore"):
            seen = np.log(speeds(window))
        seen = np.where(np.isfinite(seen), seen, np.nan)
        old = self.log_speed
        if old is None or old.shape != seen.shape:
            self.log_speed = seen
        else:
            old = np.where(np.isnan(old), seen, old)
            step = np.where(np.isnan(seen), 0.0, seen - old)
            self.log_speed = old + np.where(np.abs(step) > self.jump, 1.0, self.weight) * step
        wish = in_proportion(window, np.exp(self.log_speed))
        return project(wish, bounds, total=window.batch_size.sum(-1), current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"log_speed": None if self.log_speed is None else self.log_speed.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["log_speed"]
        self.log_speed = None if saved is None else np.asarray(saved, dtype=np.float64)
