"""What the goodput rules learn online: least squares of a worker's costs, the exchange, the noise scale.

All of it is vectorised over leading dimensions, forgets, takes NaN for "not measured", and is plain arrays that
`saved` and `restored` turn into a state dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dynamix.window import Floats, Window

# Candidate overlap exponents of the step time; Pollux bounds its gamma by 1 and 10.
OVERLAPS: Floats = np.array([1.0, 1.25, 1.6, 2.0, 2.8, 4.0, 6.0, 10.0])
RHO = 0.2  # of log phi with log B: 0.2 on emulated hosts (`bench fidelity --against`); public figures 0.35 and 0.7

# What nothing is known about yet.
UNKNOWN: Floats = np.empty((0, 0))


def asked_once(measure: Callable[[Window], Floats]) -> Callable[[Window], Floats]:
    """`measure`, which several parts of a rule ask of the same window: the newest answer is kept. Neither a window nor what was
    measured of it may be changed in place."""
    latest: tuple[Window | None, Floats] = (None, UNKNOWN)

    @functools.wraps(measure)
    def answer(window: Window) -> Floats:
        nonlocal latest
        kept = latest  # one look: another thread may ask about another window
        if kept[0] is not window:
            latest = kept = window, measure(window)
        return kept[1]

    return answer


@asked_once
def busy_seconds(window: Window) -> Floats:
    """Seconds (..., W) of computing and loading per optimizer step; NaN where unknown or idle."""
    busy = window.compute + _finite(window.data)
    return np.where((window.batch_size > 0) & (busy > 0) & np.isfinite(busy), busy, np.nan)


@asked_once
def slowest_seconds(window: Window) -> Floats:
    """Mean over steps of the slowest worker's seconds, (...): any worker's computing and waiting together say it."""
    arrived = window.compute + _finite(window.wait)
    seen = np.where(np.isnan(window.wait), np.nan, arrived)
    return np.fmax(mean_of_known(seen), _max_of_known(window.compute))


@asked_once
def exposed_seconds(window: Window) -> Floats:
    """Seconds (...) of a step that the exchange adds to the slowest worker's computing; NaN where unknown."""
    return mean_of_known(np.where(window.communication >= 0, window.communication, np.nan))


@asked_once
def base_total(window: Window) -> Floats:
    """The base batch (...) in samples per micro-batch, summed over workers; the present total where unknown."""
    base = window.base_batch / window.micro_batches
    return np.where(np.isfinite(base) & (base > 0), base, np.maximum(window.batch_size.sum(-1), 1))


def mean_of_known(x: Floats) -> Floats:
    """Mean over the last axis of what is finite; NaN where nothing is."""
    known = np.isfinite(x)
    if known.all():
        return np.asarray(x.sum(-1) / x.shape[-1])
    count = known.sum(-1)
    return np.where(count > 0, np.where(known, x, 0.0).sum(-1) / np.maximum(count, 1), np.nan)


def laid_out(x: Floats) -> Floats:
    """The same array (..., W, G) with its longer axis innermost in memory: NumPy's loops are then long.

    >>> laid_out(np.zeros((9, 2))).strides
    (8, 72)
    """
    if x.shape[-2] < x.shape[-1]:
        return np.ascontiguousarray(x)
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def _finite(x: Floats) -> Floats:
    return np.where(np.isfinite(x), x, 0.0)


def _max_of_known(x: Floats) -> Floats:
    most = np.where(np.isfinite(x), x, -np.inf).max(-1)
    return np.where(np.isfinite(most), most, np.nan)


class LeastSquares:
    """seconds = alpha + beta * b by least squares of relative errors, with forgetting; one fit per entity (...).

    >>> fit = LeastSquares()
    >>> for b in (10.0, 20.0): fit.update(np.array([b]), np.array([0.5 + 0.01 * b]))
    >>> [x.round(6).tolist() if x.dtype == float else x.tolist() for x in fit.solve()]
    [[0.5], [0.01], [True]]
    """

    FIELDS = ("moments",)

    def __init__(self, forget: float = 1.0) -> None:
        self.forget = forget
        self.moments: Floats = UNKNOWN  # (5, ...): sums of w, w b, w b^2, w y, w b y with w = 1/y^2

    def update(self, batch: Floats, seconds: Floats) -> None:
        """Take in one measurement per entity; NaN adds nothing."""
        known = np.isfinite(seconds) & (seconds > 0) & np.isfinite(batch) & (batch > 0)
        b, y = np.where(known, batch, 1.0), np.where(known, seconds, 1.0)
        new = np.where(known, np.stack([1 / y**2, b / y**2, b * b / y**2, 1 / y, b / y]), 0.0)
        if self.moments.shape != new.shape:
            self.moments = new
        else:
            self.moments = np.where(known, self.forget, 1.0) * self.moments + new

    def solve(self) -> tuple[Floats, Floats, np.ndarray]:
        """alpha, beta (not negative, NaN where nothing was seen) and whether batches differed enough to tell them apart."""
        one, b, bb, y, by = self.moments
        seen = one > 0
        spread = one * bb - b * b
        told = seen & (spread > 4e-4 * one * bb)  # batches at least 2 % apart, root mean square
        with np.errstate(divide="ignore", invalid="ignore"):
            proportional = np.where(seen, by / bb, np.nan)
            beta = np.where(told, (one * by - b * y) / spread, proportional)
            told &= beta > 0.02 * proportional  # times that do not grow with the batch are a disturbance, not a fit
            beta = np.where(told, beta, proportional)
            alpha = np.where(told, (y - beta * b) / one, 0.0)
        negative = alpha < 0
        return np.maximum(alpha, 0.0), np.where(negative, proportional, beta), told


class Exchange:
    """Seconds of the exchange and how far it hides behind computing: step = (computing^g + exchange^g)^(1/g).

    For every overlap exponent g of `OVERLAPS` the exchange's seconds follow from each window; the exponent whose past
    seconds predict the next step best is believed most. A deviation of more than `jump` is taken at once.

    weight   least weight of a new window (the first n weigh 1/n)
    """

    def __init__(self, *, weight: float = 0.1, forget: float = 0.98, error: float = 0.02, jump: float = 0.15) -> None:
        self.weight, self.forget, self.error, self.jump = weight, forget, error, jump
        self.level: Floats = UNKNOWN  # (..., G) log seconds
        self.loss: Floats = UNKNOWN  # (..., G)
        self.count: Floats = UNKNOWN  # (...)
        # `loss`, and what follows from it and the level: the weights, and the log of the exchange's seconds to its power.
        self._believed: tuple[Floats, Floats, Floats] = (np.empty(0), UNKNOWN, UNKNOWN)

    def update(self, slowest: Floats, exposed: Floats) -> None:
        """Take in the slowest worker's seconds and what the exchange added to them, (...)."""
        if self.level.shape[:-1] != slowest.shape:
            self.level = np.full((*slowest.shape, len(OVERLAPS)), np.nan)
            self.loss = 1e-3 * np.square(OVERLAPS - 1) + np.zeros(self.level.shape)
            self.count = np.zeros(slowest.shape)
        seen = np.isfinite(slowest) & np.isfinite(exposed) & (slowest > 0)
        slow = np.log(np.where(seen, slowest, 1.0))[..., None]
        ratio = 1.0 + np.clip(np.where(seen, exposed / np.where(seen, slowest, 1.0), 0.0), 1e-6, 1e6)[..., None]
        implied = slow + np.log(ratio**OVERLAPS - 1.0) / OVERLAPS
        with np.errstate(invalid="ignore"):  # the level is NaN before the first window
            expected = np.logaddexp(OVERLAPS * slow, OVERLAPS * self.level) / OVERLAPS
        surprise = slow + np.log(ratio) - expected
        fresh = np.isnan(self.level[..., 0])
        first, usual = seen & fresh, seen & ~fresh
        jump = usual & (np.abs(np.where(np.isnan(surprise), 0.0, surprise)).min(-1) > self.jump)
        if first.any():
            # Where little is exposed a large exponent needs an exchange of just the right length: d log e / d log exposed.
            prior = -np.log((ratio - 1.0) * ratio ** (OVERLAPS - 1.0) / (ratio**OVERLAPS - 1.0))
            self.loss = np.where(first[..., None], self.loss + prior, self.loss)
        told = np.minimum(0.5 * np.square(surprise / self.error), 4.5)
        self.loss = np.where(usual, self.forget, 1.0)[..., None] * self.loss + np.where(usual[..., None], told, 0.0)
        self.count = np.where(jump, 1.0, self.count + seen)
        gain = np.where(jump, 1.0, np.maximum(1.0 / np.maximum(self.count, 1.0), self.weight))
        moved = self.level + gain[..., None] * (implied - self.level)
        self.level = np.where(first[..., None], implied, np.where(usual[..., None], moved, self.level))

    def log_step(self, computing: Floats) -> Floats:
        """Expected log seconds of a step (..., K) whose slowest worker computes for `computing` (..., K)."""
        if self._believed[0] is not self.loss:
            likely = np.exp(self.loss.min(-1, keepdims=True) - self.loss)
            level = np.where(np.isnan(self.level), -np.inf, self.level)
            self._believed = self.loss, likely / likely.sum(-1, keepdims=True), OVERLAPS * level
        _, weights, powers = self._believed
        slow = np.log(np.maximum(computing, 1e-12))[..., None]
        with np.errstate(invalid="ignore"):
            whole = np.logaddexp(OVERLAPS * slow, powers[..., None, :]) / OVERLAPS
        return np.asarray((weights[..., None, :] * whole).sum(-1))

    FIELDS = ("level", "loss", "count")


class Smoothed:
    """Exponentially smoothed log of a positive figure per cluster; NaN before it was first known.

    >>> s = Smoothed(0.5)
    >>> s.update(np.array(1.0)), s.update(np.array(np.nan)), s.update(np.array(4.0))
    (array(1.), array(1.), array(2.))
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.log: Floats = UNKNOWN

    def update(self, value: Floats) -> Floats:
        """The smoothed figure (...) after this one; NaN leaves it alone."""
        with np.errstate(divide="ignore", invalid="ignore"):
            seen = np.where(np.isfinite(value) & (value > 0), np.log(value), np.nan)
        old = seen if self.log.shape != seen.shape else np.where(np.isnan(self.log), seen, self.log)
        self.log = np.where(np.isnan(seen), old, old + self.weight * (seen - old))
        return np.asarray(np.exp(self.log))

    FIELDS = ("log",)


class NoiseByBatch:
    """The noise scale as it was measured lately, log phi = level + `RHO` log(B / batch): what larger batches measure is larger.

    Whichever rho of 0 to 0.35 is assumed, the rule does within 0.2 % as well, while one learned from a job mistakes phi's
    course through training for it (docs/design/baselines.md).

    weight   of a new window: measured phi is smooth already, and falls by half within ten windows of a job's start
    """

    FIELDS = ("level", "batch")

    def __init__(self, weight: float = 0.4) -> None:
        self.weight = weight
        self.level: Floats = UNKNOWN  # (...) average log phi
        self.batch: Floats = UNKNOWN  # (...) average log(B / B0)

    def update(self, phi: Floats, ratio: Floats) -> None:
        """Take in a measured noise scale and B / B0, (...); NaN leaves everything alone."""
        seen = np.isfinite(phi) & (phi > 0) & (ratio > 0)
        log_phi, x = np.log(np.where(seen, phi, 1.0)), np.log(np.where(seen, ratio, 1.0))
        if self.level.shape != log_phi.shape:
            self.level = self.batch = np.full(log_phi.shape, np.nan)
        weight = np.where(seen, np.where(np.isfinite(self.level), self.weight, 1.0), 0.0)
        self.level, self.batch = _moved(self.level, log_phi, weight), _moved(self.batch, x, weight)

    def log_waste(self, total: Floats, base: Floats) -> Floats:
        """Expected log of what a sample of global batches (..., K) teaches less than one of `base` (...) would: (phi + B) /
        (phi + base), both at phi(B), as AdaScale counts progress. NaN where phi is unknown."""
        log_total, log_base = np.log(np.maximum(total, 1e-9)), np.log(base)[..., None]
        log_phi = self.level[..., None] + RHO * (log_total - log_base - self.batch[..., None])
        with np.errstate(invalid="ignore"):
            return np.asarray(np.logaddexp(log_phi, log_total) - np.logaddexp(log_phi, log_base))


class Largest:
    """The largest global batch that training has met, at least the base batch."""

    FIELDS = ("total",)

    def __init__(self) -> None:
        self.total: Floats = UNKNOWN  # (...) samples

    def update(self, total: Floats, base: Floats) -> Floats:
        """Take in the one in force, (...); returns the largest."""
        before = self.total if self.total.shape == np.shape(total) else -np.inf
        self.total = np.maximum(np.maximum(total, base), before)
        return self.total


def _moved(average: Floats, to: Floats, weight: Floats) -> Floats:
    return np.where(weight == 1.0, to, np.where(weight > 0, average + weight * (to - average), average))


def noise_scale(window: Window) -> Floats:
    """The noise scale (...) in samples per micro-batch, within 1,000 times the base batch either way; NaN where unknown."""
    base = base_total(window)
    return np.asarray(np.clip(window.noise_scale / window.micro_batches, base / 1e3, base * 1e3))


def saved(fitted: Any) -> dict[str, Any]:
    """The arrays named in `FIELDS`, as plain lists."""
    return {name: getattr(fitted, name).tolist() for name in fitted.FIELDS}


def restored(fitted: Any, state: dict[str, Any]) -> None:
    """The inverse of `saved`."""
    for name in fitted.FIELDS:
        values = np.asarray(state[name], dtype=np.float64)
        setattr(fitted, name, values if values.size else UNKNOWN)
