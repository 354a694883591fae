"""Slowdowns by wall clock: they begin and end in the middle of windows, independently of the policy."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.window import Floats, Ints
from dynamix_lab.simulator.streams import RandomStream

LEAST = 1.15  # factor of the weakest episode, unless said otherwise


class Slowdowns:
    """For each worker (or link): on and off for random times with different means, each episode with its own factor.

    mean_off_s, mean_on_s, strongest   (C, W); `mean_off_s` infinite: never
    weakest   (C, W) or a number; factors are log-uniform in [weakest, strongest]
    even      (C,) True: on for uniform times in [1/3, 5/3] of the mean instead of exponential ones
    group     (C, W) workers of a cluster with equal numbers are slowed together; None: each by itself
    """

    def __init__(
        self,
        seed: int,
        mean_off_s: Floats,
        mean_on_s: Floats,
        strongest: Floats,
        *,
        weakest: Floats | float = LEAST,
        even: np.ndarray | None = None,
        group: Ints | None = None,
        purpose: str = "slow",
    ) -> None:
        shape = mean_off_s.shape
        self.mean_off_s, self.mean_on_s, self.strongest = mean_off_s, mean_on_s, strongest
        self.weakest = np.broadcast_to(np.asarray(weakest, np.float64), shape)
        self.even = None if even is None else np.broadcast_to(even[:, None], shape)
        self._length = RandomStream(seed, f"{purpose}-length", shape, group=group)
        self._factor = RandomStream(seed, f"{purpose}-factor", shape, group=group)
        self.episode = np.zeros(shape, dtype=np.uint64)
        self.until_s = -mean_off_s * np.log(self._length.uniform(np.uint64(0)))
        self.factor = np.ones(shape)

    def at(self, clock_s: Floats) -> Floats:
        """Factors (C, W) on seconds at wall clock (C,). Calls must be in order of time."""
        late = self.until_s <= clock_s[:, None]
        while late.any():
            self.episode[late] += np.uint64(1)
            episode = self.episode[late]
            on = episode % np.uint64(2) == 1
            drawn = self._length.uniform(episode, late)
            length = -np.log(drawn)
            if self.even is not None:
                length = np.where(on & self.even[late], 1 / 3 + 4 / 3 * drawn, length)
            self.until_s[late] += np.where(on, self.mean_on_s[late], self.mean_off_s[late]) * length
            weakest = self.weakest[late]
            strength = self._factor.uniform(episode, late) * np.log(np.maximum(self.strongest[late] / weakest, 1.0))
            self.factor[late] = np.where(on, weakest * np.exp(strength), 1.0)
            late = self.until_s <= clock_s[:, None]
        return self.factor


class MovingNeighbour:
    """One noisy neighbour per cluster: it slows one worker by `factor` and moves every `period_s`."""

    def __init__(self, seed: int, workers: int, period_s: Floats, factor: Floats) -> None:
        """`period_s` and `factor` (C,); factor 1: no neighbour."""
        self.workers, self.period_s, self.factor = workers, period_s, factor
        self._victim = RandomStream(seed, "neighbour", period_s.shape)
        self._phase = RandomStream(seed, "neighbour-phase", period_s.shape).uniform(np.uint64(0))

    def at(self, clock_s: Floats) -> Floats:
        """Factors (C, W) at wall clock (C,)."""
        slot = np.floor(clock_s / self.period_s + self._phase).astype(np.uint64)
        victim = (self._victim.bits(slot) % np.uint64(self.workers))[:, None]
        return np.where(victim == np.arange(self.workers, dtype=np.uint64), self.factor[:, None], 1.0)


@dataclass(frozen=True, slots=True)
class Staircases:
    """Piecewise constant factors of each worker, optionally repeated.

    times_s    (C, W, T) when a factor begins; the first is 0, and they do not decrease
    factors    (C, W, T) on seconds, positive
    repeat_s   (C, W) period of repetition; infinite: the last factor remains
    start_s    (C, W) a worker's position in its sequence when the clock starts

    >>> twice = Staircases(*(np.array([[x]]) for x in ([0.0, 3.0], [1.0, 2.0], 5.0, 0.0)))
    >>> [float(twice.at(np.array([clock]))[0, 0]) for clock in (2.0, 3.0, 5.0, 8.5)]
    [1.0, 2.0, 1.0, 2.0]
    """

    times_s: Floats
    factors: Floats
    repeat_s: Floats
    start_s: Floats

    def __getitem__(self, rows: Any) -> Staircases:
        """Those of some clusters."""
        return Staircases(self.times_s[rows], self.factors[rows], self.repeat_s[rows], self.start_s[rows])

    def at(self, clock_s: Floats) -> Floats:
        """Factors (C, W) at wall clock (C,)."""
        reached = clock_s[:, None] + self.start_s
        once = np.isinf(self.repeat_s)
        reached = np.where(once, reached, reached % np.where(once, 1.0, self.repeat_s))
        stair = (self.times_s <= reached[..., None]).sum(-1) - 1
        return np.asarray(np.take_along_axis(self.factors, stair[..., None], -1)[..., 0])


class SlowdownTrace:
    """A recorded slowdown per worker, replayed by wall clock; the last row remains.

    times_s   (T,) increasing, from 0
    factors   (T, W) on seconds, positive; 2 takes twice as long
    """

    def __init__(self, times_s: Floats, factors: Floats) -> None:
        self.times_s, self.factors = times_s, factors

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SlowdownTrace:
        """Read a CSV file: a head `time_s,0,1,...` and a row per change. Raises `ConfigError` naming the wrong line."""
        fix = "see docs/design/simulator.md for the form"
        try:
            with Path(path).open(newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("trace", os.fspath(path), "a CSV file that can be read", str(error)) from error
        if len(rows) < 2 or not rows[0] or rows[0][0].strip() != "time_s" or len(rows[0]) < 2:
            raise ConfigError("trace", os.fspath(path), "a head time_s,0,1,... and at least one row", fix)
        head, *body = rows
        table = np.array([_numbers(row, len(head), f"{os.fspath(path)}:{i}") for i, row in enumerate(body, 2) if row])
        for i in range(len(table)):
            place = f"in line {i + 2} of the trace"
            if (table[i, 1:] <= 0).any():
                raise ConfigError(f"factor {place}", table[i, 1:].min(), "above 0", "2 is half speed")
            if (i == 0 and table[0, 0] != 0) or (i and table[i, 0] <= table[i - 1, 0]):
                raise ConfigError(f"time_s {place}", table[i, 0], "0 first, then increasing", "sort")
        return cls(table[:, 0], table[:, 1:])

    def at(self, clock_s: Floats) -> Floats:
        """Factors (C, W) at wall clock (C,)."""
        return np.asarray(self.factors[np.searchsorted(self.times_s, clock_s, side="right") - 1])


def _numbers(row: list[str], width: int, place: str) -> list[float]:
    if len(row) != width:
        raise ConfigError(f"cells at {place}", len(row), f"{width}, as in the head", "fill the gap")
    try:
        numbers = [float(cell) for cell in row]
    except ValueError as error:
        raise ConfigError(f"cell at {place}", str(error), "numbers only", "fill the gap") from error
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"cell at {place}", "not finite", "finite numbers", "fill the gap")
    return numbers
