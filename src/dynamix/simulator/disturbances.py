"""Slowdowns that come and go by wall clock, so they start in the middle of windows and do not wait for a policy."""

from __future__ import annotations

import numpy as np

from dynamix.simulator.streams import Stream
from dynamix.window import Floats


class Slowdowns:
    """Per worker: on and off for exponential times with unequal means, each episode with a factor of its own."""

    def __init__(self, seed: int, mean_off_s: Floats, mean_on_s: Floats, strongest: Floats) -> None:
        """All (C, W); `mean_off_s` infinite: never. Factors are log-uniform in [1.15, strongest]."""
        shape = mean_off_s.shape
        self.mean_off_s, self.mean_on_s, self.strongest = mean_off_s, mean_on_s, strongest
        self._length, self._factor = Stream(seed, "slow-length", shape), Stream(seed, "slow-factor", shape)
        self.episode = np.zeros(shape, dtype=np.uint64)
        self.until_s = -mean_off_s * np.log(self._length.uniform(np.uint64(0)))
        self.factor = np.ones(shape)

    def at(self, clock_s: Floats) -> Floats:
        """Factors (C, W) on seconds at wall clock (C,); the clock may only go forward."""
        late = self.until_s <= clock_s[:, None]
        while late.any():
            self.episode[late] += np.uint64(1)
            episode = self.episode[late]
            on = episode % np.uint64(2) == 1
            mean = np.where(on, self.mean_on_s[late], self.mean_off_s[late])
            self.until_s[late] -= mean * np.log(self._length.uniform(episode, late))
            strength = self._factor.uniform(episode, late) * np.log(np.maximum(self.strongest[late] / 1.15, 1.0))
            self.factor[late] = np.where(on, 1.15 * np.exp(strength), 1.0)
            late = self.until_s <= clock_s[:, None]
        return self.factor


class MovingNeighbour:
    """One noisy neighbour per cluster: it slows one worker by `factor` and moves on every `period_s`."""

    def __init__(self, seed: int, workers: int, period_s: Floats, factor: Floats) -> None:
        """`period_s` and `factor` (C,); factor 1: no neighbour."""
        self.workers, self.period_s, self.factor = workers, period_s, factor
        self._victim = Stream(seed, "neighbour", period_s.shape)
        self._phase = Stream(seed, "neighbour-phase", period_s.shape).uniform(np.uint64(0))

    def at(self, clock_s: Floats) -> Floats:
        """Factors (C, W) at wall clock (C,)."""
        slot = np.floor(clock_s / self.period_s + self._phase).astype(np.uint64)
        victim = self._victim.bits(slot) % np.uint64(self.workers)
        hit = victim[:, None] == np.arange(self.workers, dtype=np.uint64)
        return np.where(hit, self.factor[:, None], 1.0)
