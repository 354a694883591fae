"""What one worker of a stigmergic job remembers of itself: seven numbers, whatever the number of workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynamix.policies.fitting import UNKNOWN
from dynamix.policies.traces import Own
from dynamix.window import Floats

FORGET = 0.95  # factor on older changes of size, at each new one
STEADIEST = 0.01  # nobody's jitter is taken to be less


@dataclass(frozen=True, slots=True)
class Sense:
    """A window as its worker takes it, (..., W); NaN before a worker was ever measured.

    busy         log seconds of a step up to the own last gradient
    share        part of the step that this is
    jitter       relative standard deviation of a step
    elasticity   d log busy / d log size
    """

    busy: Floats
    share: Floats
    jitter: Floats
    elasticity: Floats


class Habit:
    """The last window, the wish before rounding, and how the own time has grown with the own size.

    The elasticity is learned from changes of size alone, so a slowdown that stays does no harm; until sizes have changed it
    is what the rule believes beforehand.
    """

    FIELDS = ("wish", "size", "busy", "share", "jitter", "squares", "products")

    def __init__(self) -> None:
        self.wish: Floats = UNKNOWN  # (..., W) samples, real
        self.size: Floats = UNKNOWN  # log samples in the last measured window
        self.busy: Floats = UNKNOWN  # log seconds then
        self.share: Floats = UNKNOWN
        self.jitter: Floats = UNKNOWN
        self.squares: Floats = UNKNOWN  # of log changes of size
        self.products: Floats = UNKNOWN  # with log changes of seconds

    def observe(self, own: Own, *, belief: float, trust: float) -> Sense:
        """Take in a window. One without times counts as the last one did, at the size in force now.

        belief, trust   the elasticity believed beforehand, and how firmly (in squared log changes of size)
        """
        if self.busy.shape != own.size.shape:
            self._start(own)
        with np.errstate(divide="ignore", invalid="ignore"):
            size, busy = np.log(own.size), np.log(own.busy)
            share = own.busy / (own.busy + own.blocked)
        seen = np.isfinite(size) & np.isfinite(busy)
        moved, slower = size - self.size, busy - self.busy
        with np.errstate(invalid="ignore"):
            # Much more than its size explains is a jump of speed.
            told = seen & (np.abs(moved) > 0.02) & (np.abs(slower) < 0.3 + 3.0 * np.abs(moved))
        moved, slower = np.where(told, moved, 0.0), np.where(told, slower, 0.0)
        forget = np.where(told, FORGET, 1.0)
        self.squares = forget * self.squares + moved * moved
        self.products = forget * self.products + moved * slower
        elasticity = np.clip((self.products + trust * belief) / (self.squares + trust), 0.1, 1.5)
        self.share = np.where(np.isfinite(share), share, self.share)
        jitter = np.where(own.jitter >= 0, own.jitter, np.nan)
        smooth = np.where(np.isnan(self.jitter), jitter, self.jitter + 0.3 * (jitter - self.jitter))
        self.jitter = np.where(np.isfinite(smooth), smooth, self.jitter)
        guess = self.busy + elasticity * np.where(np.isfinite(size), size - self.size, 0.0)
        taken = np.where(seen, busy, guess)
        self.size, self.busy = np.where(seen, size, self.size), np.where(seen, busy, self.busy)
        known = np.where(np.isfinite(self.jitter), self.jitter, 0.0)
        return Sense(taken, self.share, np.maximum(known, STEADIEST), elasticity)

    def intended(self, size: Floats, quantum: int) -> Floats:
        """The wish behind `size`, or `size` itself where something else than rounding lies between."""
        near = np.abs(self.wish - size) <= quantum
        return np.where(near, self.wish, size)

    def _start(self, own: Own) -> None:
        shape = own.size.shape
        self.wish = own.size.copy()
        self.size, self.busy, self.share, self.jitter = np.full((4, *shape), np.nan)
        self.squares, self.products = np.zeros((2, *shape))
