"""Cannikin's rule: equal finishing times at the global batch with the highest goodput."""

import dataclasses
from typing import Any

import numpy as np

from dynamix.model.measured import base_total, busy_seconds, exposed_seconds, mean_of_known, noise_scale
from dynamix.model.outcome import log_goodput
from dynamix.model.split import best_split, split
from dynamix.model.state import restored, saved
from dynamix.policies.proportional import fill_unknown, speeds
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix_lab.baselines.least_squares import LeastSquares


class Cannikin:
    """Fits each worker's costs online, splits for equal finishing times, takes the global batch of highest goodput.

    Cannikin (Nie et al., arXiv 2402.05302). The first window has equal shares, the second has shares by measured speed,
    because alpha_i and beta_i need two different sizes. All later splits are optimal. In its compute-bound case a step
    takes the slowest worker's computing plus the part of the exchange that does not overlap. A worker whose size hardly
    changed is taken as proportional. `forget` discounts older windows (ours: the paper's clusters do not change).
    `docs/design/baselines.md` says what is exact and what had to be chosen.

    >>> policy, sizes = Cannikin(), np.array([64, 64])
    >>> for _ in range(3):
    ...     seconds = np.array([0.1, 0.0]) + np.array([1e-3, 4e-3]) * sizes
    ...     sizes = policy.decide(Window.of(sizes, compute=seconds), Bounds.of(2))
    >>> sizes.tolist()                                                # 0.1825 s and 0.184 s
    [82, 46]
    """

    def __init__(self, *, forget: float = 0.7) -> None:
        self.computing, self.windows = LeastSquares(forget), 0

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        if self.computing.moments.shape[1:] != window.batch_size.shape:
            self.windows = 0
        self.windows += 1
        self.computing = self.computing.update(window.worked, busy_seconds(window))
        alpha, beta, told = self.computing.solve()
        measured = np.asarray(np.isfinite(beta).any(-1))
        # Workers of equal speed get equal sizes, so no two sizes are seen. AdaptDL's prior, as in `Pollux`, then leads
        # to another batch.
        alike = ~told.any(-1, keepdims=True)
        alpha, beta = np.where(alike, 0.5 * beta * window.batch_size, alpha), np.where(alike, 0.5 * beta, beta)
        alpha, beta = _filled(alpha, 0.0), _filled(beta, 1.0)
        now = window.batch_size.sum(-1).astype(np.float64)
        if self.windows == 1:
            wish = np.where(measured[..., None], fill_unknown(speeds(window)), np.maximum(window.batch_size, 1e-9))
            return project(wish, bounds, total=now, current=window.batch_size)
        phi, exposed = noise_scale(window), np.nan_to_num(exposed_seconds(window))

        def of(finish_s: Floats, total: Floats) -> Floats:
            with np.errstate(divide="ignore"):
                return log_goodput(total, np.log(finish_s + exposed[..., None]), np.log1p(total / phi[..., None]))

        q = bounds.quantum
        base = np.minimum(np.ceil(base_total(window) / q) * q, bounds.total_high)  # if bounds allow it
        above = dataclasses.replace(bounds, total_low=np.maximum(bounds.total_low, base).astype(np.int64))
        best = best_split(alpha, beta, above, of)
        best = np.where(np.isnan(phi)[..., None], split(now, alpha, beta, bounds), best)
        best = np.where(measured[..., None], best, window.batch_size)
        return project(best, bounds, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"computing": saved(self.computing), "windows": self.windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.computing = restored(self.computing, state["computing"])
        self.windows = int(state["windows"])


def _filled(cost: Floats, otherwise: float) -> Floats:
    """Replace NaN by the mean of the measured workers, or by `otherwise` if no worker was measured."""
    usual = mean_of_known(cost)[..., None]
    return np.where(np.isnan(cost), np.where(np.isnan(usual), otherwise, usual), cost)
