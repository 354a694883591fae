"""Chooses between averaging gradients after every step and averaging parameters after several local steps."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from dynamix.model.costs import WorkerCosts, even_share
from dynamix.model.measured import base_total, exposed_seconds, noise_scale, slowest_seconds
from dynamix.model.noise import NoiseByBatch
from dynamix.model.rounds import MOST, RoundSize, samples_a_second, steps_apart
from dynamix.model.sync_schedule import Ask, Conditions, SyncSchedule
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

# Local steps must promise this many times the speed of gradient averaging, to begin and to go on. Below 1, because at
# equal speed local steps have needed fewer samples for a loss; the gap prevents switching back and forth. A batch that
# moves also saves exchanges, and rounds follow changes late, so there the gain must be clear.
BEGINS, STAYS = {"fixed": 0.98, "moves": 1.3}, {"fixed": 0.95, "moves": 1.2}
BEARS = 6.0  # local steps teach as much as common ones while a worker's gradient is at most this many times noisier
LEAST_STEPS = 2  # local steps of a round, mean over workers
STEADY = 1.1  # the piece stays if a new one would differ by less than this factor
LOOK = 1.3  # growth of the samples trained, after which gradients are averaged for a window, where the batch may move
PART = 0.1  # a round's most samples, as a part of those trained so far: longer rounds have cost score in short runs
HARM = 0.1  # local steps end if the loss rises by more than this part since gradients were last averaged
NEWEST = 0.5  # weight of a window's figure against earlier ones
LATEST = 3.0  # limit of a lag: times the seconds of shares that fit the workers' speeds
NO_LIMIT = 2**40  # samples
Pair = tuple[float, float]
NEAR = 2.0 ** (np.arange(-4, 5) / 4)  # batches at which the modes are compared, as multiples of the batch in force


@dataclass
class AutoSync(SyncSchedule):
    """Chooses the mode and size of a round, window by window, for most progress a second.

    A policy decides on steps of all workers, as if gradients were averaged. With local steps each worker takes its part
    of such a step's samples (a piece) in its own step, at the same learning rate. The averaged model then moves as far
    as by a common step. So samples teach alike in both modes, up to the number of steps that `RoundSize` allows. To the
    policy a round of local steps is that many steps, each with the exchange of an averaged gradient.

    That holds for few workers. A learning rate that suits the averaged gradient is too high for one worker's if that is
    much noisier: with noise scale phi and steps of T samples by W workers, its square is (T + W phi) / (T + phi) times
    as large. Beyond `BEARS`, samples of local steps count less in proportion. An unknown phi counts as large.

    The gain of each mode is its samples a second at its best batch near the one in force, divided by how much less a
    sample teaches there (`NoiseByBatch`). If the batch is fixed, the gain is samples a second.

    Speeds are those of pieces. If gradients are averaged, they follow from each worker's fitted costs: a slow worker's
    small share has the fixed cost of a whole pass, so it looks slower than in local steps, and a fast one looks faster.

    Only one mode's exchange is seen at a time, and the other's is predicted from it. Averaging parameters moves
    `payload` times the bytes of a gradient, and overlaps with nothing. Of a gradient's exchange, `hidden_s` overlaps
    with computing. That part is learned once both modes were used, and is 0 before.

    A learning rate that suits the averaged gradient may be too high for a single worker's. So if the loss rises during
    local steps, gradients are averaged again, and the next local steps must promise twice as much as before.

    workers   number of workers
    epoch     samples of an epoch, the limit of a round; infinite without epochs

    `why` gives the reason for the last choice; the figures are NaN before the first one.
    """

    steps_apart: ClassVar[bool] = True
    mixed: ClassVar[bool] = True

    workers: int
    epoch: float = math.inf
    hidden_s: float = field(default=0.0, init=False)
    late: float = field(default=1.0, init=False)  # seconds of a step's slowest worker over the slowest mean
    lags: list[float] = field(default_factory=lambda: [1.0, 1.0], init=False)  # with averaged gradients, local steps
    gradients: float = field(default=float("nan"), init=False)  # expected samples a second
    parameters: float = field(default=float("nan"), init=False)
    why: str = field(default="nothing is measured yet", init=False)
    size: RoundSize = field(default_factory=lambda: RoundSize(1.0), init=False)
    _costs: WorkerCosts = field(default_factory=WorkerCosts, init=False)
    _noise: NoiseByBatch = field(default_factory=NoiseByBatch, init=False)
    _exposed_s: float = field(default=float("nan"), init=False)  # of the gradient exchange, measured or predicted
    _unseen: bool = field(default=False, init=False)  # gradients were averaged; no parameter averaging since
    _loss: float = field(default=float("nan"), init=False)  # when gradients were last averaged
    _doubt: float = field(default=1.0, init=False)  # local steps must promise this many times as much to begin
    _looked: float = field(default=0.0, init=False)  # samples trained when gradients were last averaged
    _windows: int = field(default=0, init=False)
    _apart: bool = field(default=False, init=False)  # the last choice

    def bounds_of(self, piece: int, bounds: Bounds) -> Bounds:
        return self.apart_bounds(piece) if piece else bounds

    def local(self, piece: int) -> tuple[bool, int]:
        return piece > 0, piece

    def most(self, piece: int, limit: int) -> int | None:
        return min(piece, limit) if piece else None

    def limit_to(self, samples: int) -> None:
        self.epoch = float(samples)

    def begin_anew(self) -> None:
        vars(self).update(vars(AutoSync(self.workers, self.epoch)))

    def apart_bounds(self, piece: int, most: float = NO_LIMIT) -> Bounds:
        """Bounds of a round of local steps, of `most` samples: a piece a worker at least, so that each is timed."""
        each = np.full(self.workers, piece, dtype=np.int64)
        high = 8 * int(MOST) * each  # for the fastest of unequal workers
        least = LEAST_STEPS * int(each.sum())
        largest = max(min(self._most(piece), int(high.sum()), int(most) // piece * piece), least)
        one, other = (np.asarray(total, dtype=np.int64) for total in (least, largest))
        return Bounds(each, high, one, other, piece)

    def _most(self, piece: int) -> int:
        """Most samples of a round."""
        return int(min(self.epoch, NO_LIMIT)) // piece * piece

    def as_step(self, window: Window, piece: int) -> Window:
        """Take in `window`. One of local steps, in pieces of `piece`, is returned as a window of common steps.

        Converts local steps to one synchronous step: every worker has a share instead of its pieces and computes in one
        pass, so fixed costs count once.
        """
        each, timed = _of_pieces(window, piece), samples_a_second(window) is not None
        if timed:
            self._costs = self._costs.update(each)
        at_once = float(each.batch_size.sum())
        self._noise = self._noise.update(noise_scale(window), np.asarray(at_once / base_total(window)))
        if not piece:
            return window
        steps = float(window.batch_size.sum()) / at_once
        sizes = np.maximum(np.rint(window.batch_size / steps), np.minimum(window.batch_size, 1)).astype(np.int64)
        even = even_share(window)
        passes = np.ones(self.workers)
        if timed:
            passes = self._costs.seconds(sizes.astype(np.float64), even) / self._costs.seconds(
                each.batch_size.astype(np.float64), even
            )
        compute = each.compute * passes
        wait = self.late * compute.max(initial=0.0, where=np.isfinite(compute)) - compute
        known = {"compute": compute, "compute_std": each.compute_std * passes, "data": each.data, "wait": wait}
        known |= {"work": window.work / steps, "communication": np.full(self.workers, self._exposed_s)}
        known |= {name: getattr(window, name) * steps for name in ("steps", "age")}
        return dataclasses.replace(window, batch_size=sizes, **known)

    def decide(self, ask: Ask, window: Window, bounds: Bounds, now: Conditions) -> tuple[Ints, int]:
        """Asks the policy for sizes of common steps within `bounds`, then chooses the mode."""
        piece, payload, samples = now
        sizes = ask(self.as_step(window, piece), bounds)
        after = self._piece(int(sizes.sum()), bounds, piece)
        speeds, seen_s = self._speeds(window, after), float(exposed_seconds(window))
        if speeds is None or not np.isfinite(seen_s) or LEAST_STEPS * self.workers * after > self._most(after):
            return (sizes, 0) if not piece else (self._shares(sizes, piece, int(window.batch_size.sum())), piece)
        exposed_s, meeting_s = self._exchanges(window, piece > 0, seen_s, max(payload, 1e-9))
        self._exposed_s = exposed_s
        in_force = round(int(window.batch_size.sum()) / piece) * after if piece else 0
        self.size = RoundSize(float(after), self.epoch)
        total, pace = self.size.best(self.apart_bounds(after, PART * samples), speeds, meeting_s, now=in_force)
        self._learn_lag(window, piece)
        computing_s = total / pace - meeting_s
        pace = total / (self.lags[1] * computing_s + meeting_s)
        self._compare(window, bounds, speeds, after, (exposed_s, meeting_s), pace)
        better = self.parameters / self.gradients
        moves = int(bounds.total_low) < int(bounds.total_high)
        demanded = STAYS if piece else {kind: self._doubt * more for kind, more in BEGINS.items()}
        self._apart = better > demanded["moves" if moves else "fixed"]
        self.why = _reason(self._apart, better, self.size.steps, exposed_s, meeting_s)
        if self._loss_rose(window, piece):
            self._apart, self._doubt = False, 2 * self._doubt
            self.why = "the loss rose while workers stepped apart: the learning rate may be too high for single workers"
        if not piece:
            self._looked = samples
        elif self._apart and moves and samples > LOOK * self._looked:
            self._apart, self.why = False, "gradients meet for a window, which says how noisy they have become"
        return (self._shares(sizes, after, total), after) if self._apart else (sizes, 0)

    def _piece(self, total: int, bounds: Bounds, piece: int) -> int:
        """A worker's part of a step of `total` samples, for local steps; stays as it is if it would hardly change."""
        quantum = bounds.quantum
        wanted = max(min(round(total / self.workers / quantum) * quantum, int(bounds.high.min())), quantum)
        return piece if piece and 1 / STEADY < wanted / piece < STEADY else wanted

    def _shares(self, sizes: Ints | Floats, piece: int, total: int) -> Ints:
        """A round of `total` samples in proportion to `sizes`, in whole pieces."""
        return project(np.maximum(sizes, 0), self.apart_bounds(piece), total=total)

    def _speeds(self, window: Window, piece: int) -> Floats | None:
        """Samples a second of every worker (W,) in steps of a piece; None if no worker was measured."""
        if (measured := samples_a_second(window)) is None:
            return None
        seconds = self._seconds(window, np.asarray([float(piece)]))[0]
        return np.where(np.isfinite(seconds) & (seconds > 0), piece / seconds, measured)

    def _seconds(self, window: Window, pieces: Floats) -> Floats:
        """Seconds (K, W) of every worker for each of `pieces` (K,)."""
        each = np.broadcast_to(pieces[:, None], (pieces.size, self.workers))
        return self._costs.seconds(each, even_share(window))

    def _compare(
        self, window: Window, bounds: Bounds, speeds: Floats, piece: int, exchanges: Pair, pace: float
    ) -> None:
        """Computes the progress of each mode: samples of the base batch a second, at the mode's best batch.

        pace   samples a second with local steps, in pieces of `piece`
        """
        (exposed_s, meeting_s), here = exchanges, float(piece * self.workers)
        base = np.asarray(float(base_total(window)))
        least, most = int(bounds.total_low), int(bounds.total_high)
        known = bool(np.isfinite(self._noise.level)) if self._noise.level.shape == () else False
        near = here * NEAR if known and least < most else np.array([here])
        totals = np.append(np.clip(near, least, most), here)
        computing = totals / np.where(totals == here, speeds.sum(), self._summed(window, totals))
        waste = self._noise.log_waste(totals, base) if known else np.zeros(totals.shape)
        worth = np.exp(-waste)
        of_gradients = worth * totals / (self.lags[0] * computing + exposed_s)
        steps = np.array([max(steps_apart(meeting_s, s), LEAST_STEPS) for s in computing])
        taught = worth * self._taught_apart(totals, known)
        apart = taught * totals / (self.lags[1] * computing + meeting_s / steps)
        apart = np.where(totals <= self.workers * bounds.high.min(), apart, 0.0)
        self.gradients = float(of_gradients.max())
        self.parameters = pace * float(taught[-1] * apart.max() / apart[-1])

    def _taught_apart(self, totals: Floats, known: bool) -> Floats:
        """How much a sample teaches in local steps over one in averaged gradients, for steps of `totals` samples."""
        noisier = np.full(totals.shape, float(self.workers))
        if known:
            phi = float(np.exp(self._noise.level))
            noisier = (totals + self.workers * phi) / (totals + phi)
        return np.asarray(np.minimum(1.0, BEARS / noisier))

    def _learn_lag(self, window: Window, piece: int) -> None:
        """Update the lag: the slowest worker's time over its time with shares that fit the speeds."""
        self._windows += 1
        if self._windows == 1:
            return  # shares are still even, so they do not show how well decisions keep up
        speeds, total = samples_a_second(window), int(window.batch_size.sum())
        assert speeds is not None
        fitting = self._shares(speeds, piece, total) / speeds if piece else np.array([total / speeds.sum()])
        slowest_s = float(slowest_seconds(window))
        self.lags[bool(piece)] = _learned(self.lags[bool(piece)], slowest_s / float(fitting.max()))
        if not piece:
            self.late = _learned(self.late, slowest_s / float(np.nanmax(window.compute)))

    def _loss_rose(self, window: Window, piece: int) -> bool:
        """Whether the loss is clearly higher than when gradients were last averaged; False if it is unknown."""
        known = np.isfinite(window.loss)
        if not known.any():
            return False
        loss, scatter = float(window.loss[known].mean()), float(np.nan_to_num(window.loss_std[known]).mean())
        if not piece:
            self._loss = loss if not math.isfinite(self._loss) else min(_near(self._loss, loss), loss)
            return False
        steps = max(float(np.nansum(window.steps * known)), 1.0)
        return loss > self._loss + HARM * abs(self._loss) + 2 * scatter / math.sqrt(steps)

    def _summed(self, window: Window, totals: Floats) -> Floats:
        pieces = totals / self.workers
        return np.asarray((pieces[:, None] / self._seconds(window, pieces)).sum(-1))

    def _exchanges(self, window: Window, apart: bool, seen_s: float, payload: float) -> Pair:
        """Seconds that the exchange adds to a step with averaged gradients, and those of averaging parameters."""
        if not apart:
            self._unseen = True
            return seen_s, payload * (seen_s + self.hidden_s)
        if self._unseen:  # the first local steps since gradients were averaged
            self.hidden_s, self._unseen = max(seen_s / payload - self._exposed_s, 0.0), False
        return max(seen_s / payload - self.hidden_s, 0.0), seen_s

    @property
    def report(self) -> dict[str, Any]:
        """For the events: the mode and the reason for it."""
        told = {"meet": "parameters" if self._apart else "gradients", "why": self.why}
        return told | {"gradients": self.gradients, "parameters": self.parameters} | self.size.report


def _near(known: float, seen: float) -> float:
    return known + NEWEST * (seen - known)


def _learned(known: float, seen: float) -> float:
    return _near(known, float(np.clip(seen, 1.0, LATEST)))


def _of_pieces(window: Window, piece: int) -> Window:
    """`window` of local steps as a window of each worker's own steps."""
    if not piece:
        return window
    steps = np.maximum(window.batch_size / piece, 1e-9)
    known = {name: getattr(window, name) / steps for name in ("compute", "data", "work")}
    known |= {"compute_std": window.compute_std / np.sqrt(steps), "steps": window.steps * steps.mean()}
    return dataclasses.replace(window, batch_size=np.full(window.batch_size.shape, piece), **known)


def _reason(goes_apart: bool, better: float, steps: float, exposed_s: float, meeting_s: float) -> str:
    more = better if goes_apart else 1 / better
    way = f"parameters after {steps:.3g} steps" if goes_apart else "gradients after every step"
    kept = "" if more >= 1 else ", about as many"
    times = (
        f"an exchange of gradients adds {1e3 * exposed_s:.3g} ms to a step, a meeting takes {1e3 * meeting_s:.3g} ms"
    )
    return f"meeting over {way} promises {more:.3g} times the samples a second{kept}: {times}"
