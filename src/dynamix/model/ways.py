"""Which way workers meet where both are open: over gradients after every step, or over parameters after several."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynamix.model.costs import WorkerCosts, even_share
from dynamix.model.measured import exposed_seconds, slowest_seconds
from dynamix.model.rounds import MOST, RoundSize, of_total, samples_a_second
from dynamix.window import Bounds, Floats, Window

# So many times as much a second must rounds apart promise, to begin and to go on. Where both ways promise alike, rounds
# apart have reached a loss with fewer samples, not with more; the gap keeps a job from changing to and fro.
BEGINS, STAYS = 0.98, 0.95
NEWEST = 0.5  # weight of a window's figure over those before it
NO_LIMIT = 2**40  # samples
LATEST = 2.0  # times the slowest worker's mean that the slowest of a step is taken to be, at most


@dataclass
class Ways:
    """Chooses way and size of a round, window by window, for most samples a second.

    A step over gradients is of `base` samples. Apart, every worker takes steps of `piece` samples at the same learning
    rate, and the mean of the models moves as far as one such step for every `base` samples. So samples teach alike in
    both, up to the number of steps that `RoundSize` allows. An allocation says by its sum which way it is trained:
    rounds of `apart_from` samples or more are trained apart, all others have `base`.

    Speeds are those of pieces. Over gradients they follow from the fitted costs of every worker: a slow worker's small
    share has the fixed cost of a whole pass, so it looks slower there than it is apart, and a fast one looks faster.

    Only one way's exchange is seen at a time. Of the other it is foreseen from this one's: a meeting moves `payload`
    times the bytes of a gradient, and nothing hides it; of a gradient's exchange `hidden_s` goes on while workers
    compute. What is hidden is learned when workers have met both ways, and is nothing before that.

    base      samples of all workers' step over gradients
    workers   how many
    epoch     samples of an epoch, which no round outgrows; infinite where there are none

    `why` says how the last choice was made; the figures are NaN before one.
    """

    base: int
    workers: int
    epoch: float = math.inf
    hidden_s: float = field(default=0.0, init=False)
    late: float = field(default=1.0, init=False)  # the slowest worker of a step over the slowest mean
    gradients: float = field(default=float("nan"), init=False)  # samples a second that are to be expected
    parameters: float = field(default=float("nan"), init=False)
    why: str = field(default="nothing is measured yet", init=False)
    size: RoundSize = field(init=False)
    _costs: WorkerCosts = field(default_factory=WorkerCosts, init=False)  # of a step over gradients
    _exposed_s: float = field(default=float("nan"), init=False)  # of the gradients' exchange, when it was last seen
    _apart: bool = field(default=False, init=False)  # the last choice

    def __post_init__(self) -> None:
        self.size = RoundSize(float(self.piece))

    @property
    def piece(self) -> int:
        """Samples of a worker's own step."""
        return max(self.base // self.workers, 1)

    @property
    def apart_from(self) -> int:
        """Samples from which on a round is trained apart."""
        return 2 * self.base

    @property
    def _most(self) -> int:
        """Samples of a round, at most."""
        return int(min(self.epoch, NO_LIMIT)) // self.piece * self.piece

    def begun_with(self, base: int) -> Ways:
        """The same for a job whose steps over gradients have `base` samples, nothing being measured yet."""
        return Ways(base, self.workers, self.epoch)

    def is_apart(self, sizes: Any) -> bool:
        """Whether a round of so many samples a worker, (W,), is trained apart."""
        return int(np.sum(sizes)) >= self.apart_from

    def bounds_of(self, bounds: Bounds, sizes: Any) -> Bounds:
        """What rounds like that of `sizes` (W,) are kept within; `bounds` are those of a step over gradients."""
        return self.apart_bounds(bounds) if self.is_apart(sizes) else bounds

    def apart_bounds(self, bounds: Bounds) -> Bounds:
        """Of rounds apart: whole pieces, one at least, so that everybody's speed is seen."""
        piece, each = self.piece, np.ones(bounds.low.shape, dtype=np.int64)
        low, high = piece * each, 8 * int(MOST) * piece * each  # of the fastest of unlike workers
        least = max(-(-self.apart_from // piece) * piece, int(low.sum()))
        most = min(self._most, int(high.sum()))
        one, other = np.asarray(least, dtype=np.int64), np.asarray(max(most, least), dtype=np.int64)
        return dataclasses.replace(bounds, low=low, high=high, total_low=one, total_high=other, quantum=piece)

    def within(self, bounds: Bounds, window: Window, rate: float = 1.0, payload: float = 1.0) -> Bounds:
        """Bounds that allow one size of the round only: that of the better way after `window`, of one job, shape (W,).

        bounds    of a step over gradients, of `base` samples
        rate      learning rate over its largest so far
        payload   bytes that a meeting moves, over those of a gradient
        """
        now = int(window.batch_size.sum())
        apart, far = self.is_apart(now), self.apart_bounds(bounds)
        stay = of_total(far, now) if apart else bounds
        self.size.epoch = self.epoch
        speeds, seen_s = self._speeds(window, apart), float(exposed_seconds(window))
        if speeds is None or not np.isfinite(seen_s) or self.apart_from > self._most:
            return stay
        exposed_s, meeting_s = self._exchanges(window, apart, seen_s, max(payload, 1e-9))
        self.gradients = self.base / (self.late * self.base / float(speeds.sum()) + exposed_s)
        total, self.parameters = self.size.best(far, speeds, meeting_s, now=now if apart else 0, rate=rate)
        better = self.parameters / self.gradients
        goes_apart = better > (STAYS if apart else BEGINS)
        self._apart, self.why = goes_apart, _reason(goes_apart, better, self.size.steps, exposed_s, meeting_s)
        return of_total(far, total) if goes_apart else bounds

    def _speeds(self, window: Window, apart: bool) -> Floats | None:
        """Samples a second of every worker (W,) in steps of a piece; None where none was measured."""
        measured = samples_a_second(window)
        if apart or measured is None:
            return measured
        self._costs = self._costs.update(window)
        seconds = self._costs.seconds(np.full(self.workers, float(self.piece)), even_share(window))
        return np.where(np.isfinite(seconds) & (seconds > 0), self.piece / seconds, measured)

    def _exchanges(self, window: Window, apart: bool, seen_s: float, payload: float) -> tuple[float, float]:
        """Seconds that the exchange adds to a step over gradients, and those of a meeting."""
        if not apart:
            slowest_mean = float(np.nanmax(window.compute))
            late = float(slowest_seconds(window)) / slowest_mean if slowest_mean > 0 else 1.0
            self.late += NEWEST * (float(np.clip(late, 1.0, LATEST)) - self.late)
            self._exposed_s = seen_s
            return seen_s, payload * (seen_s + self.hidden_s)
        if np.isfinite(self._exposed_s):  # these are the first rounds apart since gradients met
            self.hidden_s, self._exposed_s = max(seen_s / payload - self._exposed_s, 0.0), float("nan")
        return max(seen_s / payload - self.hidden_s, 0.0), seen_s

    @property
    def report(self) -> dict[str, Any]:
        """For the events: why workers meet as they do."""
        told = {"meet": "parameters" if self._apart else "gradients", "why": self.why}
        return told | {"gradients": self.gradients, "parameters": self.parameters} | self.size.report


def _reason(goes_apart: bool, better: float, steps: float, exposed_s: float, meeting_s: float) -> str:
    more = better if goes_apart else 1 / better
    way = f"parameters after {steps:.3g} steps" if goes_apart else "gradients after every step"
    kept = "" if more >= 1 else ", about as many"
    times = (
        f"an exchange of gradients adds {1e3 * exposed_s:.3g} ms to a step, a meeting takes {1e3 * meeting_s:.3g} ms"
    )
    return f"meeting over {way} promises {more:.3g} times the samples a second{kept}: {times}"
