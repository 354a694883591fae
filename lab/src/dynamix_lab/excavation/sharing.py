"""The result of an excavation, and how unequally its agents shared the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamix.errors import ConfigError

Floats = NDArray[np.float64]


def gini(work: ArrayLike) -> Floats:
    """Inequality of work (..., N): sum_ij |x_i - x_j| / (2 N^2 mean x), 0 (equal) to 1 - 1/N (one does all).

    NaN if no agent did any work. Raises `ConfigError` for negative work.

    >>> float(gini([1.0, 1.0, 1.0])), float(gini([0.0, 0.0, 0.0, 4.0]))
    (0.0, 0.75)
    """
    x = _work(work)
    apart = np.abs(x[..., :, None] - x[..., None, :]).sum((-1, -2))
    total = 2 * x.shape[-1] * x.sum(-1)
    return np.asarray(np.divide(apart, total, out=np.full(np.shape(total), np.nan), where=total > 0))


def lorenz(work: ArrayLike) -> Floats:
    """The Lorenz curve of work (..., N): share of all work by the k least busy agents, k = 0 to N; shape (..., N + 1).

    >>> lorenz([3.0, 1.0]).tolist()
    [0.0, 0.25, 1.0]
    """
    x = np.sort(_work(work), axis=-1)
    summed = np.concatenate([np.zeros((*x.shape[:-1], 1)), x.cumsum(-1)], axis=-1)
    total = np.broadcast_to(summed[..., -1:], summed.shape)
    return np.asarray(np.divide(summed, total, out=np.full(summed.shape, np.nan), where=total > 0))


def correlation(first: ArrayLike, second: ArrayLike) -> float | None:
    """The mean over worlds of Pearson's correlation over agents (B, N); None if no world has one (`correlations`).

    >>> correlation([[0, 1, 2], [1, 1, 1]], [[0, 2, 4], [1, 2, 3]])
    1.0
    """
    by_world = correlations(first, second)
    known = np.isfinite(by_world)
    return float(by_world[known].mean().round(12)) if known.any() else None


def correlations(first: ArrayLike, second: ArrayLike) -> Floats:
    """Pearson's correlation over agents (..., N), by world (...); NaN if either is the same for all agents."""
    a, b = (x - x.mean(-1, keepdims=True) for x in (_work(first), _work(second)))
    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.asarray(np.divide((a * b).sum(-1), size, out=np.full(np.shape(size), np.nan), where=size > 0))


def _work(work: ArrayLike) -> Floats:
    x = np.asarray(work, dtype=np.float64)
    if x.ndim < 1 or x.shape[-1] < 1 or not (x >= 0).all():
        raise ConfigError("work", x.tolist(), "one or more numbers, 0 or more", "pass what each agent did")
    return x


@dataclass(frozen=True, slots=True)
class WorkShares:
    """The work of N agents in each of B worlds: arrays (B, N), over `steps` steps.

    delivered    pellets brought to the nest
    collisions   moves that another agent blocked
    bumps        moves that rock blocked
    reward       undiscounted sum
    early        part of `delivered` in the first half of a horizon
    """

    steps: int
    delivered: NDArray[np.int64]
    collisions: NDArray[np.int64]
    bumps: NDArray[np.int64]
    reward: Floats
    early: NDArray[np.int64]

    def summary(self) -> dict[str, Any]:
        """Means over worlds: reward per agent; pellets, collisions, bumps of all per 1,000 steps; Gini; Lorenz curve.

        "halves" is the correlation, over a world's agents, of their deliveries in the first half and in the second:
        near 1 if a division of labour lasts. Worlds without a delivery do not count for Gini and Lorenz curve, worlds
        without a correlation do not count for "halves". A value is None if no world counts.
        """
        per_1000 = 1000.0 / max(self.steps, 1)
        busy = self.delivered[self.delivered.sum(-1) > 0]
        return {
            "reward": float(self.reward.mean()),
            "pellets_per_1000": float(self.delivered.sum(-1).mean() * per_1000),
            "collisions_per_1000": float(self.collisions.sum(-1).mean() * per_1000),
            "bumps_per_1000": float(self.bumps.sum(-1).mean() * per_1000),
            "halves": correlation(self.early, self.delivered - self.early),
            "gini": float(gini(busy).mean()) if len(busy) else None,
            "lorenz": lorenz(busy).mean(0).tolist() if len(busy) else None,
        }
