"""A run of any length in a bounded number of bins, while it is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dynamix.window import Floats

MOST_BINS = 480


class BinnedSeries:
    """Means of what was seen window by window, and the least and greatest of what a cluster has one number for.

    A bin holds 2^n windows; when there are too many bins, each pair becomes one. So memory and what a page shows do
    not grow with the run. Means weigh windows by their steps. Unknown values (NaN) count nothing.

    single   names of numbers of the cluster, each     names of numbers of every worker
    most     bins at most

    >>> series = BinnedSeries(["loss"], ["size"], workers=1, most=2)
    >>> for second in range(5):
    ...     series.add(second, second + 1.0, 1.0, {"loss": 5.0 - second}, {"size": [8.0 * second]})
    >>> series.mean("loss").tolist(), series.greatest("loss").tolist(), series.each("size").tolist()
    ([3.5, 1.0], [5.0, 1.0], [[12.0, 32.0]])
    """

    def __init__(self, single: Sequence[str], each: Sequence[str], workers: int, most: int = MOST_BINS) -> None:
        self.single, self.names, self.most = tuple(single), tuple(each), most + most % 2
        self.workers = workers
        self.width = 1  # windows of a full bin
        self.bins = 0
        self._in_last = 0
        self._times = np.zeros((self.most, 2))
        self._sums = np.zeros((2, len(self.single), self.most))  # of weights times values, of weights
        self._ends = np.full((2, len(self.single), self.most), np.nan)
        self._each = np.zeros((2, len(self.names), self.most, workers), np.float32)
        self.totals = np.zeros((len(self.names), workers))  # of weights times values, over the whole run
        self.weights = np.zeros((len(self.names), workers))

    def add(
        self,
        begin_s: float,
        end_s: float,
        weight: float,
        single: Mapping[str, float],
        each: Mapping[str, Floats | Sequence[float]],
    ) -> None:
        """A window from `begin_s` to `end_s`. Names that are left out are unknown."""
        if self.bins == 0 or self._in_last == self.width:
            if self.bins == self.most:
                self._halve()
            self._times[self.bins] = begin_s, end_s
            self.bins, self._in_last = self.bins + 1, 0
        at = self.bins - 1
        self._in_last += 1
        self._times[at, 1] = end_s
        values = np.array([single.get(name, np.nan) for name in self.single], dtype=np.float64)
        known = np.isfinite(values)
        self._sums[0, known, at] += weight * values[known]
        self._sums[1, known, at] += weight
        self._ends[0, :, at] = np.fmin(self._ends[0, :, at], np.where(known, values, np.nan))
        self._ends[1, :, at] = np.fmax(self._ends[1, :, at], np.where(known, values, np.nan))
        for i, name in enumerate(self.names):
            if name in each:
                row = np.asarray(each[name], dtype=np.float64)
                there = np.isfinite(row)
                part = np.where(there, weight * row, 0.0)
                self._each[0, i, at, : row.size] += part
                self._each[1, i, at, : row.size] += weight * there
                self.totals[i, : row.size] += part
                self.weights[i, : row.size] += weight * there

    def widen(self, workers: int) -> None:
        """Make room for more workers; what they did before is unknown."""
        more = workers - self.workers
        if more > 0:
            self._each = np.pad(self._each, ((0, 0), (0, 0), (0, 0), (0, more)))
            self.totals = np.pad(self.totals, ((0, 0), (0, more)))
            self.weights = np.pad(self.weights, ((0, 0), (0, more)))
            self.workers = workers

    @property
    def begins_s(self) -> Floats:
        """(bins,) seconds at which they begin."""
        return self._times[: self.bins, 0]

    @property
    def ends_s(self) -> Floats:
        """(bins,) seconds at which they end."""
        return self._times[: self.bins, 1]

    def mean(self, name: str) -> Floats:
        """(bins,) of a number of the cluster; NaN where it is unknown."""
        total, weight = self._sums[:, self.single.index(name), : self.bins]
        return _over(total, weight)

    def least(self, name: str) -> Floats:
        """(bins,) the least value of a window."""
        return self._ends[0, self.single.index(name), : self.bins]

    def greatest(self, name: str) -> Floats:
        """(bins,) the greatest value of a window."""
        return self._ends[1, self.single.index(name), : self.bins]

    def each(self, name: str) -> Floats:
        """(W, bins) means of a number of every worker; NaN where it is unknown."""
        total, weight = self._each[:, self.names.index(name), : self.bins]
        return _over(total.T.astype(np.float64), weight.T.astype(np.float64))

    def overall(self, name: str) -> Floats:
        """(W,) means over the whole run."""
        at = self.names.index(name)
        return _over(self.totals[at], self.weights[at])

    def _halve(self) -> None:
        half = self.most // 2
        self._times[:half, 0], self._times[:half, 1] = self._times[0::2, 0].copy(), self._times[1::2, 1].copy()
        self._sums[:, :, :half] = self._sums[:, :, 0::2] + self._sums[:, :, 1::2]
        self._ends[0, :, :half] = np.fmin(self._ends[0, :, 0::2], self._ends[0, :, 1::2])
        self._ends[1, :, :half] = np.fmax(self._ends[1, :, 0::2], self._ends[1, :, 1::2])
        self._each[:, :, :half] = self._each[:, :, 0::2] + self._each[:, :, 1::2]
        self._sums[:, :, half:], self._ends[:, :, half:], self._each[:, :, half:] = 0.0, np.nan, 0.0
        self.bins, self.width = half, 2 * self.width


def _over(total: Floats, weight: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(weight > 0, total / weight, np.nan))
