"""Rules that model the job: how large a batch still teaches (noise scale), and what it costs (goodput).

`NoiseScale`, `Pollux` and `Cannikin` follow their papers; `Goodput` is ours, made to be hard to beat. What is exact in
each and what had to be chosen is in `docs/design/baselines.md`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamix.model.costs import WorkerCosts
from dynamix.model.fitting import (
    UNKNOWN,
    Exchange,
    Largest,
    LeastSquares,
    NoiseByBatch,
    Smoothed,
    base_total,
    busy_seconds,
    exposed_seconds,
    mean_of_known,
    noise_scale,
    restored,
    saved,
    slowest_seconds,
)
from dynamix.model.split import at_least, at_most, best_split, split
from dynamix.policies.proportional import fill_unknown, speeds
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

# Log of the global batch over the largest that training has met, per optimizer step: the learning rate grows with the batch,
# and a net that is thrown into a rate it never met learns less than AdaScale counts (docs/design/baselines.md).
GROWTH = 0.02
USUAL_STEPS = 10.0  # of a window that does not say
LEAST_GAIN = 0.005  # in log goodput, for which `Goodput` changes sizes at all


class NoiseScale:
    """Equal shares of a global batch that follows the smoothed gradient noise scale, at most `step` times a decision.

    The adaptive batch size of KungFu (Mai et al., OSDI 2020, no arXiv entry) on the noise scale of McCandlish et al.
    (arXiv 1812.06162), where B = noise scale is the balance between few steps and few samples. Speeds play no part.

    >>> policy = NoiseScale()
    >>> policy.decide(Window.of([32, 32], noise=96.0, signal=1.0), Bounds.of(2)).tolist()
    [48, 48]
    """

    def __init__(self, *, weight: float = 0.1, step: float = 2.0) -> None:
        self.step = step
        self.scale = Smoothed(weight)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        phi = self.scale.update(noise_scale(window))
        now = window.batch_size.sum(-1).astype(np.float64)
        total = np.where(np.isnan(phi), now, np.clip(phi, now / self.step, now * self.step))
        return project(np.ones(window.batch_size.shape), bounds, total=total, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return saved(self.scale)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restored(self.scale, state)


class Pollux:
    """The uniform batch of highest goodput (Pollux, Qiao et al., OSDI 2021, arXiv 2008.12260).

    Step time ((alpha + beta b)^g + exchange^g)^(1/g) fitted to the windows seen, b samples for every worker; progress per
    sample (phi + B0)/(phi + B). The best of 50 sizes, evenly spaced in log b, from the base batch up; taken only if its
    goodput is `threshold` times the present one's. As long as one size was seen, half of its time counts as fixed.

    >>> policy = Pollux()
    >>> policy.decide(Window.of([32, 32], compute=[0.1, 0.1], wait=0.0, communication=0.1, noise=1e4, signal=1.0), Bounds.of(2, 1, 64)).tolist()
    [64, 64]
    """

    def __init__(self, *, threshold: float = 1.05, candidates: int = 50) -> None:
        self.threshold, self.candidates = threshold, candidates
        self.computing, self.exchange = LeastSquares(), Exchange(weight=0.0, forget=1.0, jump=np.inf)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        slowest = slowest_seconds(window)
        self.computing.update(_size_of_slowest(window), slowest)
        self.exchange.update(slowest, exposed_seconds(window))
        alpha, beta, told = self.computing.solve()
        # One size seen: AdaptDL's prior, which makes larger batches look cheap and so gets them tried.
        alpha = np.where(told, alpha, 0.5 * beta * _size_of_slowest(window))
        beta = np.where(told, beta, 0.5 * beta)
        phi = noise_scale(window)
        low, high = np.broadcast_arrays(bounds.low, bounds.high, window.batch_size)[:2]
        base = base_total(window) / window.workers
        sizes = np.rint(self._sizes(base, low.min(-1), high.max(-1)) / bounds.quantum) * bounds.quantum
        totals = np.clip(sizes[..., None, :], low[..., None], high[..., None]).sum(-2)
        now = window.batch_size.sum(-1, keepdims=True).astype(np.float64)
        value = self._log_goodput(alpha, beta, phi, sizes, totals)
        present = self._log_goodput(alpha, beta, phi, now / window.workers, now)[..., 0]
        best = value.argmax(-1)[..., None]
        known = np.asarray(np.isfinite(value).all(-1))
        better = known & (np.take_along_axis(value, best, -1)[..., 0] > present + np.log(self.threshold))
        uniform = np.where(better[..., None], np.take_along_axis(sizes, best, -1), now / window.workers)
        return project(np.clip(uniform, low, high), bounds, current=window.batch_size)

    def _sizes(self, base: Floats, low: Ints, high: Ints) -> Floats:
        """Candidate samples per worker (..., K); never below the base batch, as in the paper."""
        start = np.log(np.clip(base, np.maximum(low, 1), high))
        stop = np.log(np.maximum(high, 1).astype(np.float64))
        return np.asarray(np.exp(start[..., None] + (stop - start)[..., None] * np.linspace(0, 1, self.candidates)))

    def _log_goodput(self, alpha: Floats, beta: Floats, phi: Floats, sizes: Floats, totals: Floats) -> Floats:
        step = self.exchange.log_step(alpha[..., None] + beta[..., None] * sizes)
        return np.asarray(np.log(np.maximum(totals, 1e-9)) - step - np.log1p(totals / phi[..., None]))

    def state_dict(self) -> dict[str, Any]:
        return {"computing": saved(self.computing), "exchange": saved(self.exchange)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restored(self.computing, state["computing"])
        restored(self.exchange, state["exchange"])


class Cannikin:
    """Per-worker costs fitted online, the split with equal finishing times, the global batch of highest goodput.

    Cannikin (Nie et al., arXiv 2402.05302). The first window is measured as it comes (equal shares), the second with
    shares by measured speed, because two different sizes tell alpha_i from beta_i; from then on optimal splits. Its
    compute-bound case: a step is the slowest worker's computing plus the part of the exchange that nothing hides. A
    worker whose size hardly moved counts as proportional. `forget` weighs older windows (ours: the paper's clusters
    do not change).

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
        self.computing.update(window.batch_size.astype(np.float64), busy_seconds(window))
        alpha, beta, told = self.computing.solve()
        measured = np.asarray(np.isfinite(beta).any(-1))
        # Like workers get like sizes, which tell nothing; then AdaptDL's prior, as in `Pollux`, gets another batch tried.
        alike = ~told.any(-1, keepdims=True)
        alpha, beta = np.where(alike, 0.5 * beta * window.batch_size, alpha), np.where(alike, 0.5 * beta, beta)
        alpha, beta = _for_all(alpha, beta)
        now = window.batch_size.sum(-1).astype(np.float64)
        if self.windows == 1:
            wish = np.where(measured[..., None], fill_unknown(speeds(window)), np.maximum(window.batch_size, 1e-9))
            return project(wish, bounds, total=now, current=window.batch_size)
        phi, exposed = noise_scale(window), np.nan_to_num(exposed_seconds(window))

        def log_goodput(finish_s: Floats, total: Floats) -> Floats:
            with np.errstate(divide="ignore"):
                step = np.log(finish_s + exposed[..., None])
                return np.asarray(np.log(total) - step - np.log1p(total / phi[..., None]))

        best = best_split(alpha, beta, at_least(bounds, base_total(window)), log_goodput)
        best = np.where(np.isnan(phi)[..., None], split(now, alpha, beta, bounds), best)
        best = np.where(measured[..., None], best, window.batch_size)
        return project(best, bounds, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"computing": saved(self.computing), "windows": self.windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restored(self.computing, state["computing"])
        self.windows = int(state["windows"])


class Goodput:
    """Our strongest rule without learning: Cannikin's choice on estimates that follow a cluster that changes.

    Costs come from `WorkerCosts` (offsets that stay, levels that jump), the exchange and its overlap from `Exchange`, the
    noise scale from `NoiseByBatch`; sizes are those of highest expected goodput with equal
    finishing times, and it grows beyond what training has met only by `GROWTH` a step. That the slowest of many jittering workers is later than the slowest mean is measured too. Without
    a noise scale the global batch stays and only shares move.

    >>> policy, sizes = Goodput(), np.array([64, 64])
    >>> for _ in range(4):
    ...     seconds = np.array([0.1, 0.0]) + np.array([1e-3, 4e-3]) * sizes
    ...     sizes = policy.decide(Window.of(sizes, compute=seconds, compute_std=1e-4, steps=5), Bounds.of(2))
    >>> sizes.tolist()
    [82, 46]
    """

    def __init__(self, *, spread_weight: float = 0.3) -> None:
        self.costs, self.exchange = WorkerCosts(), Exchange()
        self.noise, self.spread = NoiseByBatch(), Smoothed(spread_weight)
        self.largest, self.growing = Largest(), np.asarray(False)
        self.alpha, self.beta, self.stretch = UNKNOWN, UNKNOWN, UNKNOWN

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        return self.kept(window, bounds, project(self.wish(window, bounds), bounds, current=window.batch_size))

    def kept(self, window: Window, bounds: Bounds, sizes: Ints) -> Ints:
        """`sizes`, or those in force where `sizes` promise less than `LEAST_GAIN` more by the last `wish`'s model: a size
        that is new to a worker has its price, in kernels that are chosen or compiled for it. On a slow way up, where each
        step promises little, none is refused."""
        now = window.batch_size
        promised, present = self._promise(window, np.stack([sizes, now]))
        total = now.sum(-1)
        allowed = ((now >= bounds.low) & (now <= bounds.high) & (now % bounds.quantum == 0)).all(-1)
        allowed &= (total >= bounds.total_low) & (total <= bounds.total_high)
        little = allowed & ~self.growing & (promised - present < LEAST_GAIN)
        return np.asarray(np.where(little[..., None], now, sizes))

    def _promise(self, window: Window, sizes: Ints) -> Floats:
        """Expected log goodput (...) of `sizes` (..., W), up to a constant; an unknown noise scale has no part in it."""
        finish = self.stretch * np.where(sizes > 0, self.alpha + self.beta * sizes, 0.0).max(-1)
        total = sizes.sum(-1, keepdims=True).astype(np.float64)
        waste = self.noise.log_waste(total, base_total(window))
        waste = np.where(np.isnan(waste), 0.0, waste)
        value = np.log(np.maximum(total, 1e-9)) - self.exchange.log_step(finish[..., None]) - waste
        return np.asarray(value[..., 0])

    def wish(self, window: Window, bounds: Bounds) -> Floats:
        """The answer as real sizes (..., W), not projected. What it was searched with stays in `alpha` and `beta`
        (..., W) and `stretch` (...), how much later than the slowest mean the slowest worker is."""
        slowest = slowest_seconds(window)
        self.costs.update(window)
        self.exchange.update(slowest, exposed_seconds(window))
        base, now = base_total(window), window.batch_size.sum(-1).astype(np.float64)
        self.noise.update(noise_scale(window), now / base)
        busiest = np.where(np.isnan(window.compute), 0.0, window.compute).max(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = self.spread.update(
                np.where(busiest > 0, np.minimum(np.maximum(slowest / busiest, 1.0), 2.0), np.nan)
            )
        spread = np.where(np.isnan(spread), 1.0, spread)
        alpha, beta = self.costs.at(window)
        measured = np.asarray(np.isfinite(beta).all(-1))
        if not measured.all():
            alpha, beta = _for_all(alpha, beta)

        def log_goodput(finish_s: Floats, total: Floats) -> Floats:
            step = self.exchange.log_step(spread[..., None] * finish_s)
            return np.asarray(np.log(np.maximum(total, 1e-9)) - step - self.noise.log_waste(total, base))

        steps = np.where(np.isnan(window.steps), USUAL_STEPS, np.minimum(window.steps, 500.0))
        reach = self.largest.update(now, base) * np.exp(GROWTH * steps)
        best = best_split(alpha, beta, at_most(bounds, reach), log_goodput)
        unknown = np.isnan(self.noise.level)[..., None]
        if unknown.any():
            best = np.where(unknown, split(now, alpha, beta, bounds), best)
        self.growing = (best.sum(-1) >= 0.99 * reach) & (reach < bounds.total_high)  # it would go further if it might
        self.alpha, self.beta, self.stretch = alpha, beta, spread
        return np.where(measured[..., None], best, window.batch_size)

    _PARTS = ("costs", "exchange", "noise", "spread", "largest")

    def state_dict(self) -> dict[str, Any]:
        return {name: saved(getattr(self, name)) for name in self._PARTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._PARTS:
            if name in state or name != "largest":  # states of before it was kept
                restored(getattr(self, name), state[name])


def _size_of_slowest(window: Window) -> Floats:
    """Samples (...) of the worker that computes longest."""
    at = np.where(np.isnan(window.compute), -np.inf, window.compute).argmax(-1)
    return np.take_along_axis(window.batch_size, at[..., None], -1)[..., 0].astype(np.float64)


def _for_all(alpha: Floats, beta: Floats) -> tuple[Floats, Floats]:
    """Costs without NaN: the mean of the measured workers' for the others, 0 and 1 where nobody was measured."""
    usual_alpha, usual_beta = mean_of_known(alpha)[..., None], mean_of_known(beta)[..., None]
    beta = np.where(np.isnan(beta), np.where(np.isnan(usual_beta), 1.0, usual_beta), beta)
    alpha = np.where(np.isnan(alpha), np.where(np.isnan(usual_alpha), 0.0, usual_alpha), alpha)
    return alpha, beta
