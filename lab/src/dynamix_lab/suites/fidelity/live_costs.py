"""What a step costs on emulated hosts behind processor quotas.

A host of `speed` cores computes b samples in (alpha + beta b) bend(b) / speed^(1 + small_share) s: short slices lose
their caches, and the line bends where sizes outgrow one. The exchange is processors' work too: whoever arrives last
shows its own part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynamix.window import Floats
from dynamix_lab.harness.launch import LaunchSettings
from dynamix_lab.opponents.course import ring_mbit
from dynamix_lab.tasks import make_workload

SIZES = 2.0 ** np.arange(3, 10)  # of `LiveCosts.bend`
UNIT_BATCH = 512  # progress is counted in samples of this global batch, the base batch of four hosts


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """alpha (core-s), beta (core-s per sample), small_share and bend (log factors at `SIZES`) of computing; exchange_s
    and exchange_per_speed of the exchange at rest, with its bytes on the slowest link on top; jitter_s (s), jitter_sd
    and together_sd (relative) of every step; log noise scale at equal parts of `samples` of progress, at the unit
    batch, its growth `rho` with log B and the sd `noise_error` of what is measured of it.
    """

    alpha: float
    beta: float
    small_share: float
    exchange_s: float
    exchange_per_speed: float
    jitter_s: float
    jitter_sd: float
    together_sd: float
    knots: tuple[float, ...]
    samples: float
    rho: float = 0.0
    noise_error: float = 0.2
    bend: tuple[float, ...] = (0.0,) * len(SIZES)

    def seconds(self, batch: Floats, speed: Floats) -> Floats:
        """Computing of `batch` samples on hosts of `speed` cores, s."""
        return np.asarray((self.alpha + self.beta * batch) * self.bent(batch) / speed ** (1 + self.small_share))

    def bent(self, batch: Floats) -> Floats:
        """Factors on the line by batch size, of its shape."""
        return np.asarray(np.exp(np.interp(np.log(np.maximum(batch, 1.0)), np.log(SIZES), self.bend)))

    def units(self, base: float) -> float:
        """Progress at global batch `base`, in its own samples, over the same in samples at the unit batch."""
        return _units(self.knots, self.rho, base)


def moved_mbit(workers: int) -> float:
    """What a ring all-reduce of the demo's gradients sends over each link, Mbit."""
    model = make_workload(LaunchSettings().workload).make_model(0)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return ring_mbit(workers, size)


def _units(knots: Sequence[float], rho: float, base: float) -> float:
    phi = np.exp(np.asarray(knots)) * (base / UNIT_BATCH) ** rho
    return float(np.mean((phi + base) / (phi + UNIT_BATCH)))
