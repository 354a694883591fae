"""Estimates the gradient noise scale from gradients of unequal batches."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dynamix.runtime.part import Part, fields, wrong
from dynamix.window import Floats

MEASUREMENTS = 3  # before the scale is known: single estimates vary widely, and may be far too large


class NoiseScale(Part):
    """tr(Sigma) and |G|^2 from gradients of unequal batches; their ratio is the gradient noise scale, in samples.

    Worker i has the mean gradient g_i over b_i samples; the applied gradient is g = sum_i w_i g_i (w_i = b_i/B up to
    token counts). Then E|g_i|^2 = G2 + S/b_i and E|g|^2 = G2 + S sum w_i^2/b_i. The pooled scatter gives

        S = (sum w_i |g_i|^2 - |g|^2) / (sum w_i/b_i - sum w_i^2/b_i),   G2 = |g|^2 - S sum w_i^2/b_i

    With w_i = b_i/B this is the within-group variance estimator: unbiased for any split, and of least variance for
    Gaussian gradients. So it is never worse than inverse-variance weighting of per-worker estimates (Cannikin, arXiv
    2402.05302, tested against it). Numerator and denominator are smoothed separately; `decay` is the past's weight.
    Both are NaN before `MEASUREMENTS` estimates, because growing the batch by the first ones costs score.
    """

    name = "noise_scale"

    def __init__(self, decay: float = 0.8) -> None:
        self.decay = decay
        self._noise = self._signal = self._mass = 0.0

    @staticmethod
    def estimate(
        local_sq: Floats, global_sq: float, batch: Floats, weight: Floats | None = None
    ) -> tuple[float, float]:
        """(S, G2) of one measurement; NaN unless at least two workers were active. Arrays of shape (W,).

        >>> NoiseScale.estimate(np.array([5.0, 3.0]), 2.0, np.array([2.0, 4.0]))
        (10.0, 0.3333333333333335)
        """
        active = (batch > 0) & np.isfinite(local_sq)
        if active.sum() < 2 or not np.isfinite(global_sq):
            return float("nan"), float("nan")
        b, sq = batch[active].astype(np.float64), local_sq[active]
        w = b / b.sum() if weight is None else weight[active] / weight[active].sum()
        pooled = float((w * w / b).sum())
        noise = (float((w * sq).sum()) - global_sq) / (float((w / b).sum()) - pooled)
        return noise, global_sq - noise * pooled

    def update(self, noise: float, signal: float) -> None:
        """Add one estimate to the smoothed values; NaN changes nothing."""
        if np.isfinite(noise) and np.isfinite(signal):
            self._noise = self.decay * self._noise + (1 - self.decay) * noise
            self._signal = self.decay * self._signal + (1 - self.decay) * signal
            self._mass = self.decay * self._mass + (1 - self.decay)

    @property
    def noise(self) -> float:
        """Smoothed tr(Sigma) per sample; NaN until it is known."""
        return max(self._noise / self._mass, 0.0) if self._known() else float("nan")

    @property
    def signal(self) -> float:
        """Smoothed |G|^2 (may be negative while noise dominates the estimate); NaN until it is known."""
        return self._signal / self._mass if self._known() else float("nan")

    def _known(self) -> bool:
        """Whether there were enough measurements: n of them have the mass 1 - decay^n."""
        return bool(self._mass > 1 - self.decay ** (MEASUREMENTS - 0.5))

    def state_dict(self) -> dict[str, float]:
        return {"noise": self._noise, "signal": self._signal, "mass": self._mass}

    def check(self, state: Mapping[str, Any]) -> None:
        fields(self.name, state, {"mass": float, "noise": float, "signal": float})
        if not 0 <= state["mass"] <= 1 or not np.isfinite([state["noise"], state["signal"]]).all():
            wrong(self.name, state, "finite numbers, mass 0 to 1")

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._noise, self._signal, self._mass = state["noise"], state["signal"], state["mass"]
