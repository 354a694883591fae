"""How far a run has come, whatever its batch sizes: held-out loss, read on one reference curve of the job.

Samples of unlike runs teach unlike amounts, so runs are not compared by samples. A `ProgressCurve` says after how many
samples the reference (static at its best batch and learning rate) had which held-out loss. The loss of any run then
reads as *equivalent samples*: those that the reference needed for it. Every row of a table is read on the same curve.

    curve = ProgressCurve.of("mnist1d", runs_of_the_reference, about={"batch": 128, "learning_rate": 0.1})
    read = curve.read(times_s, losses)
    read.seconds_per_1000(to_s=60.0), read.at(60.0), time_to_loss(times_s, losses, 0.4)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from dynamix.errors import ConfigError
from dynamix.window import Floats
from dynamix_lab.statistics import time_to_target

POINTS = 64  # of a curve at most: snapshots that lie closer are averaged
NEAR = 0.15  # of a clock time: snapshots within it say together what the score was then
FEW_NEAR = 3  # with fewer near ones, the score is interpolated
GRID = 200  # clock times at which a slope is fitted, so that it does not depend on how often a run was scored


@dataclass(frozen=True, slots=True)
class ProgressCurve:
    """Held-out loss against samples of a job's reference, falling at every point.

    job       what is trained, for people and for checks
    samples   that the reference had trained on, rising
    losses    held-out loss there, falling
    about     settings of the reference (batch, learning rate, seeds), kept with the curve
    """

    job: str
    samples: tuple[float, ...]
    losses: tuple[float, ...]
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `ConfigError` for fewer than two points, and for points that do not rise and fall."""
        rising, falling = np.diff(self.samples), np.diff(self.losses)
        if len(self.samples) != len(self.losses) or len(self.samples) < 2:
            given = (len(self.samples), len(self.losses))
            raise ConfigError("curve", given, "two or more points", "train the reference until its loss falls")
        if not (self.samples[0] > 0 and (rising > 0).all() and (falling < 0).all()):
            raise ConfigError("curve", self.job, "rising samples above 0, falling losses", "make it with of()")

    @classmethod
    def of(
        cls, job: str, runs: Sequence[Sequence[tuple[float, float]]], *, about: Mapping[str, Any] | None = None
    ) -> ProgressCurve:
        """The curve of `runs` of the reference, one for each tuning seed: pairs (samples, held-out loss), any order.

        It is their mean over the range that all of them cover, made monotone by isotonic regression. Neighbours that
        the regression levels become one point. Snapshots before the first sample are left out.

        Raises `ConfigError` without runs, for losses that are no numbers, and where the loss does not fall.

        >>> curve = ProgressCurve.of("job", [[(100, 2.0), (1000, 1.0)], [(100, 2.2), (1000, 1.0)]])
        >>> [round(loss, 3) for loss in curve.losses]
        [2.1, 1.0]
        """
        points = [np.array(sorted(p for p in run if p[0] > 0), dtype=np.float64) for run in runs]
        if not points or not all(len(run) and np.isfinite(run).all() for run in points):
            raise ConfigError("runs", len(runs), "one or more, with finite losses", "score the reference's snapshots")
        low, high = max(run[0, 0] for run in points), min(run[-1, 0] for run in points)
        every = np.unique(np.concatenate([run[:, 0] for run in points]))
        at = np.log(every[(every >= low) & (every <= high)])
        if not at.size:
            raise ConfigError("runs", (low, high), "runs over a common range of samples", "train all seeds as long")
        loss = np.mean([np.interp(at, np.log(run[:, 0]), run[:, 1]) for run in points], axis=0)
        at, loss = _falling(*_averaged(at, loss))
        return cls(job, tuple(np.exp(at).tolist()), tuple(loss.tolist()), dict(about or {}))

    def samples_of(self, loss: float) -> float:
        """Equivalent samples of a loss, interpolated in their logarithm; clamped to the curve's ends.

        >>> round(ProgressCurve("job", (100.0, 10_000.0), (2.0, 1.0)).samples_of(1.5))
        1000
        """
        return float(self._samples(np.array([loss]))[0])

    def read(self, times_s: Sequence[float], losses: Sequence[float]) -> RunProgress:
        """A run's snapshots on this curve: held-out losses and when they were reached on the run's clock, in order.

        Raises `ConfigError` for unequal lengths, none, times that do not rise, and losses that are no numbers. (A run
        that diverged has an infinite loss: that reads as the curve's begin.)
        """
        found = np.asarray(losses, dtype=np.float64)
        if len(times_s) != len(found) or not len(found) or np.isnan(found).any():
            allowed = f"{len(times_s)} numbers, one for each time"
            raise ConfigError("losses", len(found), allowed, "pass one loss for each snapshot")
        if (np.diff(times_s) <= 0).any():
            raise ConfigError("times_s", list(times_s), "rising times", "pass snapshots in the order of their clock")
        before, after = int((found > self.losses[0]).sum()), int((found < self.losses[-1]).sum())
        return RunProgress(np.asarray(times_s, dtype=np.float64), self._samples(found), before, after)

    def _samples(self, losses: Floats) -> Floats:
        return np.asarray(np.exp(np.interp(-losses, -np.asarray(self.losses), np.log(self.samples))))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> ProgressCurve:
        """The inverse of `to_dict`."""
        return cls(entry["job"], tuple(entry["samples"]), tuple(entry["losses"]), dict(entry["about"]))


@dataclass(frozen=True, slots=True)
class RunProgress:
    """One run as a curve reads it.

    times_s   of its snapshots on the run's clock, rising
    samples   equivalent samples at each, clamped to the curve
    before    snapshots whose loss was above the curve's first: they count as its first
    after     snapshots whose loss was below its last: they count as its last, and hide what the run gained there
    """

    times_s: Floats
    samples: Floats
    before: int
    after: int

    def at(self, time_s: float) -> float:
        """Equivalent samples at a clock time; NaN where the run has no snapshot at or after it, or none before.

        The line through the snapshots within 15 % of `time_s`, so that one score's noise is averaged. Where fewer than
        three lie there, and where all lie on one side, it is interpolated between the two beside `time_s`.
        """
        times, samples = self.times_s, self.samples
        if not times[0] <= time_s <= times[-1]:
            return math.nan
        near = np.abs(times - time_s) <= NEAR * time_s
        chosen = times[near]
        if near.sum() < FEW_NEAR or not chosen[0] <= time_s <= chosen[-1] or chosen[0] == chosen[-1]:
            return float(np.interp(time_s, times, samples))
        return float(np.polyval(np.polyfit(chosen - time_s, samples[near], 1), 0.0))

    def seconds_per_1000(self, to_s: float, from_s: float = 0.0) -> float:
        """Seconds per 1,000 equivalent samples between two clock times, the same two for every row.

        The slope of equivalent samples over time, by least squares on an even grid of clock times. From 0 the line
        passes through the origin, where every run has trained on nothing; that scatters about a third as much as a free
        slope. NaN where the last snapshot lies before `to_s`, or where nothing was gained.

        Raises `ConfigError` unless 0 <= from_s < to_s.
        """
        if not 0 <= from_s < to_s:
            raise ConfigError("from_s", from_s, f"0 to {to_s}", "choose clock times that every row reaches")
        if self.times_s[-1] < to_s or (from_s > 0 and self.times_s[0] > from_s):
            return math.nan
        known = self.times_s > 0  # the line through the origin needs no score of untrained weights
        grid = np.linspace(max(from_s, self.times_s[known][0]), to_s, GRID)
        at = np.interp(grid, self.times_s[known], self.samples[known])
        if from_s > 0:
            grid, at = grid - grid.mean(), at - at.mean()
        slope = float((grid * at).sum() / (grid * grid).sum())
        return 1000.0 / slope if slope > 0 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        points = {"times_s": self.times_s.tolist(), "samples": self.samples.tolist()}
        return {**points, "before": self.before, "after": self.after}


def time_to_loss(times_s: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """`time_to_target` for a score that falls: when a run's held-out loss was at or below `target` twice in a row.

    >>> time_to_loss([1.0, 2.0, 3.0], [1.0, 0.5, 0.4], 0.75)
    1.5
    """
    return time_to_target(times_s, [-loss for loss in losses], -target)


def _averaged(at: Floats, loss: Floats) -> tuple[Floats, Floats]:
    """Means of at most `POINTS` cells of equal width; every point stays what it is where there are no more."""
    if len(at) <= POINTS:
        return at, loss
    cell = np.minimum((POINTS * (at - at[0]) / (at[-1] - at[0])).astype(int), POINTS - 1)
    count = np.bincount(cell, minlength=POINTS)
    held = count > 0
    means = [np.bincount(cell, weights=values, minlength=POINTS)[held] / count[held] for values in (at, loss)]
    return means[0], means[1]


def _falling(at: Floats, loss: Floats) -> tuple[Floats, Floats]:
    """The nearest falling curve, a level stretch of it being one point in its middle."""
    fitted = isotonic_regression(loss, increasing=False)
    cuts = fitted.blocks
    middles = [float(at[a:b].mean()) for a, b in pairwise(cuts)]
    return np.asarray(middles), np.asarray(fitted.x[cuts[:-1]])
