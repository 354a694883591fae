"""Affine costs by least squares, as in Pollux and Cannikin."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dynamix.model.state import nothing
from dynamix.window import Floats

LEAST_SPREAD = 4e-4  # of squared batches: a root mean square difference of 2 %
LEAST_GROWTH = 0.02  # of proportional growth: if times grow less with the batch, that is a disturbance and no fit


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """seconds = alpha + beta * b by least squares of relative errors, with forgetting. One fit per entity (...).

    forget    factor on older measurements of an entity at each new one
    moments   (5, ...): sums of w, w b, w b^2, w y, w b y with w = 1/y^2

    >>> fit = LeastSquares()
    >>> for b in (10.0, 20.0): fit = fit.update(np.array([b]), np.array([0.5 + 0.01 * b]))
    >>> [x.round(6).tolist() if x.dtype == float else x.tolist() for x in fit.solve()]
    [[0.5], [0.01], [True]]
    """

    forget: float = 1.0
    moments: Floats = field(default_factory=nothing)

    FIELDS: ClassVar[tuple[str, ...]] = ("moments",)

    def update(self, batch: Floats, seconds: Floats) -> LeastSquares:
        """Add one measurement per entity, samples and seconds (...). NaN is ignored."""
        known = np.isfinite(seconds) & (seconds > 0) & np.isfinite(batch) & (batch > 0)
        b, y = np.where(known, batch, 1.0), np.where(known, seconds, 1.0)
        new = np.where(known, np.stack([1 / y**2, b / y**2, b * b / y**2, 1 / y, b / y]), 0.0)
        if self.moments.shape == new.shape:
            new = np.where(known, self.forget, 1.0) * self.moments + new
        return dataclasses.replace(self, moments=new)

    def solve(self) -> tuple[Floats, Floats, np.ndarray]:
        """alpha (s) and beta (s/sample), neither negative, and whether the batches determine both, (...).

        NaN if nothing was measured; alpha is 0 if the batches do not determine both.
        """
        one, b, bb, y, by = self.moments
        seen = one > 0
        spread = one * bb - b * b
        told = seen & (spread > LEAST_SPREAD * one * bb)
        with np.errstate(divide="ignore", invalid="ignore"):
            proportional = np.where(seen, by / bb, np.nan)
            beta = np.where(told, (one * by - b * y) / spread, proportional)
            told &= beta > LEAST_GROWTH * proportional
            beta = np.where(told, beta, proportional)
            alpha = np.where(told, (y - beta * b) / one, 0.0)
        negative = alpha < 0
        return np.maximum(alpha, 0.0), np.where(negative, proportional, beta), told
