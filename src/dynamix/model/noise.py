"""The noise scale at every batch, from measurements, and how much less a sample teaches in a larger batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dynamix.model.state import nothing
from dynamix.window import Floats

RHO = 0.2  # slope of log phi over log B: 0.2 measured on emulated hosts; published values are 0.35 and 0.7


@dataclass(frozen=True, eq=False)
class NoiseByBatch:
    """The recently measured noise scale, log phi = level + `RHO` log(B / batch).

    Larger batches measure a larger noise scale.

    With any rho from 0 to 0.35 the goodput rule does equally well within 0.2 %. A rho learned from a job mistakes phi's
    change during training for it (docs/design/baselines.md).

    weight   of a new window: measured phi is smooth already, and falls by half within ten windows of a job's start
    level    (...) average log phi, in samples per round
    batch    (...) average log(B / B0)

    >>> noise = NoiseByBatch().update(np.array(300.0), np.array(1.0))              # measured at the base batch
    >>> waste = noise.log_waste(np.array([100.0, 400.0]), np.array(100.0))
    >>> np.exp(waste).round(2).tolist()                     # 1, and less than (300 + 400) / (300 + 100), as phi grows
    [1.0, 1.61]
    """

    weight: float = 0.4
    level: Floats = field(default_factory=nothing)
    batch: Floats = field(default_factory=nothing)

    FIELDS: ClassVar[tuple[str, ...]] = ("level", "batch")

    def update(self, phi: Floats, ratio: Floats) -> NoiseByBatch:
        """Take in a measured noise scale and B / B0, (...); NaN changes nothing."""
        seen = np.isfinite(phi) & (phi > 0) & (ratio > 0)
        log_phi, x = np.log(np.where(seen, phi, 1.0)), np.log(np.where(seen, ratio, 1.0))
        level, batch = self.level, self.batch
        if level.shape != log_phi.shape:
            level = batch = np.full(log_phi.shape, np.nan)
        weight = np.where(seen, np.where(np.isfinite(level), self.weight, 1.0), 0.0)
        return dataclasses.replace(self, level=_moved(level, log_phi, weight), batch=_moved(batch, x, weight))

    def log_waste(self, total: Floats, base: Floats) -> Floats:
        """Expected log of how much less a sample teaches in global batches (..., K) than in one of `base` (...).

        That is (phi + B) / (phi + base), both at phi(B), as AdaScale counts progress. NaN if phi is unknown.
        """
        log_total, log_base = np.log(np.maximum(total, 1e-9)), np.log(base)[..., None]
        log_phi = self.level[..., None] + RHO * (log_total - log_base - self.batch[..., None])
        with np.errstate(invalid="ignore"):
            return np.asarray(np.logaddexp(log_phi, log_total) - np.logaddexp(log_phi, log_base))


def _moved(average: Floats, to: Floats, weight: Floats) -> Floats:
    return np.where(weight == 1.0, to, np.where(weight > 0, average + weight * (to - average), average))
