"""Predicts a job under any allocation, fitted online from its windows.

`Goodput` returns the allocation that this model finds best. The guard compares its predictions with measurements, and
the learned policy corrects its answer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError, UsageError
from dynamix.model.costs import WorkerCosts
from dynamix.model.draws import Draws, drawn_log_seconds, drawn_log_step, draws_for, told
from dynamix.model.exchange import Exchange
from dynamix.model.measured import base_total, exposed_seconds, noise_scale, slowest_seconds
from dynamix.model.noise import NoiseByBatch
from dynamix.model.outcome import log_goodput
from dynamix.model.running import Largest, Smoothed
from dynamix.model.split import best_split, split
from dynamix.model.state import merged, nothing, restored, saved
from dynamix.window import Bounds, Floats, Window

CostForm = Literal["tangent", "full"]
UnknownNoise = Literal["none", "base"]
MOST_SPREAD = 2.0
GROUND = 0.1  # nats of evidence about fixed costs that windows must have given


@dataclass(frozen=True, eq=False)
class JobModel:
    """Step time and progress of a job as functions of its sizes, for windows of shape (..., W).

    Immutable: `update` returns the model after a window. Sizes are samples per round and worker, totals their sums.
    Predictions apply to the situation in the last window.

    costs     each worker's time for a batch
    exchange  how long the gradient exchange takes, and how much of it overlaps with computing
    noise     the noise scale at any global batch
    spread    the slowest worker's seconds in a step over the slowest worker's mean
    largest   the largest global batch so far
    base      (...) the base batch; sizes (..., W) and step (...) are those of the last window

    >>> model, sizes = JobModel(), np.array([64, 64])
    >>> for step in (5, 10):
    ...     model = model.update(Window.of(sizes, compute=[0.1, 0.2], wait=0.0, communication=0.1, steps=5, step=step))
    >>> even, better = model.step_s([[64, 64], [90, 38]])
    >>> bool(better < even)
    True
    """

    costs: WorkerCosts = field(default_factory=WorkerCosts)
    exchange: Exchange = field(default_factory=Exchange)
    noise: NoiseByBatch = field(default_factory=NoiseByBatch)
    spread: Smoothed = field(default_factory=lambda: Smoothed(0.3))
    largest: Largest = field(default_factory=Largest)
    base: Floats = field(default_factory=nothing)
    sizes: Floats = field(default_factory=nothing)
    step: Floats = field(default_factory=nothing)

    PARTS: ClassVar[tuple[str, ...]] = ("exchange", "noise", "spread", "largest")
    FIELDS: ClassVar[tuple[str, ...]] = ("base", "sizes", "step")

    # ------------------------------------------------------------ fitting

    def update(self, window: Window) -> JobModel:
        """The model after `window`.

        A window whose `step` is not above the last one's is ignored, for each cluster separately. A window without a
        step never is. If the number of workers changes, costs start over, and facts about the whole job stay.
        """
        newer = self._newer(window)
        if not newer.any():
            return self
        slowest, base = slowest_seconds(window), base_total(window)
        total = window.batch_size.sum(-1).astype(np.float64)
        same_workers = self.sizes.shape == window.batch_size.shape
        known_step = self.step if same_workers else np.full(window.step.shape, np.nan)
        after = JobModel(
            costs=self.costs.update(window),
            exchange=self.exchange.update(slowest, exposed_seconds(window)),
            noise=self.noise.update(noise_scale(window), total / base),
            spread=self.spread.update(_spread(window, slowest)),
            largest=self.largest.update(total, base),
            base=base,
            sizes=window.batch_size.astype(np.float64),
            step=np.where(np.isnan(window.step), known_step, window.step),
        )
        return after if newer.all() else self._merged(newer, after)

    def _newer(self, window: Window) -> np.ndarray:
        """Clusters (...) for which this window is new."""
        if self.sizes.shape != window.batch_size.shape:
            return np.ones(window.step.shape, dtype=bool)
        return np.asarray(~(window.step <= self.step))

    def _merged(self, newer: np.ndarray, after: JobModel) -> JobModel:
        """`after` in the clusters (...) that are `newer`, else this one."""
        parts: dict[str, Any] = {name: merged(newer, getattr(after, name), getattr(self, name)) for name in self.PARTS}
        costs = self.costs.merged(newer, after.costs)
        return merged(newer, dataclasses.replace(after, costs=costs, **parts), self)

    # ------------------------------------------------------------ asking

    def step_s(self, sizes: ArrayLike, *, costs: CostForm = "tangent", quantile: float | None = None) -> Floats:
        """Expected seconds (...) of an optimizer step with `sizes` (..., W); NaN if nothing was measured.

        More leading dimensions give several allocations at once, (K, ..., W) to (K, ...).

        costs      "tangent": the lines that touch the costs at the sizes in force; "full": the costs themselves
        quantile   None: the expected seconds; else the seconds not exceeded with this probability, in (0, 1), by the
                   costs themselves: fixed and per-sample costs may be unknown, and speed and exchange are only known
                   from the past
        """
        return np.asarray(np.exp(self.log_step(sizes, costs=costs, quantile=quantile)))

    def speedup(self, sizes: ArrayLike, *, beside: ArrayLike | None = None, quantile: float | None = None) -> Floats:
        """How many times the samples a second (...) of `beside` the sizes (..., W) bring; NaN if unknown.

        beside     (..., W) None: the sizes in force
        quantile   None: the median; else the speedup that is exceeded with the probability 1 - `quantile`

        Both are predicted in the same worlds, so an error that slows both alike adds no uncertainty. Without
        measurements that separate fixed from per-sample costs (`grounded`), the quantiles lie far apart.
        """
        self._require_a_window()
        each, other = np.asarray(sizes, np.float64), self.sizes if beside is None else np.asarray(beside, np.float64)
        worlds = self._worlds(other) - self._worlds(each)
        with np.errstate(divide="ignore"):
            worlds += np.log(each.sum(-1)) - np.log(other.sum(-1))
        return np.asarray(np.exp(_quantile(worlds, 0.5 if quantile is None else quantile)))

    def log_step(self, sizes: ArrayLike, *, costs: CostForm = "tangent", quantile: float | None = None) -> Floats:
        """The log of `step_s`, the form in which it is estimated: differences of it lose no digits."""
        _one_of("costs", costs, "tangent", "full")
        self._require_a_window()
        if quantile is not None:
            return _quantile(self._worlds(np.asarray(sizes, dtype=np.float64)), quantile)
        each = np.asarray(sizes, dtype=np.float64)
        if costs == "full":
            seconds = self.costs.seconds(np.maximum(each, 0.0), self.base / self.sizes.shape[-1])
        else:
            alpha, beta = self.line
            seconds = np.where(each > 0, alpha + beta * each, 0.0)
        slowest = seconds.max(-1)
        step = self.exchange.log_step((self.stretch * slowest)[..., None])[..., 0]
        return np.where(self.measured & np.isfinite(slowest), step, np.nan)

    def log_waste(self, total: ArrayLike, *, unknown: UnknownNoise = "none") -> Floats:
        """Expected log of how much less a sample teaches in global batches `total` (...) than in the base batch.

        More leading dimensions give several at once.

        unknown   what an unknown noise scale counts as: "none": 0, all samples teach alike; "base": the base batch,
                  because its author found it to be about where more samples stop paying
        """
        self._require_a_window()
        return self._waste(np.asarray(total, dtype=np.float64), self.base, unknown)

    def log_goodput(self, sizes: ArrayLike, *, costs: CostForm = "tangent", unknown: UnknownNoise = "none") -> Floats:
        """Expected log goodput (...) of `sizes` (..., W), up to a constant for each cluster."""
        total = np.asarray(sizes, dtype=np.float64).sum(-1)
        return log_goodput(total, self.log_step(sizes, costs=costs), self.log_waste(total, unknown=unknown))

    def best(self, bounds: Bounds) -> Floats:
        """Real sizes (..., W) within `bounds` of highest expected goodput, by the lines of `step_s`.

        If the noise scale is unknown, the global batch stays and only shares change. If nothing was measured, all sizes
        stay.
        """
        self._require_a_window()
        alpha, beta = self.line
        stretch, base = self.stretch[..., None], self.base

        def of(finish_s: Floats, total: Floats) -> Floats:
            return log_goodput(total, self.exchange.log_step(stretch * finish_s), self.noise.log_waste(total, base))

        best = best_split(alpha, beta, bounds, of)
        if not self.guided.all():
            even_time = split(self.sizes.sum(-1), alpha, beta, bounds)
            best = np.where(self.guided[..., None], best, even_time)
        return np.where(self.measured[..., None], best, self.sizes)

    # ------------------------------------------------------------ what it knows

    @cached_property
    def line(self) -> tuple[Floats, Floats]:
        """alpha (s) and beta (s/sample), (..., W), at the sizes in force; 0 and 1 if no worker was measured."""
        alpha, beta = self.costs.alpha, self.costs.beta
        return np.where(np.isnan(alpha), 0.0, alpha), np.where(np.isnan(beta), 1.0, beta)

    @cached_property
    def measured(self) -> np.ndarray:
        """Clusters (...) in which any worker was ever timed."""
        return np.asarray(np.isfinite(self.costs.beta).all(-1))

    @cached_property
    def guided(self) -> np.ndarray:
        """Clusters (...) with a noise scale; without one no global batch is known to be better than another."""
        return np.asarray(np.isfinite(self.noise.level))

    @cached_property
    def grounded(self) -> np.ndarray:
        """Clusters (...) in which sizes have changed enough to separate fixed costs from the cost of samples.

        In other clusters predictions for other sizes rest on the prior, not on measurements.
        """
        return np.asarray(told(self.costs).max(-1, initial=0.0) > GROUND)

    @cached_property
    def stretch(self) -> Floats:
        """The slowest worker's seconds in a step over the slowest worker's mean (...); 1 if unknown."""
        return np.where(np.isnan(self.spread.log), 1.0, self.spread.value)

    def _worlds(self, sizes: Floats) -> Floats:
        """Log seconds (S, ...) of a step with `sizes` (..., W) in each of S likely worlds; NaN where unknown."""
        draws, even = draws_for(sizes.shape[-1]), self.base / self.sizes.shape[-1]
        each = drawn_log_seconds(self.costs, np.maximum(sizes, 0.0), even, draws)
        now = drawn_log_seconds(self.costs, np.broadcast_to(self.sizes, sizes.shape), even, draws)
        # The slowest of many workers is later the more of them are about as slow. It was measured at the current sizes.
        stretch = np.log(self.stretch) + self._lateness(each, draws) - self._lateness(now, draws)
        slowest = np.maximum(stretch, 0.0) + np.where(np.isnan(each), -np.inf, each).max(-1)
        step = drawn_log_step(self.exchange, slowest, draws)
        step = np.where(np.isnan(step), slowest, step)  # no exchange was measured
        return np.where(self.measured & np.isfinite(slowest), step, np.nan)

    def _lateness(self, logs: Floats, draws: Draws) -> Floats:
        """Log of the mean slowest step over the slowest mean (S, ...), if jitter were the only cause."""
        seconds = np.exp(np.where(np.isnan(logs), -np.inf, logs))
        sd = np.sqrt(np.nan_to_num(self.costs.jitter) * seconds)
        jitter = draws.jitter.reshape(len(draws.jitter), *([1] * (seconds.ndim - 1)), -1)
        late = (seconds + jitter * sd).max(-1).mean(0)
        return np.asarray(np.log(np.maximum(late, 1e-12) / np.maximum(seconds.max(-1), 1e-12)))

    def _waste(self, total: Floats, base: Floats, unknown: UnknownNoise) -> Floats:
        _one_of("unknown", unknown, "none", "base")
        waste = self.noise.log_waste(total[..., None], base)[..., 0]
        instead = 0.0 if unknown == "none" else np.log((base + np.maximum(total, 0.0)) / (2 * base))
        return np.where(np.isnan(waste), instead, waste)

    def _require_a_window(self) -> None:
        if not self.sizes.size:
            raise UsageError("this JobModel has seen no window: ask what `update(window)` returns")

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything fitted, as plain lists."""
        parts = {name: saved(getattr(self, name)) for name in ("costs", *self.PARTS)}
        return {**saved(self), **parts}

    def restored(self, state: dict[str, Any]) -> JobModel:
        """These settings with the state from `state_dict`: it predicts and continues as the saved model would."""
        parts: dict[str, Any] = {name: restored(getattr(self, name), state[name]) for name in self.PARTS}
        return restored(dataclasses.replace(self, costs=self.costs.restored(state["costs"]), **parts), state)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> JobModel:
        """The model with default settings and the state from `state_dict`."""
        return cls().restored(state)


def _quantile(worlds: Floats, quantile: float) -> Floats:
    """Quantile over the first axis; NaN if any world is NaN."""
    if not 0 < quantile < 1:
        raise ConfigError("quantile", quantile, "more than 0, less than 1", "0.1 and 0.9 span what is 80 % sure")
    return np.asarray(np.quantile(worlds, quantile, axis=0))


def _spread(window: Window, slowest: Floats) -> Floats:
    """Seconds of a step's slowest worker over the slowest worker's mean (...), 1 to `MOST_SPREAD`; NaN if unknown."""
    busiest = np.where(np.isnan(window.compute), 0.0, window.compute).max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(busiest > 0, np.minimum(np.maximum(slowest / busiest, 1.0), MOST_SPREAD), np.nan)


def _one_of(name: str, given: str, *allowed: str) -> None:
    if given not in allowed:
        raise ConfigError(name, given, ", ".join(allowed), "use one of these")
