"""A worker's conclusions from the traces of all workers: when all could finish together, and which load teaches most a
second.

All workers that read the same field reach the same answer, except for differences in their memory. A trace (`aim`)
shows how far they differ.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.model.exchange import Exchange
from dynamix.model.noise import NoiseByBatch
from dynamix.model.outcome import log_goodput
from dynamix.model.running import Largest
from dynamix.model.state import UNKNOWN, array_of, restored, saved
from dynamix.policies.goodput import GROWTH
from dynamix.policies.stigmergic.traces import TraceKind
from dynamix.window import Floats

# In log goodput; for a smaller gain the crowd keeps its load. The optimum is flat, and not known exactly.
LEAST = 0.001
UNTIL_KNOWN = 8  # decisions without a noise scale, after which none is expected any more
CANDIDATES: Floats = np.linspace(-1.0, 1.0, 33)  # common moves, as parts of the reach


@dataclass(frozen=True, slots=True)
class Smell:
    """The traces as figures of the crowd, (..., 1 or W); NaN if unknown. Loads are counted in even shares of the base
    batch, times in the last window's steps.
    """

    load: Floats  # mean load
    speed: Floats  # mean of loads computed in the time of a step, over workers whose sizes are not at a bound
    offset: Floats  # mean of loads computed in the time of fixed costs, minus the load of workers at a bound
    fixed: Floats  # mean of the loads that any worker would compute in the time of its fixed costs
    last: Floats  # part of the step before the last gradient of all workers
    floor: Floats  # time of the worker whose smallest size takes longest; 0 if that is far below `last`
    noise: Floats  # the noise's share of |g|^2; NaN if no worker knew any
    aim: Floats  # log of the load that the crowd wants, by all workers a window before; NaN if none had one
    oom: Floats  # number of workers that ran out of memory

    def finish(self, load: Floats) -> Floats:
        """The common finishing time at mean loads (..., K), in steps; `load` may have one dimension more than the
        figures.

        If every size is at a bound, it is the slowest worker's time at the current load, in proportion.
        """
        present, offset, speed, last = self.load, self.offset, self.speed, self.last
        if load.ndim > speed.ndim:
            present, offset, speed, last = (x[..., None] for x in (present, offset, speed, last))
        with np.errstate(divide="ignore", invalid="ignore"):
            part, now = load / present, (present + offset) / speed
            line = (load + offset) / speed
            # With less load, workers at an upper bound leave it, so time falls by no more than the load does.
            return np.where(speed == 0.0, last * part, np.where(part < 1.0, np.maximum(line, now * part), line))


class Crowd:
    """A worker's memory of the crowd: the noise, the exchange, the largest load (reached, or aimed at and hardly
    larger), and when the last gradient came."""

    def __init__(self, heed: float) -> None:  # weight of a window's noise
        self.noise, self.largest, self.exchange = NoiseByBatch(heed), Largest(), Exchange(weight=0.15, error=0.4)
        self.last: Floats = UNKNOWN  # as in `Smell`
        self.searches = 0

    def read(self, traces: Floats) -> Smell:
        """Take in the traces of a window, (..., 1 or W, 14)."""
        t, left = TraceKind, np.moveaxis(traces, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            load, speed, fixed, held = left[[t.LOAD, t.SPEED, t.OFFSET, t.HELD]] / left[t.PRESENT]
            last = np.clip(1.0 - left[t.WAIT] / left[t.LATE], 0.02, 1.0)
            noise = np.where(left[t.HEARD] > 0.01, left[t.NOISE] / left[t.HEARD], np.nan)
            aim = np.where(left[t.AIMING] > 0.01, left[t.AIM] / left[t.AIMING], np.nan)
            floor = np.where(left[t.HEAVY] > 0.001, np.clip(left[t.FLOOR] / left[t.HEAVY], 0.0, 1.25), 0.0)
        known = self.last if self.last.shape == last.shape else np.ones(last.shape)
        self.last = np.where(np.isfinite(last), last, known)
        speed, noise = np.where(speed > 1e-3, speed, 0.0), np.clip(noise, 0.01, 0.99)
        last = np.where(np.isnan(load), np.nan, self.last)
        return Smell(load, speed, fixed - held, fixed, last, floor, noise, aim, left[t.OOM])

    def best_move(
        self,
        smell: Smell,
        *,
        load: Floats,
        seconds: Floats,
        steps: Floats,
        reach: float,
        price: float,
        ahead: float,
    ) -> tuple[Floats, Floats]:
        """Log change (..., 1 or W) of the crowd's `load`, within `reach`, to the load of highest goodput. Also the
        largest allowed change: beyond loads of the training so far growth is as slow as `goodput.GROWTH`.

        load      mean load in force (..., 1 or W)
        seconds   of the traces' step (..., 1 or W)
        steps     in a window
        price     weight of half the squared log load, in log goodput. Without a noise scale only the price counts
        ahead     how far beyond `load`, in logs, the load that the crowd wants still counts as reached
        """
        one = np.ones(smell.load.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.noise = self.noise.update(smell.load * smell.noise / (1.0 - smell.noise), smell.load)
            last = np.minimum(smell.last, 0.98)  # an exchange that takes no time at all is an error of the clock
            self.exchange = self.exchange.update(last * seconds, (1.0 - last) * seconds)
            met = np.fmax(load, np.exp(np.minimum(smell.aim, np.log(load) + ahead)))
            self.largest = self.largest.update(np.where(np.isnan(met), 1.0, met), one)
            free = np.log(self.largest.total) + GROWTH * np.fmin(steps, 500.0) - np.log(load)
            log_load = np.log(load)[..., None] + CANDIDATES * reach
            loads = np.exp(log_load)
            finish = np.maximum(smell.finish(loads), smell.floor[..., None] + 1e-6)
            step = self.exchange.log_step(seconds[..., None] * finish)
            teaches = log_goodput(loads, step, self.noise.log_waste(loads, one))
        value = np.where(np.isnan(teaches), 0.0, teaches) - 0.5 * price * np.square(log_load)
        value = np.where(np.isnan(value), -np.inf, value)
        at = value.argmax(-1)
        with np.errstate(invalid="ignore"):
            gained = np.take_along_axis(value, at[..., None], -1)[..., 0] - value[..., len(CANDIDATES) // 2]
        self.searches += 1
        never = np.isnan(self.noise.level) & (self.searches > UNTIL_KNOWN)
        least = np.where(never, 0.0, LEAST)  # without a noise scale, back to the base batch
        best = np.where(gained > least, reach * CANDIDATES[at], 0.0)
        return np.where(np.isnan(smell.load), np.nan, best), np.maximum(free, 0.0)

    _PARTS = ("noise", "largest", "exchange")

    def state_dict(self) -> dict[str, Any]:
        parts = {name: saved(getattr(self, name)) for name in self._PARTS}
        return {**parts, "last": self.last.tolist(), "searches": self.searches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._PARTS:
            setattr(self, name, restored(getattr(self, name), state[name]))
        self.last, self.searches = array_of(state["last"]), int(state["searches"])
