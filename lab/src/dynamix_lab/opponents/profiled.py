"""What an engineer would do by hand: time every worker at a few batch sizes once, fit lines, and keep the shares."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamix.model.split import split
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

STEPS = 20  # at each size
PARTS = (1.0, 0.5, 1.5)  # of the starting size; mean 1, so the profile takes no more samples than training


class Profiled:
    """Times each worker at three batch sizes for `STEPS` steps each, then keeps the shares from the fitted lines.

    The profile's steps are training steps and part of the run. A worker's line is its fixed seconds and its seconds per
    sample, by least squares over the three means. With the resulting shares all finish together, at the global batch
    that the job started with. A window of `STEPS` steps suffices for a size; shorter windows are summed.

    >>> policy, sizes = Profiled(), np.array([32, 32])
    >>> for _ in range(4):
    ...     times = np.array([0.01, 0.01]) + np.array([0.001, 0.003]) * sizes
    ...     sizes = policy.decide(Window.of(sizes, compute=times, steps=20.0), Bounds.of(2))
    >>> sizes.tolist()
    [48, 16]
    """

    def __init__(self) -> None:
        self._start: Ints | None = None
        self._held: Ints | None = None
        # Sums of steps and of seconds, by factor on the starting size: (parts, W). Bounds may change real sizes.
        self._steps = np.zeros(len(PARTS))
        self._sizes: list[Ints | None] = [None] * len(PARTS)
        self._seconds: list[Floats | None] = [None] * len(PARTS)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        if self._held is not None:
            return project(self._held, bounds, total=self._held.sum())
        if self._start is None:
            self._start = window.batch_size.copy()
        at = int(np.argmax(self._steps < STEPS))
        if self._note(at, window):
            at += 1
        if at < len(PARTS):
            wanted = np.maximum(self._start * PARTS[at], 1.0)
            self._sizes[at] = sizes = project(np.clip(wanted, bounds.low, bounds.high), bounds)
            return sizes
        self._held = self._fitted(self._start, bounds)
        return self._held.copy()

    def _note(self, at: int, window: Window) -> bool:
        """Add a window of size number `at`. True once there are enough."""
        expected = self._sizes[at]
        if expected is not None and not np.array_equal(expected, window.batch_size):
            return False  # the window still has the previous size
        self._sizes[at] = window.batch_size.copy()
        steps, seconds = float(np.nan_to_num(window.steps)), np.asarray(window.compute, dtype=np.float64)
        if steps > 0 and np.isfinite(seconds).all():
            so_far = self._seconds[at]
            self._seconds[at] = seconds * steps + (0.0 if so_far is None else so_far)
            self._steps[at] += steps
        return bool(self._steps[at] >= STEPS)

    def _fitted(self, start: Ints, bounds: Bounds) -> Ints:
        sizes = np.stack([s for s in self._sizes if s is not None]).astype(np.float64)
        totals = [seconds for seconds in self._seconds if seconds is not None]
        times = np.stack(totals) / self._steps[:, None]
        spread = sizes - sizes.mean(0)
        square = (spread**2).sum(0)
        rough = times.mean(0) / sizes.mean(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            beta = np.where(square > 0, (spread * times).sum(0) / square, rough)
        beta = np.clip(beta, 0.01 * rough, rough)  # limits a noisy line; above `rough` the fixed part would be negative
        alpha = times.mean(0) - beta * sizes.mean(0)
        total = start.sum()
        return project(split(np.asarray(total, dtype=np.float64), alpha, beta, bounds), bounds, total=total)

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": _listed(self._start),
            "held": _listed(self._held),
            "steps": self._steps.tolist(),
            "sizes": [_listed(sizes) for sizes in self._sizes],
            "seconds": [_listed(seconds) for seconds in self._seconds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start, self._held = _whole(state["start"]), _whole(state["held"])
        self._steps = np.asarray(state["steps"], dtype=np.float64)
        self._sizes = [_whole(sizes) for sizes in state["sizes"]]
        self._seconds = [None if s is None else np.asarray(s, dtype=np.float64) for s in state["seconds"]]


def _listed(values: Ints | Floats | None) -> list[Any] | None:
    return None if values is None else list(values.tolist())


def _whole(values: list[int] | None) -> Ints | None:
    return None if values is None else np.asarray(values, dtype=np.int64)
