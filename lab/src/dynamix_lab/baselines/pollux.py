"""Pollux's rule: the uniform batch with the highest goodput."""

from typing import Any

import numpy as np

from dynamix.model.exchange import Exchange
from dynamix.model.measured import base_total, exposed_seconds, noise_scale, slowest_seconds
from dynamix.model.outcome import log_goodput
from dynamix.model.state import restored, saved
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix_lab.baselines.least_squares import LeastSquares


class Pollux:
    """The uniform batch with the highest goodput (Pollux, Qiao et al., OSDI 2021, arXiv 2008.12260).

    Step time ((alpha + beta b)^g + exchange^g)^(1/g) is fitted to the windows seen, with b samples for every worker.
    Progress per sample is (phi + B0)/(phi + B). It takes the best of 50 sizes, evenly spaced in log b, from the base
    batch up, if its goodput is `threshold` times the present one. Until it has seen two sizes, half of the time counts
    as fixed. `docs/design/baselines.md` says what is exact and what had to be chosen.

    >>> policy, known = Pollux(), dict(compute=[0.1, 0.1], wait=0.0, communication=0.1, noise=1e4, signal=1.0)
    >>> policy.decide(Window.of([32, 32], **known), Bounds.of(2, 1, 64)).tolist()
    [64, 64]
    """

    even = True

    def __init__(self, *, threshold: float = 1.05, candidates: int = 50) -> None:
        self.threshold, self.candidates = threshold, candidates
        self.computing, self.exchange = LeastSquares(), Exchange(weight=0.0, forget=1.0, jump=np.inf)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        slowest = slowest_seconds(window)
        self.computing = self.computing.update(_size_of_slowest(window), slowest)
        self.exchange = self.exchange.update(slowest, exposed_seconds(window))
        alpha, beta, told = self.computing.solve()
        # Only one size seen: AdaptDL's prior makes larger batches look cheap, so that they are tried.
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
        return log_goodput(totals, step, np.log1p(totals / phi[..., None]))

    def state_dict(self) -> dict[str, Any]:
        return {"computing": saved(self.computing), "exchange": saved(self.exchange)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.computing = restored(self.computing, state["computing"])
        self.exchange = restored(self.exchange, state["exchange"])


def _size_of_slowest(window: Window) -> Floats:
    """Samples (...) of the worker that computes longest; weighted by mean cost if costs are known."""
    at = np.where(np.isnan(window.compute), -np.inf, window.compute).argmax(-1)
    return np.take_along_axis(window.worked, at[..., None], -1)[..., 0]
