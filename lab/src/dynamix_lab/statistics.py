"""Compares runs: time to target with censoring, ratios and differences of pairs, and their intervals. Pure functions.

Every interval is at 95 % by default. It is Student's t for fewer than `FEW` values, else a percentile bootstrap
(`scipy.stats`), because few values say too little about their tails for resampling. If pairs come from several
scenarios, the scenarios are the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from dynamix.errors import ConfigError
from dynamix.window import Floats

FEW = 30
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio with its interval. `median` is the geometric mean of the pairs; `low` and `high` are NaN for a single
    pair.
    """

    median: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """The interval as JSON; NaN becomes None."""
        values = {"median": self.median, "low": self.low, "high": self.high}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def time_to_target(times_s: Sequence[float], scores: Sequence[float], target: float) -> float | None:
    """When a run reached `target`: the first of two consecutive snapshots at or above it, interpolated; else None.

    times_s, scores   of the snapshots, oldest first. A snapshot above the target counts only if the next one is above
    it, too (noise), so the last one alone does not. The crossing is interpolated between the first of the two and the
    snapshot before it, if that is below.

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
    """Times in which every run that did not arrive, or arrived later, counts as arriving at its bound. None is dropped.

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


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean with its interval; `low` and `high` are NaN for a single value."""

    mean: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """The interval as JSON; NaN becomes None."""
        values = {"mean": self.mean, "low": self.low, "high": self.high}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def mean_interval(
    values: Sequence[float] | Floats, *, resamples: int = RESAMPLES, confidence: float = 0.95, seed: int = 0
) -> MeanInterval:
    """The mean of independent values and its interval: Student's t below `FEW` values, else a percentile bootstrap.

    Deterministic for a seed. Raises `ConfigError` without values.

    >>> found = mean_interval([0.01, 0.03])
    >>> [round(x, 4) for x in (found.mean, found.low, found.high)]
    [0.02, -0.1071, 0.1471]
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not numbers.size:
        raise ConfigError("values", [], "one or more numbers", "pass what was measured")
    mean = float(numbers.mean())
    if len(numbers) < 2:
        return MeanInterval(mean, math.nan, math.nan)
    if len(numbers) < FEW:
        half = float(stats.t.ppf((1 + confidence) / 2, len(numbers) - 1) * stats.sem(numbers))
        return MeanInterval(mean, mean - half, mean + half)
    drawn = stats.bootstrap(
        (numbers,),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return MeanInterval(mean, float(drawn.low), float(drawn.high))


def paired_ratio(
    numerator: Mapping[str, Sequence[float]] | Sequence[float],
    denominator: Mapping[str, Sequence[float]] | Sequence[float],
    *,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Geometric mean of numerator[i] / denominator[i] over pairs, with an interval on the logarithms.

    For plain sequences the interval is that of `mean_interval` over pairs. For mappings (scenario -> pairs) every
    scenario has the same weight, and the interval is that of `mean_interval` over the scenarios' means: scenarios are
    what varies, however many pairs each has. Deterministic for a seed.

    >>> paired_ratio([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    Interval(median=0.5, low=0.5, high=0.5)
    """
    above = dict(numerator) if isinstance(numerator, Mapping) else {"": numerator}
    below = dict(denominator) if isinstance(denominator, Mapping) else {"": denominator}
    if above.keys() != below.keys() or any(len(above[k]) != len(below[k]) for k in above):
        raise ConfigError("pairs", "unequal lengths", "the same scenarios and numbers of runs", "pair runs by seed")
    groups = [_log_ratios(above[name], below[name]) for name in sorted(above)]
    logs = groups[0] if len(groups) == 1 else np.array([group.mean() for group in groups])
    found = mean_interval(logs, resamples=resamples, confidence=confidence, seed=seed)
    return Interval(*(float(np.exp(x)) for x in (found.mean, found.low, found.high)))


def _log_ratios(above: Sequence[float], below: Sequence[float]) -> Floats:
    top, bottom = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    if top.size == 0 or not ((top > 0) & (bottom > 0)).all():
        raise ConfigError("times", top.tolist(), "one or more positive numbers", "censor runs that did not arrive")
    return np.asarray(np.log(top) - np.log(bottom))


@dataclass(frozen=True, slots=True)
class Winner:
    """The best row of a table, and those that may be as good.

    best     the row with the lowest geometric mean
    level    the others whose ratio to it has an interval that includes 1, best first
    ratios   every other row over the best, best first; the intervals hold jointly, not one by one
    """

    best: str
    level: tuple[str, ...]
    ratios: dict[str, Interval]


def who_wins(rows: Mapping[str, Sequence[float]], *, confidence: float = 0.95) -> Winner:
    """The best of several rows, and those that these pairs cannot distinguish from it.

    rows         seconds by row (less is better), entry i of each from pair i; runs that did not arrive are censored
    confidence   that all intervals hold at once: each has the width that Bonferroni requires

    A row is level with the best if its interval includes 1; with a single pair all are.
    Raises `ConfigError` without rows and for unequal numbers of pairs.

    >>> found = who_wins({"static": [9.0, 9.9, 9.5], "local": [5.0, 5.4, 5.2], "dynamix": [5.1, 5.3, 5.3]})
    >>> found.best, found.level
    ('local', ('dynamix',))
    """
    if not rows:
        raise ConfigError("rows", [], "one or more", "pass the times of each row")
    ranked = sorted(rows, key=lambda name: geometric_mean(rows[name]))
    best, each = ranked[0], 1 - (1 - confidence) / max(1, len(rows) - 1)
    ratios = {name: paired_ratio(rows[name], rows[best], confidence=each) for name in ranked[1:]}
    return Winner(best, tuple(name for name, ratio in ratios.items() if not ratio.low > 1), ratios)


def balanced_order(names: Sequence[str], seed: int) -> list[str]:
    """An order of `names` for this seed, a row of a Williams design: in n consecutive seeds each name has each place
    once.

    For even n, in n seeds from a multiple of n on, each name also directly follows each other one once. For odd n it
    does so twice in 2 n seeds from a multiple of 2 n on; in n of these each name follows only two others.

    A run may find its machine as the previous run left it, so the order of neighbours is balanced, too.

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
