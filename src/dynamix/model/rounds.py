"""Workers that meet over parameters: after rounds as bounds say, or of the size that a meeting and a piece ask for."""

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
NEAR = 1.25  # samples needed hardly change within this factor of the number of steps
FLAT = 8.0  # nor up to so many
DOUBLING = 0.03  # more samples needed, where steps are twice as many as wanted, or half
KEEP = 0.97  # of the best size's samples a second: then what is in force stays
CANDIDATES = 33


def steps_apart(meeting_s: float, piece_s: float) -> float:
    """Optimizer steps between two meetings, in the mean over workers: 8 (meeting_s / piece_s)^(1/3), 1 to 64.

    meeting_s, piece_s   seconds of a meeting, and of a worker's step

    Meeting less often saves time as long as the samples needed for a loss stay the same, which is so up to some number
    of steps; the cube root lies between always meeting and what the network alone would ask for.

    >>> [round(steps_apart(meeting_s, 1.0), 1) for meeting_s in (0.0, 0.027, 1.0, 27.0)]
    [1.0, 2.4, 8.0, 24.0]
    """
    ratio = max(meeting_s, 0.0) / max(piece_s, 1e-9)
    return float(np.clip(FACTOR * ratio ** (1 / 3), 1.0, MOST))


@dataclass
class LocalSteps(SyncSchedule):
    """Workers meet over parameters after rounds as the job's bounds say.

    piece   samples of a worker's own step; 0: its share of a round is one
    """

    steps_apart: ClassVar[bool] = True

    piece: float = 0

    def local(self, piece: int) -> tuple[bool, int]:
        return True, int(self.piece)

    def at_once(self, samples: int, workers: int) -> int:
        return workers * int(self.piece) or samples


@dataclass
class RoundSize(LocalSteps):
    """Chooses the samples of a round, of all workers, window by window.

    piece   samples of a piece (mean over workers)
    epoch   samples of an epoch, whose last round ends with it; infinite where there are none

    `steps`, `meeting_s` and `piece_s` are those of the last choice, NaN before one.
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
        """`bounds` that allow one size of the round only: the best after `window`, of one job, shape (W,).

        If nothing is measured, it is the size in force. Workers take whole pieces: among sizes of about the right
        number of steps, or of few, the one is chosen of which most samples a second are to be expected. An epoch of few
        rounds ends with a short one, whose meeting counts whole, so sizes that fill the epoch's rounds are among them.
        """
        now = int(window.batch_size.sum())
        speeds = samples_a_second(window)
        meeting_s = float(exposed_seconds(window))
        if speeds is None or not np.isfinite(meeting_s):
            return of_total(bounds, now)
        return of_total(bounds, self.best(bounds, speeds, meeting_s, now=now)[0])

    def best(self, bounds: Bounds, speeds: Floats, meeting_s: float, *, now: int) -> tuple[int, float]:
        """The best samples of a round, and how many a second are to be expected of it.

        bounds   of a round
        speeds   samples a second of every worker (W,), none of them 0
        now      samples of the rounds in force, which stay where they are about as good; 0: there are none, and what
                 the rule asks for is taken where that is about as good
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
    """The speed of every worker (W,) while it computes, the mean for one that was not measured; None if none was."""
    speeds = window.worked / busy_seconds(window)
    known = np.isfinite(speeds)
    return np.where(known, speeds, speeds[known].mean()) if known.any() else None


def of_total(bounds: Bounds, total: int) -> Bounds:
    """`bounds` that allow one size of the round only: `total`, or what of it they allow."""
    least = max(int(bounds.low.sum()), bounds.quantum)
    fixed = np.asarray(int(np.clip(total, least, int(bounds.high.sum()))), dtype=np.int64)
    return dataclasses.replace(bounds, total_low=fixed, total_high=fixed)
