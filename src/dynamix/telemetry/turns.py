"""Compares policies that take turns in one job: the speed of each as a multiple of the first one's."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamix.model.measured import mean_of_known, step_seconds
from dynamix.telemetry.comparing import student
from dynamix.telemetry.reading import EventFollower, Recorded
from dynamix.window import Floats

LEAST_BLOCKS = 5  # fewer do not show the scatter


class Speed(NamedTuple):
    """The speed of one policy: `windows`, `samples` and `seconds`, summed over its windows that count.

    times       speed over the first policy's
    low, high   95 % range of `times`; NaN for the first policy and with few windows
    """

    policy: str
    windows: int
    samples: float
    seconds: float
    times: float
    low: float
    high: float

    @property
    def samples_s(self) -> float:
        return self.samples / self.seconds


class PolicyTurns:
    """The windows, read so far, of the events file of a job whose policies take turns."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._follower = EventFollower(path)
        self.policies: list[str] = []
        self._blocks: dict[tuple[int, int], dict[str, tuple[float, float]]] = {}  # (start of the job, block)
        self._at = (0, 0)
        self.seconds = 0.0  # from the first step to the newest window

    def refresh(self) -> None:
        """Read what was written since the last call."""
        for recorded in self._follower.more():
            self._take(recorded)

    def _take(self, recorded: Recorded) -> None:
        about, window = recorded.fields.get("compare"), recorded.window
        if not isinstance(about, dict):
            return
        start, before = self._at
        self._at = start + (about["block"] < before), about["block"]  # a job that started anew counts from 0 again
        self.policies, self.seconds = about["of"], float(recorded.fields["time_s"])
        steps = float(window.steps)
        samples, loading_s = steps * float(window.worked.sum()), np.nan_to_num(mean_of_known(window.data))
        took = steps * float(step_seconds(window) + loading_s)
        # A window excludes pauses, and rounds cut by the end of an epoch; NaN if nothing of it remains.
        if about["counts"] and took > 0:
            self._blocks.setdefault(self._at, {})[about["turn"]] = samples, took

    def speeds(self) -> list[Speed]:
        """The speed of each policy, the first one first; empty before a block is complete."""
        whole = [block for block in self._blocks.values() if block.keys() == set(self.policies)]
        if not whole:
            return []
        first = np.array([block[self.policies[0]] for block in whole])
        found = []
        for policy in self.policies:
            own = np.array([block[policy] for block in whole])
            (samples, took), half = own.sum(0), half_width(own, first)
            times = (samples / took) / np.divide(*first.sum(0))
            if policy == self.policies[0]:
                half = math.nan
            limits = times * math.exp(-half), times * math.exp(half)
            found.append(Speed(policy, len(whole), *map(float, (samples, took, times, *limits))))
        return found


def cost(speeds: Sequence[Speed]) -> float:
    """Part of the comparison's time that the fastest policy alone would have saved."""
    samples, took = sum(one.samples for one in speeds), sum(one.seconds for one in speeds)
    return 1.0 - samples / max(one.samples_s for one in speeds) / took


def half_width(own: Floats, first: Floats) -> float:
    """95 % error of the logarithm of a ratio of two pooled speeds; NaN with few blocks.

    own, first   (B, 2) samples and seconds by block, in order

    Consecutive blocks are correlated, so the error includes their covariances (`newey_west`). They never reduce it,
    because in a few blocks negative covariances arise by chance.
    """
    blocks = len(own)
    if blocks < LEAST_BLOCKS:
        return math.nan
    (x, s), (x0, s0) = (pair.T / pair.mean(0)[:, None] for pair in (own, first))
    apart = (x - s) - (x0 - s0)
    return student(blocks - 1) * math.sqrt(max(newey_west(apart), float(apart.var())) / (blocks - 1))


def newey_west(values: Floats) -> float:
    """The variance of the mean of a series (B,), times B: its variance, plus covariances with later values.

    Bartlett weights up to a lag of 4 (B/100)^(2/9) (Newey and West, Econometrica 1987; 1994).

    >>> round(newey_west(np.array([1.0, -1.0] * 8)), 3), round(newey_west(np.array([1.0, 1.0, -1.0, -1.0] * 4)), 3)
    (0.333, 0.5)
    """
    apart, count = values - values.mean(), len(values)
    lags = min(int(4 * (count / 100) ** (2 / 9)), count - 1)
    of = [float(apart[lag:] @ apart[: count - lag]) / count for lag in range(lags + 1)]
    return of[0] + 2.0 * sum((1 - lag / (lags + 1)) * of[lag] for lag in range(1, lags + 1))
