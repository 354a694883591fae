"""A run of any length in a bounded number of bins, in a single pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dynamix.window import Floats

MOST_BINS = 480


class BinnedSeries:
    """Means over windows; for numbers of the whole cluster also the least and the greatest value.

    A bin holds 2^n windows. If there are too many bins, each pair is merged. So memory and the size of a page do
    not grow with the run. Means weigh windows by their steps. Unknown values (NaN) are left out.

    single   names of numbers of the cluster, each     names of numbers of every worker
    most     upper limit of bins

    >>> series = BinnedSeries(["loss"], ["size"], workers=1, most=2)
    >>> second = np.arange(5.0)
    >>> series.extend(second, second + 1.0, np.ones(5), {"loss": 5.0 - second}, {"size": 8.0 * second[:, None]})
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

    def extend(
        self,
        begins_s: Floats,
        ends_s: Floats,
        weights: Floats,
        single: Mapping[str, Floats],
        each: Mapping[str, Floats],
    ) -> None:
        """Add windows (n,), oldest first: numbers of the cluster (n,), of every worker (n, W or fewer).

        Names that are left out count as unknown.
        """
        count, unknown = len(begins_s), np.full(len(begins_s), np.nan)
        numbers = np.stack([single.get(name, unknown) for name in self.single])
        numbers[~np.isfinite(numbers)] = np.nan
        told = {self.names.index(name): rows for name, rows in each.items()}
        done = 0
        while done < count:
            if self.bins == 0 or self._in_last == self.width:
                if self.bins == self.most:
                    self._halve()
                self._times[self.bins, 0] = begins_s[done]
                self.bins, self._in_last = self.bins + 1, 0
            now = slice(done, min(done + self.width - self._in_last, count))
            self._in_last += now.stop - done
            done = now.stop
            self._times[self.bins - 1, 1] = ends_s[done - 1]
            self._fill(weights[now], numbers[:, now], {i: rows[now] for i, rows in told.items()})

    def _fill(self, weights: Floats, numbers: Floats, each: Mapping[int, Floats]) -> None:
        """Add windows (n,) to the newest bin: numbers of the cluster (names, n), of every worker (n, W) by name."""
        at = self.bins - 1
        known = ~np.isnan(numbers)
        self._sums[0, :, at] += np.where(known, numbers, 0.0) @ weights
        self._sums[1, :, at] += known @ weights
        self._ends[0, :, at] = np.fmin(self._ends[0, :, at], np.fmin.reduce(numbers, -1))
        self._ends[1, :, at] = np.fmax(self._ends[1, :, at], np.fmax.reduce(numbers, -1))
        for i, rows in each.items():
            there = np.isfinite(rows)
            workers = rows.shape[-1]
            if there.all():
                total, weight = weights @ rows, np.full(workers, weights.sum())
            else:
                total, weight = weights @ np.where(there, rows, 0.0), weights @ there
            self._each[0, i, at, :workers] += total
            self._each[1, i, at, :workers] += weight
            self.totals[i, :workers] += total
            self.weights[i, :workers] += weight

    def widen(self, workers: int) -> None:
        """Make room for more workers, with unknown values so far."""
        more = workers - self.workers
        if more > 0:
            self._each = np.pad(self._each, ((0, 0), (0, 0), (0, 0), (0, more)))
            self.totals = np.pad(self.totals, ((0, 0), (0, more)))
            self.weights = np.pad(self.weights, ((0, 0), (0, more)))
            self.workers = workers

    @property
    def begins_s(self) -> Floats:
        """(bins,) start times in seconds."""
        return self._times[: self.bins, 0]

    @property
    def ends_s(self) -> Floats:
        """(bins,) end times in seconds."""
        return self._times[: self.bins, 1]

    def mean(self, name: str) -> Floats:
        """(bins,) means of a number of the cluster; NaN if unknown."""
        total, weight = self._sums[:, self.single.index(name), : self.bins]
        return _over(total, weight)

    def least(self, name: str) -> Floats:
        """(bins,) least values of a window."""
        return self._ends[0, self.single.index(name), : self.bins]

    def greatest(self, name: str) -> Floats:
        """(bins,) greatest values of a window."""
        return self._ends[1, self.single.index(name), : self.bins]

    def each(self, name: str) -> Floats:
        """(W, bins) means of a number of every worker; NaN if unknown."""
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
