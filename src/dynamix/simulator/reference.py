"""The lagged reference: the best allocation for the true costs of the moment a window closed."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamix.simulator.env import ClusterEnv
from dynamix.simulator.network import step_time
from dynamix.simulator.statistics import efficiency
from dynamix.window import Bounds, Floats, Ints, Window, project

_GRID = np.exp(np.linspace(np.log(0.15), np.log(8.0), 48))


def best_allocation(
    alpha: Floats, beta: Floats, exchange_s: Floats, overlap: Floats, phi: Floats, base: Floats
) -> Floats:
    """Real sizes (C, W) of highest goodput: equal finishing times b_i = (T - alpha_i)/beta_i, B by search over a grid.

    T = (B + sum alpha/beta) / sum 1/beta (PAPERS section 5); a worker whose alpha exceeds T gets one sample.
    """
    rate, offset = (1 / beta).sum(-1, keepdims=True), (alpha / beta).sum(-1, keepdims=True)
    total = base[:, None] * _GRID
    finish = (total + offset) / rate
    whole = step_time(finish, exchange_s[:, None], overlap[:, None])
    goodput = total / whole * efficiency(phi[:, None], total, base[:, None])
    best = np.take_along_axis(finish, goodput.argmax(-1)[:, None], -1)
    return np.asarray(np.maximum((best - alpha) / beta, 1.0))


class LaggedReference:
    """A policy that knows the true costs, noise scale and disturbances at the close of a window, but not the future.

    Same delay, grid and bounds as any policy. A reference, not a bound: under change the future can differ.
    """

    def __init__(self, env: ClusterEnv) -> None:
        self.env = env

    def target(self) -> Floats:
        """Real sizes (C, W)."""
        c, slow = self.env.clusters, self.env.slowdown()
        # Means over steps of a maximum of jittered times: the mean stall matters for the best B, jitter hardly.
        slow = slow * (1.0 + c.stall / 8)[:, None]
        base = c.base_batch.astype(np.float64)
        return best_allocation(
            c.alpha * slow, c.beta * slow, c.exchange_s, c.overlap, self.env.true_noise_scale(), base
        )

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        return project(self.target(), bounds, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
