"""One worker's memory in a stigmergic job: its costs, its last step, its unrounded size."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.model.costs import WorkerCosts
from dynamix.model.state import UNKNOWN, array_of, saved
from dynamix.policies.stigmergic.traces import Own
from dynamix.window import Floats, Ints, Window

STEADIEST = 0.01  # lower limit of a worker's jitter
FAST = 0.1  # a worker is fast if its log seconds are at least this much below its usual ones
NOISE_DECAY = 0.8  # weight of past windows in a worker's own part of the noise, as in `measure.noise.NoiseScale`


@dataclass(frozen=True, slots=True)
class Sense:
    """One worker's view of a window, (..., W); NaN before the worker was ever measured."""

    share: Floats  # part of a step before the own last gradient, in the step in which it was largest
    jitter: Floats  # relative standard deviation of a step
    pace_s: Floats  # seconds a load, after fixed costs
    offset: Floats  # loads that would be computed in the time of the fixed costs
    risk: Floats  # log by which it slows down in a window, on average, if it is fast now; else 0


class Habit:
    """The own costs, from `WorkerCosts` for a single worker, the last step, and the size wanted before rounding.

    usual    log seconds of an even share, averaged over about ten windows
    rise     log by which a fast worker slows down in a window, averaged over about twenty of them
    pinned   whether the last wish was outside of the own bounds or memory; `least` is the smallest size they allow
    """

    FIELDS = ("wish", "step", "share", "jitter")
    LATER = ("usual", "rise")  # missing in states of 0.2

    def __init__(self) -> None:
        self.costs = WorkerCosts(pooled=0.0, learn_error=False)
        # (..., W): samples, real; s of a step; `share` and `jitter` as in `Sense`.
        self.wish = self.step = self.share = self.jitter = self.usual = self.rise = UNKNOWN
        self.pinned: np.ndarray = np.empty((0, 0), dtype=bool)
        self.least: Floats | Ints = UNKNOWN
        # Decaying sums over windows of a live job: own part of the noise, |g|^2, own part of the noise in it.
        self.heard: Floats = np.zeros(3)

    def steady(self, noise: float, signal: float, batch: float, total: float) -> tuple[float, float]:
        """The own part of the noise in |g|^2, and of |g|^2 itself: at a global batch of `total`, over the |g|^2 of the
        averaged windows; NaN before any was measured.

        The noise of one sample and |G|^2 stay if the global batch changes, but |g|^2 does not. After a batch grew by
        half, the noise is smaller than the earlier windows' mean |g|^2 suggests. So the second part is 1 only while
        the batch is constant. The mean of both parts over workers is `NoiseScale`'s estimate, averaged the same way.
        (`NoiseScale` is cut at 0; one worker's part need not be.)

        noise    the own part of the noise's share of |g|^2 in a window
        signal   |g|^2 in that window
        batch    samples of a round in that window
        """
        if self.heard.shape != (3,):  # saved by a version that averaged other figures
            self.heard = np.zeros(3)
        if np.isfinite(noise):
            seen = np.array([noise * signal * batch, signal, noise * signal])
            self.heard = NOISE_DECAY * self.heard + (1.0 - NOISE_DECAY) * seen
        of_sample, mean, within = self.heard
        if not mean > 0.0:
            return float("nan"), float("nan")
        now = of_sample / total
        return float(now / mean), float(1.0 + (now - within) / mean)

    def observe(self, own: Own) -> Sense:
        """Take in a window. If it has no times, the last ones count."""
        if self.step.shape != own.size.shape:
            self.wish = own.size.copy()
            self.step, self.share, self.jitter = np.full((3, *own.size.shape), np.nan)
            self.pinned, self.least = np.zeros(own.size.shape, dtype=bool), np.zeros(own.size.shape)
        # To the filters each worker is a cluster of its own.
        size, busy, spread = (x[..., None] for x in (own.size.astype(np.int64), own.busy, own.jitter * own.busy))
        alone = Window.of(size, compute=busy, compute_std=spread, steps=own.steps, base_batch=own.unit)
        past, self.costs = self.costs, self.costs.update(alone)
        alpha, beta = self.costs.alpha[..., 0], self.costs.beta[..., 0]
        step = own.busy + own.blocked
        with np.errstate(divide="ignore", invalid="ignore"):
            self._take("step", step, 1.0)
            self._take("share", np.clip(1.0 - own.least / step, 0.0, 1.0), 1.0)
            self._take("jitter", np.where(own.jitter >= 0, own.jitter, np.nan), 0.3)
            pace_s, offset = beta * own.unit, alpha / (beta * own.unit)
        jitter = np.maximum(np.nan_to_num(self.jitter), STEADIEST)
        return Sense(self.share, jitter, pace_s, offset, self._risk(past, own.unit))

    def _risk(self, past: WorkerCosts, unit: Floats) -> Floats:
        """Take in how much slower an even share of `unit` samples is than by the previous window's costs."""
        now = np.log(self.costs.alpha[..., 0] + self.costs.beta[..., 0] * unit)
        if self.usual.shape != now.shape:
            self.usual, self.rise = now, np.zeros(now.shape)
        else:
            before = np.log(past.alpha[..., 0] + past.beta[..., 0] * unit)
            rise = np.where(before < self.usual - FAST, np.maximum(now - before, 0.0), np.nan)
            self._take("rise", rise, 0.05)
            self._take("usual", now, 0.1)
        return np.where(now < self.usual - FAST, self.rise, 0.0)

    def intended(self, size: Floats, quantum: int) -> Floats:
        """The unrounded size behind `size`, or `size` itself if more than rounding changed it."""
        return np.where(np.abs(self.wish - size) <= quantum, self.wish, size)

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).tolist() for name in (*self.FIELDS, "pinned", "heard")}
        arrays["least"] = np.asarray(self.least, dtype=np.float64).tolist()
        later = {name: getattr(self, name).tolist() for name in self.LATER}
        return {**arrays, "costs": saved(self.costs), "lean": self.costs.lean.tolist(), **later}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in (*self.FIELDS, *self.LATER):
            setattr(self, name, array_of(state[name] if name in self.FIELDS else state.get(name, ())))
        self.costs = self.costs.restored(state["costs"], lean=np.asarray(state["lean"]))
        self.least, self.heard = (np.asarray(state[name], dtype=np.float64) for name in ("least", "heard"))
        self.pinned = np.asarray(state["pinned"], dtype=bool).reshape(self.wish.shape)

    def _take(self, name: str, value: Floats, weight: float) -> None:
        """Move a remembered figure by `weight` towards a new value, if that is known."""
        old = getattr(self, name)
        moved = np.where(np.isnan(old), value, old + weight * (value - old))
        setattr(self, name, np.where(np.isfinite(moved), moved, old))
