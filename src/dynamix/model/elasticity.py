"""How a worker's time grows with its batch around each size, beyond the fitted line.

Only changes between consecutive windows count. So a lasting slowdown adds no information and does no harm. A change of
size that crosses a memory cliff adds some, and it is stored at the sizes it crossed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dynamix.model.state import laid_out, nothing
from dynamix.window import Floats

# Ranges of size, as log(b / base share): half octaves from an eighth to eight times the base share.
HALF = 0.25 * np.log(2.0)
CENTRES: Floats = 2 * HALF * np.arange(-6, 7)


@dataclass(frozen=True, eq=False)
class LocalElasticity:
    """d log seconds / d log b around each of `CENTRES`, (..., W, K): least squares over changes, with forgetting.

    forget   factor on a worker's older changes, at each new change
    prior    weight of the line's own elasticity, in squared log batch changes: a window's mean errs by some 4 %, and
             elasticities differ from a line's by some 0.5
    moments  (2, ..., W, K): sums of squares and of products
    log_batch, log_time   (..., W) of the last measured window, the batch relative to the base share

    >>> curve, unit = LocalElasticity(), np.array([100.0])
    >>> for b, t in ((100.0, 1.0), (140.0, 1.4), (200.0, 2.8)): curve = curve.update(unit, np.array([b]), np.array([t]))
    >>> excess = curve.excess(unit, np.array([0.0]), np.array([0.01]))   # the line: proportional
    >>> curve.beyond(excess, unit, np.array([140.0]), np.array([200.0])).round(1).tolist()
    [0.2]
    """

    forget: float = 0.95
    prior: float = 0.02
    moments: Floats = field(default_factory=nothing)
    log_batch: Floats = field(default_factory=nothing)
    log_time: Floats = field(default_factory=nothing)

    FIELDS: ClassVar[tuple[str, ...]] = ("moments", "log_batch", "log_time")

    def update(self, unit: Floats, batch: Floats, busy: Floats) -> LocalElasticity:
        """Take in sizes and busy seconds (..., W), NaN where not measured; `unit` (..., 1) is the base share."""
        with np.errstate(divide="ignore", invalid="ignore"):
            log_batch, log_time = np.log(batch / unit), np.log(busy)
        seen = np.isfinite(log_batch) & np.isfinite(log_time)
        last_batch, last_time, moments = self.log_batch, self.log_time, self.moments
        if last_batch.shape != batch.shape:
            last_batch = last_time = np.full(batch.shape, np.nan)
            moments = np.zeros((2, *batch.shape, len(CENTRES)))
        moments = laid_out(moments)
        x, y = log_batch - last_batch, log_time - last_time
        with np.errstate(invalid="ignore"):
            # A change larger than a cliff could explain is a jump of speed.
            told = seen & (np.abs(x) > 0.02) & (np.abs(y) < 0.3 + 3.0 * np.abs(x))
        if told.any():
            moments = self._learned(
                moments, told, x, y, np.minimum(log_batch, last_batch), np.maximum(log_batch, last_batch)
            )
        return dataclasses.replace(
            self, moments=moments, log_batch=np.where(seen, log_batch, last_batch),
            log_time=np.where(seen, log_time, last_time),
        )  # fmt: skip

    def _learned(self, moments: Floats, told: np.ndarray, x: Floats, y: Floats, low: Floats, high: Floats) -> Floats:
        """Moments after changes x of log batch, from `low` to `high`, and y of log time, for the `told` (..., W)."""
        x, y, at = np.where(told, x, 1.0), np.where(told, y, 0.0), CENTRES[:, None]
        # (..., K, W), the longer axis last: the part of a change that lies in each range; 0 for workers not in `told`.
        part = np.minimum(np.where(told, high, -np.inf)[..., None, :], at + HALF)
        part -= np.maximum(np.where(told, low, np.inf)[..., None, :], at - HALF)
        np.maximum(part, 0.0, out=part)
        part /= np.abs(x)[..., None, :]
        after = np.where(told, self.forget, 1.0)[..., None, :] * moments.swapaxes(-1, -2)
        after[0] += part * np.square(x)[..., None, :]
        after[1] += part * (x * y)[..., None, :]
        return np.asarray(after.swapaxes(-1, -2))

    def excess(self, unit: Floats, alpha: Floats, beta: Floats) -> Floats:
        """The learned elasticity minus that of the line alpha + beta b, (..., W, K); 0 if nothing was learned."""
        samples = laid_out((beta * unit)[..., None, :] * np.exp(CENTRES)[:, None]).swapaxes(-1, -2)
        samples /= np.maximum(alpha[..., None] + samples, 1e-30)
        squares, products = self.moments
        samples *= squares
        return np.asarray((products - samples) / (squares + self.prior))

    @staticmethod
    def beyond(excess: Floats, unit: Floats, start: Floats, end: Floats) -> Floats:
        """Log seconds (..., W) that going from sizes `start` to `end` costs in addition to the line's."""
        a, b = np.log(np.maximum(start, 1e-2) / unit), np.log(np.maximum(end, 1e-2) / unit)
        low, high, at = np.minimum(a, b)[..., None, :], np.maximum(a, b)[..., None, :], CENTRES[:, None]
        reach = np.minimum(high, at + HALF)
        reach -= np.maximum(low, at - HALF)
        np.maximum(reach, 0.0, out=reach)
        reach *= excess.swapaxes(-1, -2)
        return np.asarray(np.sign(b - a) * reach.sum(-2))

    def around(self, excess: Floats, unit: Floats, batch: Floats) -> tuple[Floats, Floats]:
        """`excess` just below and above the sizes `batch`, and how well each is known (0 to 1), both (..., W, 2)."""
        at = np.log(np.maximum(batch, 1e-2) / unit) / (2 * HALF) + len(CENTRES) // 2
        low = np.minimum(np.maximum(np.floor(at).astype(np.int64), 0), len(CENTRES) - 2)[..., None]
        pair = np.concatenate([low, low + 1], -1)
        squares = np.take_along_axis(self.moments[0], pair, -1)
        return np.take_along_axis(excess, pair, -1), np.asarray(squares / (squares + self.prior))
