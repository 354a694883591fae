"""Aggregates scores of several seeds to one number and an interval (Agarwal et al. 2021, "statistical precipice")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamix.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An interquartile mean and its bootstrap interval; the interval is NaN for a single seed."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """The estimate for JSON; NaN becomes None."""
        values = {"iqm": self.value, "low": self.low, "high": self.high}
        return {name: value if np.isfinite(value) else None for name, value in values.items()}


def interquartile_mean(scores: ArrayLike) -> float:
    """The mean of the middle half of all scores; a score across a quartile counts in part.

    >>> interquartile_mean([0.0, 1.0, 2.0, 100.0])
    1.5
    >>> interquartile_mean([1.0, 2.0, 3.0])
    2.0
    """
    flat = np.asarray(scores, dtype=np.float64).reshape(-1)
    if not flat.size:
        raise ConfigError("scores", [], "one or more numbers", "pass a score per seed")
    return float(_means(flat[None])[0])


def _means(rows: Floats) -> Floats:
    ordered, count = np.sort(rows, axis=-1), rows.shape[-1]
    ends = np.arange(count)
    weight = np.clip(np.minimum(ends + 1 - count / 4, 3 * count / 4 - ends), 0, 1)
    return np.asarray(ordered @ weight / weight.sum())


def stratified(scores: ArrayLike, *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Interquartile mean of scores (seeds, tasks) or (seeds,); the bootstrap resamples seeds within each task.

    >>> stratified([[1.0, 3.0], [1.0, 3.0]])
    Estimate(value=2.0, low=2.0, high=2.0)
    """
    table = np.asarray(scores, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    centre = interquartile_mean(table)
    if len(table) < 2:
        return Estimate(centre, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(table), size=(resamples, *table.shape))
    means = _means(np.take_along_axis(table[None], drawn, 1).reshape(resamples, -1))
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(centre, float(low), float(high))
