"""How far a rule should follow the newest speeds: judged by what each answer would have done in the window that came.

Where slowdowns come and go faster than a decision takes effect, sizes that follow every change are always late, and with
many workers somebody has always just changed. So several answers are kept, from "follow fully" to "usual speeds only",
and after each window all are scored on the times then measured.
"""

from __future__ import annotations

import numpy as np

from dynamix.policies.fitting import UNKNOWN
from dynamix.policies.split import Objective
from dynamix.window import Floats


class Softness:
    """Candidates usual^(1-p) * newest^p of a worker's seconds per sample, and their discounted log goodput in hindsight.

    powers   p of each candidate; the first wins ties
    weight   least weight of a window in the usual speed (the first n weigh 1/n)
    forget   factor a window on past scores
    """

    FIELDS = ("usual", "count", "sizes", "score")

    def __init__(
        self, powers: tuple[float, ...] = (1.0, 0.7, 0.4, 0.0), *, weight: float = 0.03, forget: float = 0.95
    ) -> None:
        self.powers, self.weight, self.forget = powers, weight, forget
        self.usual: Floats = UNKNOWN  # (..., W) log seconds per sample
        self.count: Floats = UNKNOWN  # () windows seen
        self.sizes: Floats = UNKNOWN  # (P, ..., W) what each candidate answered to the last window
        self.score: Floats = UNKNOWN  # (P, ...)

    def judge(self, busy: Floats, batch: Floats, offset: Floats, objective: Objective) -> None:
        """Score the last answers on the seconds `busy` (..., W) measured now, at sizes `batch` and offsets alpha/beta."""
        if self.sizes.shape[1:] != busy.shape:
            self.usual = self.sizes = UNKNOWN
            self.score = np.zeros((len(self.powers), *busy.shape[:-1]))
            self.count = np.zeros(())
            return
        seconds = busy * (offset + self.sizes) / (offset + batch)
        slowest = np.where(np.isfinite(seconds), seconds, 0.0).max(-1)
        seen = (slowest > 0).all(0)
        value = objective(np.moveaxis(np.where(seen, slowest, 1.0), 0, -1), np.moveaxis(self.sizes.sum(-1), 0, -1))
        value = np.moveaxis(value, -1, 0)
        known = seen & np.isfinite(value).all(0)
        relative = np.where(known, value - value[0], 0.0)
        self.score = np.where(known, self.forget, 1.0) * self.score + relative

    def tempered(self, alpha: Floats, beta: Floats) -> list[tuple[Floats, Floats]]:
        """Costs (alpha, beta) of each candidate; updates the usual speeds."""
        newest = np.log(beta)
        if self.usual.shape != newest.shape:
            self.usual, self.count = newest, np.ones(())
        else:
            self.count = self.count + 1
            self.usual = self.usual + np.maximum(1 / self.count, self.weight) * (newest - self.usual)
        factors = [np.exp((1 - power) * (self.usual - newest)) for power in self.powers]
        return [(alpha * factor, beta * factor) for factor in factors]

    def choose(self, sizes: Floats) -> Floats:
        """Of the answers (P, ..., W) to this window, the one whose kind has done best."""
        self.sizes = sizes
        best = (self.score - 1e-3 * (np.arange(len(sizes)) > 0).reshape(-1, *[1] * (sizes.ndim - 2))).argmax(0)
        return np.asarray(np.take_along_axis(sizes, best[None, ..., None], 0)[0])
