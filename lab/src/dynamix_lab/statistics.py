"""How runs are compared: time to target with censoring, ratios of pairs, bootstrap intervals. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynamix.errors import ConfigError
from dynamix.window import Floats


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio (geometric mean of pairs) with a bootstrap interval; `low` and `high` are NaN for a single pair."""

    median: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """For JSON; NaN becomes None."""
        values = {"median": self.median, "low": self.low, "high": self.high}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def time_to_target(times_s: Sequence[float], scores: Sequence[float], target: float) -> float | None:
    """When a run reached `target`: the first of two consecutive snapshots at or above it, interpolated; else None.

    times_s, scores   of the snapshots, oldest first. One snapshot above followed by one below does not count (noise),
    nor does a last one that nothing follows. The crossing is interpolated between the first of the two and the snapshot
    before it, if that lies below.

    >>> time_to_target([1.0, 2.0, 3.0], [0.8, 1.0, 0.95], 0.9)
    1.5
    >>> time_to_target([1.0, 2.0, 3.0], [0.8, 1.0, 0.85], 0.9) is None
    True
    """
    if len(times_s) != len(scores):
        raise ConfigError("scores", len(scores), f"{len(times_s)}, one per time", "pass one score per snapshot")
    for i in range(len(scores) - 1):
        if scores[i] >= target and scores[i + 1] >= target:
            return _crossing(times_s, scores, i, target)
    return None


def _crossing(times_s: Sequence[float], scores: Sequence[float], i: int, target: float) -> float:
    if i == 0 or scores[i - 1] >= target:
        return float(times_s[i])
    part = (target - scores[i - 1]) / (scores[i] - scores[i - 1])
    return float(times_s[i - 1] + part * (times_s[i] - times_s[i - 1]))


def censored(times_s: Sequence[float | None], bound_s: Sequence[float]) -> Floats:
    """Times with every run that did not arrive, or arrived later, counted as arriving at its bound: never dropped.

    >>> censored([3.0, None, 9.0], [8.0, 8.0, 8.0]).tolist()
    [3.0, 8.0, 8.0]
    """
    bounds = np.asarray(bound_s, dtype=np.float64)
    times = np.array([math.inf if t is None else t for t in times_s], dtype=np.float64)
    return np.asarray(np.minimum(times, bounds))


def geometric_mean(values: Sequence[float] | Floats) -> float:
    """The geometric mean of positive numbers.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or not (numbers > 0).all():
        raise ConfigError(
            "values", numbers.tolist(), "one or more positive numbers", "leave out nothing, censor instead"
        )
    return float(np.exp(np.log(numbers).mean()))


def paired_ratio(
    numerator: Mapping[str, Sequence[float]] | Sequence[float],
    denominator: Mapping[str, Sequence[float]] | Sequence[float],
    *,
    resamples: int = 4000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Geometric mean of numerator[i] / denominator[i] over pairs, with a hierarchical bootstrap interval.

    Given mappings (scenario -> pairs) scenarios are resampled first, then pairs inside each drawn scenario, and every
    scenario weighs the same; given plain sequences only pairs are resampled. Deterministic for a seed.

    >>> paired_ratio([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    Interval(median=0.5, low=0.5, high=0.5)
    """
    above = dict(numerator) if isinstance(numerator, Mapping) else {"": numerator}
    below = dict(denominator) if isinstance(denominator, Mapping) else {"": denominator}
    if above.keys() != below.keys() or any(len(above[k]) != len(below[k]) for k in above):
        raise ConfigError("pairs", "unequal lengths", "the same scenarios and numbers of runs", "pair runs by seed")
    groups = [_log_ratios(above[name], below[name]) for name in sorted(above)]
    centre = float(np.exp(np.mean([g.mean() for g in groups])))
    if sum(len(g) for g in groups) < 2:
        return Interval(centre, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    draws = np.empty(resamples)
    for i in range(resamples):
        chosen = rng.integers(len(groups), size=len(groups))
        draws[i] = np.mean([groups[g][rng.integers(len(groups[g]), size=len(groups[g]))].mean() for g in chosen])
    tail = (1 - confidence) / 2
    low, high = np.exp(np.quantile(draws, [tail, 1 - tail]))
    return Interval(centre, float(low), float(high))


def _log_ratios(above: Sequence[float], below: Sequence[float]) -> Floats:
    top, bottom = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    if top.size == 0 or not ((top > 0) & (bottom > 0)).all():
        raise ConfigError("times", top.tolist(), "one or more positive numbers", "censor runs that did not arrive")
    return np.asarray(np.log(top) - np.log(bottom))


def balanced_order(names: Sequence[str], seed: int) -> list[str]:
    """An order of `names` for this seed, a row of a Williams design: in n consecutive seeds each name takes each place once.

    In n seeds from a multiple of n on, n even, each name also comes right after each other one once; odd n need 2 n seeds from
    a multiple of 2 n on, for twice, and n of them give each name two others to follow.

    A run may find its machine as the run before left it, so who comes after whom is balanced too.

    >>> sorted(balanced_order(["a", "b", "c"], s)[0] for s in range(3))
    ['a', 'b', 'c']
    """
    n = len(names)
    if not n:
        return []
    block, row = divmod(seed, n)
    odd = n % 2 == 1
    shuffled = np.random.default_rng(block // 2 if odd else block).permutation(n)
    zigzag = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]
    places = [(place + row) % n for place in zigzag]
    return [names[shuffled[place]] for place in (reversed(places) if odd and block % 2 else places)]
