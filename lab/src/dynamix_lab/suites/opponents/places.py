"""What the suite needs to know of each job and cluster beside what they say themselves. Fixed before rows are run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dynamix.errors import ConfigError
from dynamix_lab.opponents.runs import TrialRun
from dynamix_lab.opponents.world import Outage
from dynamix_lab.tasks.claim_jobs import CLAIM_JOBS


@dataclass(frozen=True, slots=True)
class JobNumbers:
    """A job's numbers, the same for every row.

    workload       its name
    target         metric at which a run has arrived
    rates          global batch -> best learning rate there, of the job's step-count curve
    budget         samples that runs are planned for: what static needs where the step-count curve bends
    batch_sizes    small, middle and large batch of a worker, for the grids
    periods        few and many local steps between meetings, for the grids
    every_samples  between scores
    limit_s        clock time at which a run is ended
    """

    workload: str
    target: float
    rates: Mapping[int, float]
    budget: int
    batch_sizes: tuple[int, int, int]
    periods: tuple[int, int]
    every_samples: int
    limit_s: float

    @property
    def limit_samples(self) -> int:
        """Samples after which a run is ended: six budgets."""
        return 6 * self.budget

    def worth(self, run: TrialRun) -> float:
        """Seconds to the target, for `tune`; infinite where it was not reached."""
        reached = run.time_to_score(self.target)
        return math.inf if reached is None else reached


_SIZES, _PERIODS = (32, 64, 128), (8, 32)


def _claimed(workload: str, budget: int) -> JobNumbers:
    """Of a frozen job, with the target and the rates of its curve."""
    job = CLAIM_JOBS[workload]
    return JobNumbers(workload, job.target, job.rates, budget, _SIZES, _PERIODS, 2000, 240.0)


JOBS = {
    job.workload: job
    for job in (
        JobNumbers("mnist1d", 0.947, {512: 0.05}, 60_000, (16, 32, 128), _PERIODS, 4000, 240.0),
        _claimed("teacher", 48_000),
        _claimed("teacher-classes", 70_000),
        _claimed("mnist1d-noisy-mlp", 72_000),
    )
}
V2 = (
    "device-even/teacher-classes",
    "device-uneven/teacher",
    "device-neighbours/mnist1d-noisy-mlp",
    "device-slow-link/teacher",
    "device-pai/teacher-classes",
    "device-paper-like/teacher",
    "device-replaced/mnist1d-noisy-mlp",
)
"""The second set: claims are made here. Fixed before any policy was run on them."""
OUTAGES = {"device-replaced": (Outage(host=2, from_s=15.0, until_s=20.0),)}


def job_numbers(workload: str) -> JobNumbers:
    """Raises `ConfigError` for a workload whose numbers were not fixed here."""
    if workload not in JOBS:
        raise ConfigError("workload", workload, ", ".join(JOBS), "take one whose numbers were fixed beforehand")
    return JOBS[workload]


def outages(scenario: str) -> tuple[Outage, ...]:
    """Hosts that a scenario loses for a time, on the virtual clock."""
    return OUTAGES.get(scenario, ())
