"""Which jobs and rows `dynamix bench quality` compares, and how many pairs of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dynamix.errors import ConfigError
from dynamix_lab.emulator import load_scenario
from dynamix_lab.opponents.trial import SCHEDULES, LocalSettings, Trial
from dynamix_lab.statistics import pairs_needed
from dynamix_lab.tasks import Workload, make_workload
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS

SCENARIO = "device-demo"
BATCH = 64  # samples per worker at the start
EVEN = "static"  # the row that every other one is compared with
HALF_WIDTH = 0.2  # points, of an interval
FLOOR = -0.3  # points: the lower end that a default must reach
HELD_OUT = 10_000
PILOT, MOST_PAIRS = 8, 40
DATA_SETS = 4  # seeds share them in turn: seeds differ by weights, order and disturbances


@dataclass(frozen=True, slots=True)
class QualityJob:
    """A job whose model is judged when it is trained.

    options     of `make_workload`
    rate        learning rate at the start, for the global batch there
    train       samples to train on; epochs: how often each of them is used
    optimizer   "sgd": the workload's own, with momentum; "adam"
    """

    workload: str
    options: Mapping[str, Any]
    rate: float
    train: int
    epochs: int
    optimizer: str = "sgd"

    def load(self) -> Workload:
        """The workload."""
        made = make_workload(self.workload, **self.options)
        return made if self.optimizer == "sgd" else replace(made, make_optimizer=torch.optim.Adam)


def _both(name: str, job: QualityJob, rate: float) -> dict[str, QualityJob]:
    """A job, and with batch norm at a `rate` of its own."""
    normed = replace(job, options={**job.options, "norm": "batch"}, rate=rate)
    return {name: job, f"{name}-batchnorm": normed}


# Best rates at a global batch of 256 by the step-count curves (results/stepcount-*); of conv the best of three with
# even shares on the tuning seeds, and so with Adam (docs/design/quality.md).
JOBS = {
    **_both("noisy-mlp", QualityJob("mnist1d-noisy-mlp", {}, 0.2, 24_000, 6), 0.2),
    **_both("teacher-classes", QualityJob("teacher-classes", {}, 0.1, 65_536, 3), 0.1),
    **_both("conv", QualityJob("mnist1d-noisy", {"noise": 0.0}, 0.2, 24_000, 6), 0.2),
    "noisy-mlp-adam": QualityJob("mnist1d-noisy-mlp", {}, 0.008, 24_000, 6, optimizer="adam"),
    "teacher-classes-adam": QualityJob("teacher-classes", {}, 0.008, 65_536, 3, optimizer="adam"),
}


@dataclass(frozen=True, slots=True)
class QualityRow:
    """A way to train: a policy's name for `make_policy`, and what `Controller` is told besides.

    policy   None: the opponent that `local` describes
    local    how workers meet over parameters, at times or always; None: over gradients
    batch    samples per worker at the start, or of a piece. The rate follows: in proportion, with Adam by the root
    """

    policy: str | None
    global_batch: str = "adaptive"
    lr_rule: str = "auto"
    local: LocalSettings | None = None
    batch: int = BATCH


# A controller watches its learned policy unless it is told not to; so they do here.
_DYNAMIX = "guarded:dynamix"
ROWS = {
    EVEN: QualityRow("static"),
    "dynamix": QualityRow(_DYNAMIX),
    "dynamix-fixed": QualityRow(_DYNAMIX, global_batch="fixed"),
    "dynamix-none": QualityRow(_DYNAMIX, lr_rule="none"),
    "dynamix-sqrt": QualityRow(_DYNAMIX, lr_rule="sqrt"),
    "dynamix-linear": QualityRow(_DYNAMIX, lr_rule="linear"),
    "dynamix-adascale": QualityRow(_DYNAMIX, lr_rule="adascale"),
    "lb_bsp": QualityRow("lb_bsp"),
    "static-32": QualityRow("static", batch=32),
    "static-128": QualityRow("static", batch=128),
    "lb_bsp-auto": QualityRow("lb_bsp", lr_rule="none", local=LocalSettings(steps=2, period="auto")),
    # The number of steps follows from what a meeting takes, and grows as the rate falls.
    "lb_bsp-parameters": QualityRow("lb_bsp", lr_rule="none", local=LocalSettings(steps=2, period="ratio")),
    # 4 steps between meetings at the first rate, and more with the square of its fall.
    "qsr": QualityRow(None, lr_rule="none", local=LocalSettings(steps=4, period="qsr", most_steps=64)),
}
STATIC = (EVEN, "static-32", "static-128")  # the best of which an answer at equal time is compared with
USUAL = tuple(name for name, row in ROWS.items() if row.local is None and row.batch == BATCH)
SIZED = ("dynamix", "dynamix-fixed")


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """What one call runs.

    jobs, rows   of `JOBS` and `ROWS`; even shares among the rows
    sized        rows whose pairs go on after the pilot, until their interval is narrow enough
    pilot        pairs of every row
    max_pairs    no row gets more
    pairs        job -> row -> pairs, where more than the pilot's
    seed         of the first pair
    half_width   points of accuracy, of an interval that is narrow enough
    rate_factor  times the jobs' learning rates, for every row alike
    schedule     of the learning rate, by samples
    equal_time   every row also trains for as long as even shares take for the job, its schedule planned for that
    train, test, epochs   instead of the job's own; None: those
    """

    jobs: tuple[str, ...] = tuple(JOBS)
    rows: tuple[str, ...] = USUAL
    sized: tuple[str, ...] = SIZED
    pilot: int = PILOT
    max_pairs: int = MOST_PAIRS
    pairs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seed: int = 0
    half_width: float = HALF_WIDTH
    scenario: str = SCENARIO
    rate_factor: float = 1.0
    schedule: str = "cosine"
    equal_time: bool = False
    train: int | None = None
    test: int = HELD_OUT
    epochs: int | None = None

    @classmethod
    def quick(cls) -> QualityPlan:
        """A smoke run: one job and its batch norm, three rows, two short pairs; no figures worth keeping."""
        jobs = ("teacher-classes", "teacher-classes-batchnorm")
        return cls(jobs, (EVEN, "dynamix", "dynamix-fixed"), sized=(), pilot=2, train=8192, test=500, epochs=1)

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        _known("jobs", self.jobs, JOBS)
        _known("rows", self.rows, ROWS)
        if EVEN not in self.rows:
            raise ConfigError("rows", ", ".join(self.rows), f"{EVEN} among them", f"add {EVEN}: all are compared to it")
        for name in self.sized:
            if name not in ROWS:
                raise ConfigError("sized", name, ", ".join(ROWS), "check the spelling")
        if not 2 <= self.pilot <= self.max_pairs:
            fix = "a spread is known from two pairs on"
            raise ConfigError("pilot, max_pairs", (self.pilot, self.max_pairs), "2 or more, then at least as many", fix)
        tuned = self.rows != (EVEN,) and set(range(self.seed, self.seed + self.max_pairs)) & set(TUNING_SEEDS)
        if self.seed < 0 or tuned:
            allowed = f"0 or more, without {', '.join(map(str, TUNING_SEEDS))}, which rates are chosen on"
            raise ConfigError("seed", self.seed, allowed, "take others")
        for name, value in (("half_width", self.half_width), ("rate_factor", self.rate_factor)):
            if not 0 < value < float("inf"):
                raise ConfigError(name, value, "above 0", "check the argument")
        if self.schedule not in SCHEDULES:
            raise ConfigError("schedule", self.schedule, ", ".join(SCHEDULES), "check the spelling")
        if load_scenario(self.scenario).device is None:
            raise ConfigError("scenario", self.scenario, "one whose hosts have a device", f"take {SCENARIO}")

    def pairs_of(self, job: str, row: str) -> int:
        """Pairs of a row at a job; even shares run in every pair that any row runs in."""
        own = self.pairs.get(job, {})
        return max([self.pilot, *own.values()]) if row == EVEN else max(self.pilot, own.get(row, 0))

    @property
    def seeds(self) -> list[int]:
        """Of all pairs of any job."""
        most = max(self.pairs_of(job, EVEN) for job in self.jobs)
        return list(range(self.seed, self.seed + most))

    def job(self, name: str) -> QualityJob:
        """A job with this plan's samples, epochs and rate."""
        job = JOBS[name]
        return replace(
            job, rate=self.rate_factor * job.rate, train=self.train or job.train, epochs=self.epochs or job.epochs
        )

    def trial(self, job: str, row: str, samples: int | None = None) -> Trial:
        """What a run does that trains on `samples`; None: on all samples of the job's epochs."""
        of, how = self.job(job), ROWS[row]
        times = how.batch / BATCH
        rate, local = of.rate * (times if of.optimizer == "sgd" else times**0.5), how.local
        if local is not None and local.period == "qsr":  # so that the first rate gives the base number of steps
            local = replace(local, alpha=rate * local.steps**0.5)
        return Trial(
            row,
            how.policy,
            how.batch,
            rate,
            how.lr_rule,
            local=local,
            schedule=self.schedule,
            budget=samples or of.train * of.epochs,
            global_batch=how.global_batch,
        )

    def with_pairs(self, differences: Mapping[str, Mapping[str, Sequence[float]]]) -> QualityPlan:
        """This plan with the pairs that the spread asks for; an equal one where none are missing.

        differences   job -> row -> points of accuracy over even shares, pair by pair
        """
        pairs = {job: dict(rows) for job, rows in self.pairs.items()}
        for job in self.jobs:
            for row in (row for row in self.sized if row in self.rows and row != EVEN):
                seen = differences[job][row]
                most = max(self.max_pairs, len(seen))
                needed = pairs_needed(float(np.std(seen, ddof=1)), self.half_width, most=most)
                if needed > len(seen):
                    pairs.setdefault(job, {})[row] = needed
        return replace(self, pairs=pairs)


def _known(name: str, given: Sequence[str], known: Mapping[str, Any]) -> None:
    for one in given:
        if one not in known:
            raise ConfigError(name, one, ", ".join(known), "check the spelling")
    if not given or len(set(given)) < len(given):
        raise ConfigError(name, ", ".join(given), "one or more that differ", "name each once")
