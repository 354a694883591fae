"""How a run ends, and what is read from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dynamix_lab.experiment.places import Place
from dynamix_lab.opponents.runs import RunLimits, TrialRun

PARTS = 40  # of a budget: how often a run is scored on its way
MATCHES = 0.003  # of the metric: how far below another's a score may end if its time is to count


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is read from a run.

    seconds   of its clock; if it did not arrive, those until it was ended
    arrived   whether it came where the setting asks it to
    score     mean of the last five evaluations
    """

    seconds: float
    arrived: bool
    score: float


class Setting(Protocol):
    """One way of ending runs and reading them."""

    def limits(self, place: Place) -> RunLimits:
        """When a run ends."""

    def read(self, run: TrialRun, place: Place) -> Arrival:
        """What it came to."""


class Finish:
    """A budget of samples with a cosine over it: seconds to its end, and the held-out score there."""

    def limits(self, place: Place) -> RunLimits:
        budget = place.job.budget
        return RunLimits(samples=budget, every_samples=max(budget // PARTS, 1))

    def read(self, run: TrialRun, place: Place) -> Arrival:
        return Arrival(run.time_s, not run.diverged, run.mean_score())


class Reach:
    """A constant rate: seconds until the score stays at the job's target (`TrialRun.time_to_stay`)."""

    def limits(self, place: Place, limit_s: float = math.inf) -> RunLimits:
        job = place.job
        return RunLimits(
            time_s=min(place.limit_s, limit_s),
            samples=job.limit_samples,
            target=job.target,
            stays=True,
            every_samples=job.every_samples,
        )

    def read(self, run: TrialRun, place: Place) -> Arrival:
        reached = run.time_to_stay(place.job.target)
        return Arrival(run.time_s if reached is None else reached, reached is not None, run.mean_score())


class Crossing:
    """Seconds until two scores in a row are at the job's target, however noisy: what tables before 0.3 show."""

    def limits(self, place: Place, limit_s: float = math.inf) -> RunLimits:
        job = place.job
        return RunLimits(
            time_s=min(place.limit_s, limit_s),
            samples=job.limit_samples,
            target=job.target,
            every_samples=job.every_samples,
        )

    def read(self, run: TrialRun, place: Place) -> Arrival:
        reached = run.time_to_score(place.job.target)
        return Arrival(place.limit_s if reached is None else reached, reached is not None, run.mean_score())


SETTINGS: Mapping[str, Any] = {"finish": Finish(), "reach": Reach(), "crossing": Crossing()}
"""By name, as files have them."""
