"""Rounds of local steps: their size is the job's, or follows from the times of averaging and of a piece."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from dynamix.model.measured import busy_seconds, exposed_seconds
from dynamix.model.sync_schedule import Ask, Conditions, SyncSchedule
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

FACTOR, MOST = 8.0, 64.0
NEAR = 1.25  # within this factor of the number of steps, the samples needed hardly change
FLAT = 8.0  # up to this many steps they hardly change either
DOUBLING = 0.03  # part more samples needed with twice or half the wanted steps
KEEP = 0.97  # the size in force stays if it reaches this part of the best size's samples a second
CANDIDATES = 33


def steps_apart(meeting_s: float, piece_s: float) -> float:
    """Local steps between two averagings, mean over workers: 8 (meeting_s / piece_s)^(1/3), 1 to 64.

    meeting_s, piece_s   seconds of averaging parameters, and of a worker's step

    Averaging less often saves time as long as a loss needs the same samples, which holds up to some number of steps.
    The cube root lies between averaging after every step and what the network alone would suggest.

    >>> [round(steps_apart(meeting_s, 1.0), 1) for meeting_s in (0.0, 0.027, 1.0, 27.0)]
    [1.0, 2.4, 8.0, 24.0]
    """
    ratio = max(meeting_s, 0.0) / max(piece_s, 1e-9)
    return float(np.clip(FACTOR * ratio ** (1 / 3), 1.0, MOST))


@dataclass
class LocalSteps(SyncSchedule):
    """Workers average parameters after rounds of local steps, within the job's bounds.

    piece   samples of a local step; 0: a worker's whole share of a round is one step
    """

    steps_apart: ClassVar[bool] = True

    piece: float = 0

    def local(self, piece: int) -> tuple[bool, int]:
        return True, int(self.piece)

    def at_once(self, samples: int, workers: int) -> int:
        return workers * int(self.piece) or samples


@dataclass
class RoundSize(LocalSteps):
    """Chooses the samples of a round, summed over workers, window by window.

    piece   samples of a piece (mean over workers)
    epoch   samples of an epoch, whose last round ends with it; infinite without epochs

    `steps`, `meeting_s` and `piece_s` are those of the last choice, NaN before the first.
    """

    epoch: float = math.inf
    steps: float = field(default=float("nan"), init=False)
    meeting_s: float = field(default=float("nan"), init=False)
    piece_s: float = field(default=float("nan"), init=False)

    def decide(self, ask: Ask, window: Window, bounds: Bounds, now: Conditions) -> tuple[Ints, int]:
        return ask(window, self.within(bounds, window)), 0

    def limit_to(self, samples: int) -> None:
        self.epoch = float(samples)

    def within(self, bounds: Bounds, window: Window) -> Bounds:
        """`bounds` with only one round size: the best after `window`, of one job, shape (W,).

        If nothing is measured, it is the size in force. Workers take whole pieces. Among sizes of about the right
        number of steps, or of few steps, it takes the one with the most expected samples a second. If an epoch has few
        rounds, its short last round costs a whole averaging, so sizes that fill the epoch's rounds are candidates too.
        """
        now = int(window.batch_size.sum())
        speeds = samples_a_second(window)
        meeting_s = float(exposed_seconds(window))
        if speeds is None or not np.isfinite(meeting_s):
            return of_total(bounds, now)
        return of_total(bounds, self.best(bounds, speeds, meeting_s, now=now)[0])

    def best(self, bounds: Bounds, speeds: Floats, meeting_s: float, *, now: int) -> tuple[int, float]:
        """The best samples of a round, and its expected samples a second.

        bounds   of a round
        speeds   samples a second of every worker (W,), none of them 0
        now      samples of the rounds in force, which stay if they are about as good; 0: there are none, and the
                 rule's size is taken if it is about as good
        """
        self.meeting_s, self.piece_s = meeting_s, self.piece * speeds.size / float(speeds.sum())
        self.steps = steps_apart(meeting_s, self.piece_s)
        wanted, quantum = self.steps * self.piece * speeds.size, bounds.quantum
        least, most = max(float(bounds.total_low), quantum), float(bounds.total_high)
        flat = FLAT * self.piece * speeds.size
        low, high = np.clip([wanted / NEAR, max(wanted * NEAR, flat)], least, most)
        totals = np.rint(np.linspace(low, high, CANDIDATES) / quantum).astype(np.int64) * quantum
        if math.isfinite(self.epoch):
            times = np.arange(max(self.epoch // high, 1), self.epoch // low + 1)[:CANDIDATES]
            filling = np.ceil(self.epoch / times / quantum).astype(np.int64) * quantum
            totals = np.append(totals, filling[(low <= filling) & (filling <= high)])
        totals = np.unique(totals)
        if not now:
            now = int(np.clip(round(wanted / quantum) * quantum, least, most))
        asked = np.append(totals, now)
        sizes = project(np.broadcast_to(speeds, (len(asked), speeds.size)), bounds, total=asked)
        rounds = np.ceil(self.epoch / asked) * asked / self.epoch if math.isfinite(self.epoch) else 1.0
        pace = asked / ((sizes / speeds).max(-1) + rounds * meeting_s)
        pace *= 1.0 - DOUBLING * np.abs(np.log2(asked / wanted))
        best = int(np.argmax(pace[:-1]))
        stays = wanted / NEAR**2 <= now <= max(wanted * NEAR**2, flat) and pace[-1] >= KEEP * pace[best]
        return (now, float(pace[-1])) if stays else (int(totals[best]), float(pace[best]))

    @property
    def report(self) -> dict[str, Any]:
        return {"steps": self.steps, "meeting_s": self.meeting_s, "piece_s": self.piece_s}


def samples_a_second(window: Window) -> Floats | None:
    """Speed of every worker (W,) while it computes. A worker not measured gets the mean; None if none was measured."""
    speeds = window.worked / busy_seconds(window)
    known = np.isfinite(speeds)
    return np.where(known, speeds, speeds[known].mean()) if known.any() else None


def of_total(bounds: Bounds, total: int) -> Bounds:
    """`bounds` with only one round size: `total`, clipped to what they allow."""
    least = max(int(bounds.low.sum()), bounds.quantum)
    fixed = np.asarray(int(np.clip(total, least, int(bounds.high.sum()))), dtype=np.int64)
    return dataclasses.replace(bounds, total_low=fixed, total_high=fixed)
