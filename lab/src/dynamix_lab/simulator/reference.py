"""References: policies that know the true costs. They are no bounds: if a policy beats them, this is reported.

`lagged` knows the true state when the window closed, `hedged` also the probabilities of changes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix_lab.simulator.compute import Costs
from dynamix_lab.simulator.disturbances import Slowdowns
from dynamix_lab.simulator.env import ClusterEnv
from dynamix_lab.simulator.network import step_time

Gain = Callable[[Floats], Floats]
_GRID = np.exp(np.linspace(np.log(0.15), np.log(8.0), 48))


def best_allocation(
    costs: Costs, factor: Floats, exchange_s: Floats, overlap: Floats, gain: Gain, base: Floats, high: Floats
) -> Floats:
    """Real sizes (C, W) with the highest goodput: equal finishing times, B by search over a grid.

    factor (C, W) slows computing, `gain` gives progress per sample at global batches (C, K), `high` (C, W) caps sizes.
    Affine costs have b_i = (T - alpha_i)/beta_i (arXiv 2402.05302); others the largest size that finishes within T.
    """
    candidates = _candidates(costs, factor, base, high)
    total = candidates.sum(1)
    slowest = (costs.seconds(candidates) * factor[..., None]).max(1)
    whole = step_time(slowest, exchange_s[:, None], overlap[:, None])
    goodput = total / whole * gain(total)
    return np.asarray(np.take_along_axis(candidates, goodput.argmax(-1)[:, None, None], -1)[..., 0])


def _candidates(costs: Costs, factor: Floats, base: Floats, high: Floats) -> Floats:
    """(C, W, K) sizes with equal finishing times, for global batches around `_GRID` times the base batch."""
    alpha, beta = costs.alpha * factor, costs.beta * factor
    total = base[:, None] * _GRID
    finish = (total + (alpha / beta).sum(-1, keepdims=True)) / (1 / beta).sum(-1, keepdims=True)
    return costs.within(finish, factor, high)


class LaggedReference:
    """A policy that knows the true costs, noise scale and disturbances when a window closes, but not the future."""

    def __init__(self, env: ClusterEnv) -> None:
        self.env = env

    def target(self) -> Floats:
        """Real sizes (C, W)."""
        return self._best(self.env.expected(), self.env.exchange())

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        return project(self.target(), bounds, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def _best(self, slow: Floats, exchange_s: Floats) -> Floats:
        env, (base, high) = self.env, self._sizes()
        return best_allocation(env.costs, slow, exchange_s, env.clusters.overlap, env.gain, base, high)

    def _sizes(self) -> tuple[Floats, Floats]:
        """Base batch (C,) and largest sizes (C, W)."""
        c, high = self.env.clusters, np.asarray(self.env.bounds.high, np.float64)
        return c.base_batch.astype(np.float64), np.broadcast_to(high, c.shape)


class HedgedReference(LaggedReference):
    """Highest goodput averaged over sampled next windows, given the true state and the true probabilities of change.

    Equal times make every worker critical. With many workers one is nearly always late, so sizes between equal shares
    and equal times lose less. Candidates: the lagged reference's sizes for every B of a grid, with slowdowns raised to
    the powers `softness`.
    """

    def __init__(self, env: ClusterEnv, *, samples: int = 16, softness: tuple[float, ...] = (0, 0.4, 0.7, 1)) -> None:
        super().__init__(env)
        self.samples, self.softness = samples, softness
        self._rng = np.random.default_rng([env.seed, 4242])
        self._clock_s = env.clock_s

    def target(self) -> Floats:
        env, c = self.env, self.env.clusters
        base, high = self._sizes()
        now, lasts = env.expected(), np.maximum(env.clock_s - self._clock_s, 1e-3)
        self._clock_s = env.clock_s
        sizes = np.concatenate([_candidates(env.costs, now**power, base, high) for power in self.softness], -1)
        undisturbed, total = env.costs.seconds(sizes), sizes.sum(1)
        gained, sd = total * env.gain(total), c.jitter_sd[..., None]
        goodput = np.zeros_like(gained)
        for _ in range(self.samples):
            slow = sampled_slowdown(env.slowdowns, lasts, self._rng) * now / env.slowdowns.factor
            times = undisturbed * slow[..., None] * np.maximum(1 + sd * self._rng.normal(size=(*c.shape, 1)), 0.3)
            goodput += gained / step_time(times.max(1), env.exchange()[:, None], c.overlap[:, None])
        return np.asarray(np.take_along_axis(sizes, goodput.argmax(-1)[:, None, None], -1)[..., 0])


def sampled_slowdown(process: Slowdowns, lasts_s: Floats, rng: np.random.Generator) -> Floats:
    """Factors (C, W) at a random moment in the next `lasts_s` (C,) seconds, given the present ones."""
    elapsed = lasts_s[:, None] * rng.random(process.factor.shape)
    on = process.episode % np.uint64(2) == 1
    change = rng.random(process.factor.shape) > np.exp(-elapsed / np.where(on, process.mean_on_s, process.mean_off_s))
    spread = np.log(np.maximum(process.strongest / process.weakest, 1.0))
    fresh = process.weakest * np.exp(spread * rng.random(process.factor.shape))
    return np.where(change, np.where(on, 1.0, fresh), process.factor)
