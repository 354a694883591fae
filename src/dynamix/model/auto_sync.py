"""How workers meet where both ways are open: over gradients after every step, or over parameters after several."""

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

# So many times as much a second must rounds apart promise, to begin and to go on. Where both ways promise alike, rounds
# apart have reached a loss with fewer samples, not with more; the gap keeps a job from changing to and fro.
# A batch that moves is a way to save exchanges too, and rounds follow changes late, so there it must be clearly more.
BEGINS, STAYS = {"fixed": 0.98, "moves": 1.3}, {"fixed": 0.95, "moves": 1.2}
BEARS = 6.0  # times noisier a worker's own gradient may be than that of all, for steps at one rate to teach alike
LEAST_STEPS = 2  # of a round apart, in the mean
STEADY = 1.1  # pieces stay as they are where others would be so little larger or smaller
LOOK = 1.3  # times as many samples as when gradients met last: then they meet for a window, where the batch may move
PART = 0.1  # of the samples trained so far that a round has at most: longer ones have cost score in short runs
HARM = 0.1  # of the loss when gradients met last: a rise apart by more is held against stepping apart
NEWEST = 0.5  # weight of a window's figure over those before it
LATEST = 3.0  # times what workers would take whose shares fit their speeds, at most
NO_LIMIT = 2**40  # samples
Pair = tuple[float, float]
NEAR = 2.0 ** (np.arange(-4, 5) / 4)  # times the batch in force: those at which the ways are compared


@dataclass
class AutoSync(SyncSchedule):
    """Chooses way and size of a round, window by window, for most progress a second.

    A policy decides on steps of all workers, as if gradients met. Apart, every worker takes steps of its part of such a
    step's samples, a piece, at the same learning rate, and the mean of the models moves as far as one such step for
    every step's samples. So samples teach alike in both, up to the number of steps that `RoundSize` allows. To the
    policy a round apart is so many steps, each with the exchange that it would have if gradients met.

    That holds for few workers. A rate that suits the gradient of all is too high for one worker's where that is much
    noisier: with a noise scale phi, and steps of T samples by W workers, its square is (T + W phi) / (T + phi) times as
    large. The part beyond `BEARS` is taken off what samples teach apart. An unknown phi is taken for large.

    The gain of each way is counted at the batch that suits it best among those near the one in force: samples a second,
    over what a sample teaches less there (`NoiseByBatch`). If the batch is fixed, that is samples a second.

    Speeds are those of pieces. Over gradients they follow from the fitted costs of every worker: a slow worker's small
    share has the fixed cost of a whole pass, so it looks slower there than it is apart, and a fast one looks faster.

    Only one way's exchange is seen at a time. The other way's exchange is predicted from this one's: a meeting moves
    `payload` times the bytes of a gradient, and nothing hides it; of a gradient's exchange `hidden_s` goes on while
    workers compute. The hidden part is learned when workers have met both ways, and is nothing before that.

    A learning rate that gradients of all workers bear may be too high for a worker's own. So where the loss rises while
    workers step apart, gradients meet again, and rounds apart must promise twice as much as before to be tried again.

    workers   how many
    epoch     samples of an epoch, which no round outgrows; infinite where there are none

    `why` says how the last choice was made; the figures are NaN before one.
    """

    steps_apart: ClassVar[bool] = True
    mixed: ClassVar[bool] = True

    workers: int
    epoch: float = math.inf
    hidden_s: float = field(default=0.0, init=False)
    late: float = field(default=1.0, init=False)  # the slowest worker of a step over the slowest mean
    lags: list[float] = field(default_factory=lambda: [1.0, 1.0], init=False)  # over gradients, and apart
    gradients: float = field(default=float("nan"), init=False)  # samples a second that are to be expected
    parameters: float = field(default=float("nan"), init=False)
    why: str = field(default="nothing is measured yet", init=False)
    size: RoundSize = field(default_factory=lambda: RoundSize(1.0), init=False)
    _costs: WorkerCosts = field(default_factory=WorkerCosts, init=False)
    _noise: NoiseByBatch = field(default_factory=NoiseByBatch, init=False)
    _exposed_s: float = field(default=float("nan"), init=False)  # of the gradients' exchange, seen or foreseen
    _unseen: bool = field(default=False, init=False)  # no meeting was seen since gradients met
    _loss: float = field(default=float("nan"), init=False)  # when gradients met last
    _doubt: float = field(default=1.0, init=False)  # times as much that rounds apart must promise to begin
    _looked: float = field(default=0.0, init=False)  # samples trained when gradients met last
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
        """The bounds of rounds apart, of `most` samples: whole pieces, one at least, so that each speed is seen."""
        each = np.full(self.workers, piece, dtype=np.int64)
        high = 8 * int(MOST) * each  # of the fastest of unlike workers
        least = LEAST_STEPS * int(each.sum())
        largest = max(min(self._most(piece), int(high.sum()), int(most) // piece * piece), least)
        one, other = (np.asarray(total, dtype=np.int64) for total in (least, largest))
        return Bounds(each, high, one, other, piece)

    def _most(self, piece: int) -> int:
        """Samples of a round, at most."""
        return int(min(self.epoch, NO_LIMIT)) // piece * piece

    def as_step(self, window: Window, piece: int) -> Window:
        """Take in `window`; of rounds apart, in pieces of `piece`, it is returned as one of steps of all workers.

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
        """The policy is asked for steps of all workers, of which `bounds` are."""
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
        """A worker's part of a step of `total` samples, if workers step apart; about what is in force stays."""
        quantum = bounds.quantum
        wanted = max(min(round(total / self.workers / quantum) * quantum, int(bounds.high.min())), quantum)
        return piece if piece and 1 / STEADY < wanted / piece < STEADY else wanted

    def _shares(self, sizes: Ints | Floats, piece: int, total: int) -> Ints:
        """A round of `total` samples in proportion to `sizes`, in whole pieces."""
        return project(np.maximum(sizes, 0), self.apart_bounds(piece), total=total)

    def _speeds(self, window: Window, piece: int) -> Floats | None:
        """Samples a second of every worker (W,) in steps of a piece; None where none was measured."""
        if (measured := samples_a_second(window)) is None:
            return None
        seconds = self._seconds(window, np.asarray([float(piece)]))[0]
        return np.where(np.isfinite(seconds) & (seconds > 0), piece / seconds, measured)

    def _seconds(self, window: Window, pieces: Floats) -> Floats:
        """Seconds (K, W) that every worker takes for each of `pieces` (K,)."""
        each = np.broadcast_to(pieces[:, None], (pieces.size, self.workers))
        return self._costs.seconds(each, even_share(window))

    def _compare(
        self, window: Window, bounds: Bounds, speeds: Floats, piece: int, exchanges: Pair, pace: float
    ) -> None:
        """The progress of each way: samples of the base batch a second, at the batch that suits it best.

        pace   samples a second apart, in pieces of `piece`
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
        """The learning of a sample in steps apart, over that of one where gradients meet, for steps of `totals`."""
        noisier = np.full(totals.shape, float(self.workers))
        if known:
            phi = float(np.exp(self._noise.level))
            noisier = (totals + self.workers * phi) / (totals + phi)
        return np.asarray(np.minimum(1.0, BEARS / noisier))

    def _learn_lag(self, window: Window, piece: int) -> None:
        """How much longer than with the shares that fit their speeds workers took until the slowest was done."""
        self._windows += 1
        if self._windows == 1:
            return  # even shares, which say nothing of how decisions keep up
        speeds, total = samples_a_second(window), int(window.batch_size.sum())
        assert speeds is not None
        fitting = self._shares(speeds, piece, total) / speeds if piece else np.array([total / speeds.sum()])
        slowest_s = float(slowest_seconds(window))
        self.lags[bool(piece)] = _learned(self.lags[bool(piece)], slowest_s / float(fitting.max()))
        if not piece:
            self.late = _learned(self.late, slowest_s / float(np.nanmax(window.compute)))

    def _loss_rose(self, window: Window, piece: int) -> bool:
        """Whether the loss is clearly higher than when gradients met last; not so where it is unknown."""
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
        """Seconds that the exchange adds to a step over gradients, and those of a meeting."""
        if not apart:
            self._unseen = True
            return seen_s, payload * (seen_s + self.hidden_s)
        if self._unseen:  # these are the first rounds apart since gradients met
            self.hidden_s, self._unseen = max(seen_s / payload - self._exposed_s, 0.0), False
        return max(seen_s / payload - self.hidden_s, 0.0), seen_s

    @property
    def report(self) -> dict[str, Any]:
        """For the events: why workers meet as they do."""
        told = {"meet": "parameters" if self._apart else "gradients", "why": self.why}
        return told | {"gradients": self.gradients, "parameters": self.parameters} | self.size.report


def _near(known: float, seen: float) -> float:
    return known + NEWEST * (seen - known)


def _learned(known: float, seen: float) -> float:
    return _near(known, float(np.clip(seen, 1.0, LATEST)))


def _of_pieces(window: Window, piece: int) -> Window:
    """`window` of rounds apart as of one of every worker's own steps."""
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
