"""What an allocation would achieve, by a model fitted online: the parts of the goodput rule, asked instead of obeyed."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamix.model.costs import WorkerCosts
from dynamix.model.fitting import (
    Exchange,
    NoiseByBatch,
    Smoothed,
    base_total,
    exposed_seconds,
    noise_scale,
    restored,
    saved,
    slowest_seconds,
)
from dynamix.window import Floats, Window


class Prediction:
    """Costs per worker, the exchange and its overlap, and the noise scale, learned from windows of shape (..., W).

    >>> model, sizes = Prediction(), np.array([64, 64])
    >>> for _ in range(3): model.update(Window.of(sizes, compute=[0.1, 0.2], compute_std=1e-3, wait=0.0, communication=0.1, steps=5))
    >>> even, better = np.exp(model.log_step(np.array([[64.0, 64.0], [96.0, 48.0]]))).round(2)
    >>> bool(better < even)
    True
    """

    def __init__(self, *, spread_weight: float = 0.3) -> None:
        self.costs, self.exchange = WorkerCosts(), Exchange()
        self.noise, self.spread = NoiseByBatch(), Smoothed(spread_weight)
        self._window: Window | None = None

    def update(self, window: Window) -> None:
        """Take in a window."""
        slowest = slowest_seconds(window)
        self.costs.update(window)
        self.exchange.update(slowest, exposed_seconds(window))
        total = window.batch_size.sum(-1).astype(np.float64)
        self.noise.update(noise_scale(window), total / base_total(window))
        busiest = np.where(np.isfinite(window.compute), window.compute, 0.0).max(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.spread.update(np.where(busiest > 0, np.clip(slowest / busiest, 1.0, 2.0), np.nan))
        self._window = window

    def log_step(self, sizes: Floats) -> Floats:
        """Expected log seconds (..., K) of an optimizer step with sizes (..., K, W); NaN where nothing was measured."""
        assert self._window is not None
        alpha, beta = self.costs.at(self._window)
        finish = (alpha[..., None, :] + beta[..., None, :] * sizes).max(-1)
        spread = np.exp(np.where(np.isnan(self.spread.log), 0.0, self.spread.log))
        step = self.exchange.log_step(spread[..., None] * np.nan_to_num(finish))
        return np.where(np.isnan(finish), np.nan, step)

    def log_waste(self, total: Floats) -> Floats:
        """Expected log (phi + B) / (phi + B0) of global batches (..., K), samples per micro-batch; NaN without a noise scale."""
        assert self._window is not None
        return self.noise.log_waste(total, base_total(self._window))

    _PARTS = ("costs", "exchange", "noise", "spread")

    def state_dict(self) -> dict[str, Any]:
        return {name: saved(getattr(self, name)) for name in self._PARTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._PARTS:
            restored(getattr(self, name), state[name])
