"""How many steps lie between two meetings: rows of the comparison, each a way of planning rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dynamix.model.rounds import RoundSize
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Window
from dynamix_lab.opponents.periods import QSR, AdaComm, FixedPeriod, Moment, Period
from dynamix_lab.opponents.shares import RoundPlan, StepShares
from dynamix_lab.suites.rounds.jobs import WORKERS, RoundsJob, meeting_s, pass_s

FIXED = (2, 4, 8, 16, 32, 64)
RATIOS = (0.1, 1.0, 10.0)  # exchange of gradients over a piece
ADACOMM = 16
LOOKS = 20  # of AdaComm in a budget
QSR_STEPS = (8, 32)  # at the first rate


@dataclass(frozen=True, slots=True)
class After:
    """What a row may know after a meeting: samples so far, learning rate over its largest, mean loss of the round, and
    J and Jq, which say how bent the loss is between the workers' models (zeros where they were not measured)."""

    samples: int
    rate: float
    loss: float
    bent: tuple[float, float]


class Planner(Protocol):
    """Plans a run's rounds."""

    def plan(self, start: int) -> RoundPlan:
        """The coming round, which begins at sample `start`."""

    def met(self, after: After) -> None:
        """A round is over."""


class ByPeriod:
    """A period's number of steps, shared by speed as `local` does it."""

    def __init__(self, job: RoundsJob, speeds: Floats, period: Period, *, smaller: bool) -> None:
        self.period, self._speeds = period, speeds
        self._shares = StepShares(WORKERS, job.piece, smaller_pieces=smaller)
        self._rate = job.rate

    def plan(self, start: int) -> RoundPlan:
        plan = self._shares.plan(start, self.period.steps)
        self._shares.measured(plan, pass_s(plan.pieces, self._speeds))
        return plan

    def met(self, after: After) -> None:
        self.period = self.period.at(Moment(after.samples, self._rate * after.rate, after.loss))


class ByRule:
    """The product's: `RoundSize` on a window that says what the workers and the meeting take."""

    def __init__(self, job: RoundsJob, speeds: Floats, ratio: float) -> None:
        self._piece = job.piece
        self._speeds, self._meeting_s = speeds, meeting_s(job, speeds, ratio)
        self._size = RoundSize(float(job.piece))

    def plan(self, start: int) -> RoundPlan:
        pieces, most = np.full(WORKERS, self._piece), 256 * self._piece
        bounds = Bounds.of(WORKERS, self._piece, most, quantum=self._piece)
        per_piece = pass_s(pieces, self._speeds)
        window = Window.of(pieces, compute=per_piece, communication=self._meeting_s)
        within = self._size.within(bounds, window)
        shares = project(pieces / per_piece, within, total=within.total_low)
        return RoundPlan(start, shares // self._piece, pieces)

    def met(self, after: After) -> None:
        pass


def planner(row: str, job: RoundsJob, speeds: Floats) -> Planner:
    """Of a row by name: "8" is a fixed number of steps, "rule@1" the product's at an exchange of one piece."""
    kind, _, value = row.partition("@")
    if kind == "rule":
        return ByRule(job, speeds, float(value))
    if kind == "adacomm":
        return ByPeriod(job, speeds, AdaComm(int(value), job.budget // LOOKS, 256), smaller=False)
    if kind == "qsr":
        steps = int(value)
        return ByPeriod(job, speeds, QSR(max(steps // 4, 1), job.rate * math.sqrt(steps), 256), smaller=False)
    steps = int(kind)
    return ByPeriod(job, speeds, FixedPeriod(steps), smaller=steps <= 4)
