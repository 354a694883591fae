"""What a worker makes of the traces that all have left: when they could all finish together, and which load teaches
most a second.

All who read the same field come to the same answer, but for what they remember; how far they differ the field tells too
(`aim`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.model.exchange import Exchange
from dynamix.model.noise import NoiseByBatch
from dynamix.model.outcome import log_goodput
from dynamix.model.running import Largest
from dynamix.model.state import UNKNOWN, array_of, restored, saved
from dynamix.policies.goodput import GROWTH
from dynamix.policies.stigmergic.traces import (
    AIM,
    AIMING,
    FLOOR,
    GROW,
    HEARD,
    HEAVY,
    HELD,
    LATE,
    LOAD,
    NOISE,
    OFFSET,
    OOM,
    PRESENT,
    SHRINK,
    SPEED,
    WAIT,
)
from dynamix.window import Floats

# In log goodput: for less the crowd does not change its load. The best load is flat, and not known exactly.
LEAST = 0.01
UNTIL_KNOWN = 8  # decisions after which a noise scale that is not known is not to be expected
CANDIDATES: Floats = np.linspace(-1.0, 1.0, 33)  # of the common move, over its reach


@dataclass(frozen=True, slots=True)
class Smell:
    """The traces as figures of the crowd, (..., 1 or W); NaN where they are not known. Loads are counted in even shares
    of the base batch, times in the last window's steps.

    load     mean load
    speed    mean of loads computed in the time of a step, by those whose sizes are not at a bound
    offset   mean of the loads that they would compute in the time of their fixed costs, less the load of those at a
             bound
    fixed    mean of the loads that anybody would compute in the time of its fixed costs
    last     part of the step before the last gradient of all
    floor    time of the worker whose smallest size takes longest; 0 where that is far below `last`
    noise    the noise's share of |g|^2; NaN where nobody knew any
    churn    load that some let go while others took as much
    aim      log of the load that the crowd wants, as all found it a window before; NaN where nobody did
    oom      how many ran out of memory lately
    """

    load: Floats
    speed: Floats
    offset: Floats
    fixed: Floats
    last: Floats
    floor: Floats
    noise: Floats
    churn: Floats
    aim: Floats
    oom: Floats

    def finish(self, load: Floats) -> Floats:
        """When all could finish together at mean loads (..., K), in steps; `load` may have one dimension more than the
        figures.

        Where every size is at a bound, the last one's time at the present load, in proportion.
        """
        present, offset, speed, last = self.load, self.offset, self.speed, self.last
        if load.ndim > speed.ndim:
            present, offset, speed, last = (x[..., None] for x in (present, offset, speed, last))
        with np.errstate(divide="ignore", invalid="ignore"):
            part, now = load / present, (present + offset) / speed
            # With less load those at an upper bound come off it, so time falls by no more than the load does.
            line = np.where(part < 1.0, np.maximum((load + offset) / speed, now * part), (load + offset) / speed)
            return np.where(speed == 0.0, last * part, line)


class Crowd:
    """A worker's memory of the crowd: the noise, the exchange, the largest load, and who was last.

    heed   weight of a window's noise in what is believed of it
    """

    def __init__(self, heed: float) -> None:
        self.noise, self.largest, self.exchange = NoiseByBatch(heed), Largest(), Exchange(weight=0.15, error=0.4)
        self.last: Floats = UNKNOWN  # as in `Smell`
        self.searches = 0

    def read(self, traces: Floats, new: Floats) -> Smell:
        """Take in the traces of a window, (..., 1 or W, 16), and which part of them was left in it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            means = traces / traces[..., PRESENT, None]
            # Sizes change from window to window, and a high power would not be forgotten for long: of these only what
            # is new counts.
            load, speed, offset, held = (new[..., trace] / new[..., PRESENT] for trace in (LOAD, SPEED, OFFSET, HELD))
            last = np.clip(1.0 - new[..., WAIT] / new[..., LATE], 0.02, 1.0)
            # The noise of several windows, as faded: one window's is mostly chance.
            noise = np.where(traces[..., HEARD] > 0.01, traces[..., NOISE] / traces[..., HEARD], np.nan)
            aim = np.where(new[..., AIMING] > 0.01, new[..., AIM] / new[..., AIMING], np.nan)
            floor = np.where(new[..., HEAVY] > 0.001, np.clip(new[..., FLOOR] / new[..., HEAVY], 0.0, 1.25), 0.0)
        known = self.last if self.last.shape == last.shape else np.ones(last.shape)
        self.last = np.where(np.isfinite(last), last, known)
        return Smell(
            load=load,
            speed=np.where(speed > 1e-3, speed, 0.0),
            offset=offset - held,
            fixed=means[..., OFFSET],
            last=np.where(np.isnan(load), np.nan, self.last),
            floor=floor,
            noise=np.clip(noise, 0.01, 0.99),
            churn=np.minimum(means[..., GROW], means[..., SHRINK]),
            aim=aim,
            oom=traces[..., OOM],
        )

    def best_move(
        self,
        smell: Smell,
        *,
        load: Floats,
        seconds: Floats,
        steps: Floats,
        reach: float,
        price: float,
        seen: bool = False,
    ) -> tuple[Floats, Floats]:
        """Log change (..., 1 or W) of the crowd's `load`, within `reach`, to the one of highest goodput, and the
        largest that may be made: beyond what training has met growth is as slow as `goodput.GROWTH`.

        load      mean load in force now (..., 1 or W), which the traces may not tell yet
        seconds   of the traces' step (..., 1 or W)
        steps     in a window
        seen      these traces were searched before: nothing is learned from them again
        price     what the square of log load costs in log goodput, twice. Without a noise scale only the price counts
        """
        one = np.ones(smell.load.shape)
        seen = seen and self.largest.total.shape == one.shape
        with np.errstate(divide="ignore", invalid="ignore"):
            if not seen:
                self.noise = self.noise.update(smell.load * smell.noise / (1.0 - smell.noise), smell.load)
                last = np.minimum(smell.last, 0.98)  # an exchange of nothing at all is a slip of the clock
                self.exchange = self.exchange.update(last * seconds, (1.0 - last) * seconds)
                self.largest = self.largest.update(np.where(np.isnan(load), 1.0, load), one)
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
        least = np.where(never, 0.0, LEAST)  # back to the base batch where nothing else is known
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
