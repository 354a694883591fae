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

POOLED = 10  # measurements of u that count together
FIXED = (2, 4, 8, 16, 32, 64)
RATIOS = (0.1, 1.0, 10.0)  # exchange of gradients over a piece
ADACOMM = 16
LOOKS = 20  # of AdaComm in a budget
QSR_STEPS = (8, 32)  # at the first rate
GUARD_LOW, GUARD_HIGH, GUARD_FACTORS, GUARD_RANGE = 0.07, 0.15, (1.1, 0.8), (3 / 8, 20 / 8)


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
    """The product's: `RoundSize` on a window that says what the workers and the meeting take.

    guarded   the number of steps also follows u: fewer where it is high, more where it is low
    """

    def __init__(self, job: RoundsJob, speeds: Floats, ratio: float, *, guarded: bool = False) -> None:
        self._piece, self._guarded, self._factor, self._rate = job.piece, guarded, 1.0, 1.0
        self._bent = list[tuple[float, float]]()
        self._speeds, self._meeting_s = speeds, meeting_s(job, speeds, ratio)
        self._size = RoundSize(float(job.piece))

    def plan(self, start: int) -> RoundPlan:
        pieces, most = np.full(WORKERS, self._piece), 256 * self._piece
        bounds = Bounds.of(WORKERS, self._piece, most, quantum=self._piece)
        per_piece = pass_s(pieces, self._speeds)
        window = Window.of(pieces, compute=per_piece, communication=self._meeting_s)
        within = self._size.within(bounds, window, self._rate / self._factor)
        shares = project(pieces / per_piece, within, total=within.total_low)
        return RoundPlan(start, shares // self._piece, pieces)

    def met(self, after: After) -> None:
        self._rate = after.rate
        if self._guarded and any(after.bent):
            self._bent = [*self._bent, after.bent][-POOLED:]
            found, parabola = np.sum(self._bent, axis=0)
            bent = 1.0 - found / parabola if parabola > 0 else 0.0
            more, fewer = GUARD_FACTORS
            step = fewer if bent > GUARD_HIGH else more if bent < GUARD_LOW else 1.0
            self._factor = float(np.clip(self._factor * step, *GUARD_RANGE))


def planner(row: str, job: RoundsJob, speeds: Floats) -> Planner:
    """Of a row by name: "8" is a fixed number of steps, "rule@1" the product's at an exchange of one piece."""
    kind, _, value = row.partition("@")
    if kind in ("rule", "guard"):
        return ByRule(job, speeds, float(value), guarded=kind == "guard")
    if kind == "adacomm":
        return ByPeriod(job, speeds, AdaComm(int(value), job.budget // LOOKS, 256), smaller=False)
    if kind == "qsr":
        steps = int(value)
        return ByPeriod(job, speeds, QSR(max(steps // 4, 1), job.rate * math.sqrt(steps), 256), smaller=False)
    steps = int(kind)
    return ByPeriod(job, speeds, FixedPeriod(steps), smaller=steps <= 4)
