"""What a worker makes of the traces that all have left: when they could all finish together, and which load teaches most a second.

All that is read here is the same for every worker that reads the same field, so all come to the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.policies.fitting import UNKNOWN, Exchange, Largest, NoiseByBatch, restored, saved
from dynamix.policies.goodput import GROWTH
from dynamix.policies.traces import (
    FLOOR,
    GROW,
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

CANDIDATES: Floats = np.linspace(-1.0, 1.0, 33)  # of the common move, over its reach


@dataclass(frozen=True, slots=True)
class Smell:
    """The traces as figures of the crowd, (..., 1 or W); NaN where they are not known. Loads are counted in even shares of the base
    batch, times in the last window's steps.

    load     mean load
    speed    mean of loads computed in the time of a step, by those whose sizes are not at a bound
    offset   mean of the loads that they would compute in the time of their fixed costs, less the load of those at a bound
    fixed    mean of the loads that anybody would compute in the time of its fixed costs
    last     part of the step before the last gradient of all
    floor    time of the worker whose smallest size takes longest; 0 where that is far below `last`
    noise    the noise's share of |g|^2; NaN where nobody knew any
    churn    load that some let go while others took as much
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
    oom: Floats

    def finish(self, load: Floats) -> Floats:
        """When all could finish together at mean loads (..., K), in steps; `load` may have one dimension more than the figures.

        Where every size is at a bound, the last one's time at the present load, in proportion.
        """
        present, offset, speed, last = self.load, self.offset, self.speed, self.last
        if load.ndim > speed.ndim:
            present, offset, speed, last = (x[..., None] for x in (present, offset, speed, last))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(speed == 0.0, last * load / present, (load + offset) / speed)


class Crowd:
    """A worker's memory of the crowd: the noise, the exchange, the largest load, and the traces when it last read them.

    heed   weight of a window's noise in what is believed of it
    """

    def __init__(self, heed: float) -> None:
        self.noise, self.largest, self.exchange = NoiseByBatch(heed), Largest(), Exchange(weight=0.3, error=0.4)
        self.last: Floats = UNKNOWN  # as in `Smell`
        self.traces: Floats = UNKNOWN

    def read(self, traces: Floats, kept: float) -> Smell:
        """Take in the traces (..., 1 or W, 13); `kept` is what decay leaves of the ones read before."""
        before = self.traces if self.traces.shape == traces.shape else np.zeros(traces.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            means, new = traces / traces[..., PRESENT, None], traces - kept * before
            # Sizes change from window to window, and a high power would not be forgotten for long: of these only what is new counts.
            load, speed, offset, held = (new[..., trace] / new[..., PRESENT] for trace in (LOAD, SPEED, OFFSET, HELD))
            last = 1.0 - new[..., WAIT] / new[..., LATE]
            floor = np.clip(np.nan_to_num(new[..., FLOOR] / new[..., HEAVY]), 0.0, 1.25)
        self.traces, self.last = np.nan_to_num(traces), np.where(np.isfinite(last), last, 1.0)
        noise = np.where(means[..., NOISE] == 0.0, np.nan, np.clip(means[..., NOISE], 0.01, 0.99))
        return Smell(
            load=load, speed=np.where(speed > 1e-3, speed, 0.0), offset=offset - held, fixed=means[..., OFFSET],
            last=np.where(np.isnan(load), np.nan, self.last), floor=floor, noise=noise,
            churn=np.minimum(means[..., GROW], means[..., SHRINK]), oom=traces[..., OOM],
        )  # fmt: skip

    def best_move(
        self, smell: Smell, *, seconds: Floats, steps: Floats, reach: float, price: float
    ) -> tuple[Floats, Floats]:
        """Log change (..., 1 or W) of the crowd's load, within `reach`, to the one of highest goodput, and the largest that may be made:
        beyond what training has met growth is as slow as `goodput.GROWTH`.

        seconds   of a step (..., 1 or W)
        steps     in a window
        price     what the square of log load costs in log goodput, twice. Without a noise scale only the price counts
        """
        one = np.ones(smell.load.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.noise.update(smell.load * smell.noise / (1.0 - smell.noise), smell.load)
            self.exchange.update(smell.last * seconds, (1.0 - smell.last) * seconds)
            free = np.log(self.largest.update(smell.load, one)) + GROWTH * np.fmin(steps, 500.0) - np.log(smell.load)
            log_load = np.log(smell.load)[..., None] + CANDIDATES * reach
            load = np.exp(log_load)
            finish = np.maximum(smell.finish(load), smell.floor[..., None] + 1e-6)
            step = self.exchange.log_step(seconds[..., None] * finish)
            teaches = log_load - step - self.noise.log_waste(load, one)
        value = np.where(np.isnan(teaches), 0.0, teaches) - 0.5 * price * np.square(log_load)
        best = reach * CANDIDATES[np.where(np.isnan(value), -np.inf, value).argmax(-1)]
        return np.where(np.isnan(smell.load), np.nan, best), np.maximum(free, 0.0)

    _PARTS = ("noise", "largest", "exchange")

    def state_dict(self) -> dict[str, Any]:
        parts = {name: saved(getattr(self, name)) for name in self._PARTS}
        return {**parts, "last": self.last.tolist(), "traces": self.traces.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._PARTS:
            restored(getattr(self, name), state[name])
        self.last, self.traces = np.asarray(state["last"]), np.asarray(state["traces"])
