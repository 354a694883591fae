"""Running figures of a job: a smoothed value, and the largest batch so far."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dynamix.model.state import nothing
from dynamix.window import Floats


@dataclass(frozen=True, eq=False)
class Smoothed:
    """Exponentially smoothed log of a positive figure per cluster; NaN before its first value.

    weight   of the newest figure
    log      (...) the smoothed log

    >>> s = Smoothed(0.5)
    >>> for x in (1.0, np.nan, 4.0): s = s.update(np.array(x))
    >>> float(s.value)
    2.0
    """

    weight: float
    log: Floats = field(default_factory=nothing)

    FIELDS: ClassVar[tuple[str, ...]] = ("log",)

    def update(self, value: Floats) -> Smoothed:
        """Take in a figure (...); NaN and values that are not positive change nothing."""
        with np.errstate(divide="ignore", invalid="ignore"):
            seen = np.where(np.isfinite(value) & (value > 0), np.log(value), np.nan)
        old = seen if self.log.shape != seen.shape else np.where(np.isnan(self.log), seen, self.log)
        return dataclasses.replace(self, log=np.where(np.isnan(seen), old, old + self.weight * (seen - old)))

    @property
    def value(self) -> Floats:
        """The smoothed figure (...)."""
        return np.asarray(np.exp(self.log))


@dataclass(frozen=True, eq=False)
class Largest:
    """The largest global batch (...) of the training so far, at least the base batch.

    >>> largest = Largest()
    >>> for batch in (64.0, 256.0, 96.0): largest = largest.update(np.array(batch), np.array(128.0))
    >>> float(largest.total)
    256.0
    """

    total: Floats = field(default_factory=nothing)

    FIELDS: ClassVar[tuple[str, ...]] = ("total",)

    def update(self, total: Floats, base: Floats) -> Largest:
        """Take in the global batch in force and the base batch, (...), in samples per round."""
        before = self.total if self.total.shape == np.shape(total) else -np.inf
        return Largest(np.asarray(np.maximum(np.maximum(total, base), before)))
