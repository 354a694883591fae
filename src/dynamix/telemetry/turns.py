"""Compares policies that take turns in one job: how many times as fast each of them is as the first."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamix.model.measured import step_seconds
from dynamix.telemetry.comparing import student
from dynamix.telemetry.reading import EventFollower, Recorded
from dynamix.window import Floats

LEAST_BLOCKS = 5  # fewer say nothing of how much they scatter


class Speed(NamedTuple):
    """The speed of one policy. Those of its windows that count: `windows`, `samples` and `seconds` of all of them
    together.

    times       as fast as the first policy
    low, high   within which that is, at 95 %; NaN for the first policy and of few windows
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
    """The windows of the events file of a job whose policies take turns, as far as it was read."""

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
        self._at = start + (about["block"] < before), about["block"]  # a job that began anew, counts from 0 again
        self.policies, self.seconds = about["of"], float(recorded.fields["time_s"])
        steps = float(window.steps)
        samples, took = steps * float(window.worked.sum()), steps * float(step_seconds(window))
        # Rounds that the end of an epoch cut, and pauses, are not in a window; NaN where nothing is left of it.
        if about["counts"] and took > 0:
            self._blocks.setdefault(self._at, {})[about["turn"]] = samples, took

    def speeds(self) -> list[Speed]:
        """The speed of each policy, the first one first; none before a block is whole."""
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
    """Part of the time that the comparison took and that the fastest policy alone would not have."""
    samples, took = sum(one.samples for one in speeds), sum(one.seconds for one in speeds)
    return 1.0 - samples / max(one.samples_s for one in speeds) / took


def half_width(own: Floats, first: Floats) -> float:
    """How far the logarithm of a ratio of two pooled speeds may be off, at 95 %; NaN of few blocks.

    own, first   (B, 2) samples and seconds by block, in order

    Blocks that follow each other are alike, so their scatter is counted with its covariances (`newey_west`). It never
    counts less for them: a few blocks look by chance as if they undid each other.
    """
    blocks = len(own)
    if blocks < LEAST_BLOCKS:
        return math.nan
    (x, s), (x0, s0) = (pair.T / pair.mean(0)[:, None] for pair in (own, first))
    apart = (x - s) - (x0 - s0)
    return student(blocks - 1) * math.sqrt(max(newey_west(apart), float(apart.var())) / (blocks - 1))


def newey_west(values: Floats) -> float:
    """The variance of the mean of a series (B,), times B: that of its values, and their covariances with later ones.

    Bartlett weights up to a lag of 4 (B/100)^(2/9) (Newey and West, Econometrica 1987; 1994).

    >>> round(newey_west(np.array([1.0, -1.0] * 8)), 3), round(newey_west(np.array([1.0, 1.0, -1.0, -1.0] * 4)), 3)
    (0.333, 0.5)
    """
    apart, count = values - values.mean(), len(values)
    lags = min(int(4 * (count / 100) ** (2 / 9)), count - 1)
    of = [float(apart[lag:] @ apart[: count - lag]) / count for lag in range(lags + 1)]
    return of[0] + 2.0 * sum((1 - lag / (lags + 1)) * of[lag] for lag in range(1, lags + 1))
