"""How a run ends, and which figure is read from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from dynamix_lab.experiment.places import Place
from dynamix_lab.opponents.runs import MEAN_OF, RunLimits, TrialRun

PARTS = 40  # scores per budget during a run
LONGEST = 3  # budgets of samples; ends a run whose score does not stay
MATCHES = 0.003  # of the metric: a score may be lower than the other row's by this much for its time to count


@dataclass(frozen=True, slots=True)
class Arrival:
    """The figure read from a run.

    seconds    on its clock; if it did not arrive, until it was ended
    arrived    whether it reached the setting's end
    score      mean over the last eighth of a budget
    """

    seconds: float
    arrived: bool
    score: float


class Setting(Protocol):
    """One way to end runs and to read them."""

    def limits(self, place: Place, limit_s: float = math.inf) -> RunLimits:
        """When a run ends; `limit_s` ends it earlier."""

    def read(self, run: TrialRun, place: Place) -> Arrival:
        """The run's figure."""


class Finish:
    """A budget of samples with a cosine schedule: seconds to its end, and the held-out score there."""

    def limits(self, place: Place, limit_s: float = math.inf) -> RunLimits:
        budget, ends_s = place.job.budget, None if math.isinf(limit_s) else limit_s
        return RunLimits(time_s=ends_s, samples=budget, every_samples=max(budget // PARTS, 1))

    def read(self, run: TrialRun, place: Place) -> Arrival:
        return Arrival(run.time_s, not run.diverged, run.mean_score(MEAN_OF * (place.job.budget // PARTS)))


class Match(Finish):
    """A budget that each row counts in its own way: a row that counts progress trains on more samples."""

    def limits(self, place: Place, limit_s: float = math.inf) -> RunLimits:
        finish = super().limits(place, limit_s)
        return replace(finish, budget=place.job.budget, samples=LONGEST * place.job.budget)


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Seconds until the job's target.

    stays   the mean score must reach the target and stay there (`TrialRun.time_to_stay`). False: two scores in a row
            suffice, however noisy, as in tables before 0.3
    """

    stays: bool

    def limits(self, place: Place, limit_s: float = math.inf) -> RunLimits:
        job = place.job
        return RunLimits(
            time_s=min(place.limit_s, limit_s),
            samples=LONGEST * job.budget if self.stays else job.limit_samples,
            target=job.target,
            stays=self.stays,
            every_samples=job.every_samples,
        )

    def read(self, run: TrialRun, place: Place) -> Arrival:
        job, window = place.job, MEAN_OF * place.job.every_samples
        reached = run.time_to_stay(job.target, window) if self.stays else run.time_to_score(job.target)
        ended_s = run.time_s if self.stays else place.limit_s
        return Arrival(ended_s if reached is None else reached, reached is not None, run.mean_score(window))


OF_BUDGET = ("finish", "match")  # settings in which a run ends with its budget, under a schedule
SETTINGS: Mapping[str, Setting] = {
    "finish": Finish(),
    "match": Match(),
    "reach": ToTarget(True),
    "crossing": ToTarget(False),
}
"""The settings by their names in experiment files."""
