"""The exchange of gradients: how long it takes, and how much of it overlaps with computing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from dynamix.model.state import nothing
from dynamix.window import Floats

# Candidate overlap exponents of the step time; Pollux bounds its gamma by 1 and 10.
OVERLAPS: Floats = np.array([1.0, 1.25, 1.6, 2.0, 2.8, 4.0, 6.0, 10.0])


@dataclass(frozen=True, eq=False)
class Exchange:
    """Seconds of the exchange and its overlap with computing: step = (computing^g + exchange^g)^(1/g).

    That is Pollux's form (arXiv 2008.12260, section 3.2). For every overlap exponent g of `OVERLAPS` each window gives
    the exchange's seconds. The exponent whose past seconds predict the next step best gets the most weight. A deviation
    of more than `jump` is taken at once.

    weight   least weight of a new window (the first n windows weigh 1/n)
    forget   factor a window on past prediction errors
    error    standard deviation of a step's log seconds
    level    (..., G) log seconds of the exchange, by each exponent
    loss     (..., G) half the sum of squared normalised prediction errors
    count    (...) windows taken in since the last jump

    >>> exchange = Exchange().update(np.array(0.2), np.array(0.1))      # 0.1 s on top of the slowest worker's 0.2 s
    >>> np.exp(exchange.log_step(np.array([0.2]))).round(3).tolist()
    [0.3]
    """

    weight: float = 0.1
    forget: float = 0.98
    error: float = 0.02
    jump: float = 0.15
    level: Floats = field(default_factory=nothing)
    loss: Floats = field(default_factory=nothing)
    count: Floats = field(default_factory=nothing)

    FIELDS: ClassVar[tuple[str, ...]] = ("level", "loss", "count")

    def update(self, slowest: Floats, exposed: Floats) -> Exchange:
        """Take in the slowest worker's seconds and what the exchange added to them, (...); NaN changes nothing."""
        level, loss, count = self.level, self.loss, self.count
        if level.shape[:-1] != slowest.shape:
            level = np.full((*slowest.shape, len(OVERLAPS)), np.nan)
            loss = 1e-3 * np.square(OVERLAPS - 1) + np.zeros(level.shape)
            count = np.zeros(slowest.shape)
        seen = np.isfinite(slowest) & np.isfinite(exposed) & (slowest > 0)
        slow = np.log(np.where(seen, slowest, 1.0))[..., None]
        ratio = 1.0 + np.clip(np.where(seen, exposed / np.where(seen, slowest, 1.0), 0.0), 1e-6, 1e6)[..., None]
        implied = slow + np.log(ratio**OVERLAPS - 1.0) / OVERLAPS
        with np.errstate(invalid="ignore"):  # the level is NaN before the first window
            expected = np.logaddexp(OVERLAPS * slow, OVERLAPS * level) / OVERLAPS
        surprise = slow + np.log(ratio) - expected
        fresh = np.isnan(level[..., 0])
        first, usual = seen & fresh, seen & ~fresh
        jump = usual & (np.abs(np.where(np.isnan(surprise), 0.0, surprise)).min(-1) > self.jump)
        if first.any():
            loss = np.where(first[..., None], loss + _prior(ratio), loss)
        told = np.minimum(0.5 * np.square(surprise / self.error), 4.5)
        loss = np.where(usual, self.forget, 1.0)[..., None] * loss + np.where(usual[..., None], told, 0.0)
        count = np.where(jump, 1.0, count + seen)
        gain = np.where(jump, 1.0, np.maximum(1.0 / np.maximum(count, 1.0), self.weight))
        moved = level + gain[..., None] * (implied - level)
        level = np.where(first[..., None], implied, np.where(usual[..., None], moved, level))
        return dataclasses.replace(self, level=level, loss=loss, count=count)

    def log_step(self, computing: Floats) -> Floats:
        """Expected log seconds of a step (..., K) whose slowest worker computes for `computing` (..., K) seconds."""
        weights, powers = self.believed
        slow = np.log(np.maximum(computing, 1e-12))[..., None]
        with np.errstate(invalid="ignore"):
            whole = np.logaddexp(OVERLAPS * slow, powers[..., None, :]) / OVERLAPS
        return np.asarray((weights[..., None, :] * whole).sum(-1))

    @cached_property
    def believed(self) -> tuple[Floats, Floats]:
        """Belief in each exponent, and the log of the exchange's seconds to that power, (..., G)."""
        likely = np.exp(self.loss.min(-1, keepdims=True) - self.loss)
        level = np.where(np.isnan(self.level), -np.inf, self.level)
        return likely / likely.sum(-1, keepdims=True), OVERLAPS * level


def _prior(ratio: Floats) -> Floats:
    """The prior loss of each exponent (..., G) after one window, whose step took `ratio` (..., 1) times computing.

    If little is exposed, a large exponent fits only an exchange of just the right length: d log e / d log exposed.
    """
    return np.asarray(-np.log((ratio - 1.0) * ratio ** (OVERLAPS - 1.0) / (ratio**OVERLAPS - 1.0)))
