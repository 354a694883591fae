"""Where runs take place: a job, with its numbers and recipes, on a cluster. All is fixed before rows run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from dynamix.errors import ConfigError
from dynamix.runtime.rules import AUTO, root_of_gain, rule_of
from dynamix_lab.emulator import Scenario, load_scenario
from dynamix_lab.experiment.regimes import EXTRAS, is_regime, regime, regime_places
from dynamix_lab.opponents.buckets import gradient_buckets
from dynamix_lab.opponents.course import Course
from dynamix_lab.opponents.virtual import INTERVAL
from dynamix_lab.opponents.world import DeviceWorld, Outage
from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.claim_jobs import CLAIM_JOBS

DISTURBANCE = 1000  # offset from the seed of model and data; all rows of one seed share both
REGIME_LONGER = 4  # links may be slow there, so runs may take longer


@dataclass(frozen=True, slots=True)
class JobNumbers:
    """A job's numbers, the same for every row.

    workload       its name
    target         the metric at which a run has arrived; 1, which is never reached, if only budgets end runs
    budget         samples for which runs are planned
    every_samples  between scores of a run to the target
    limit_s        clock time at which a run to the target is ended
    recipes        schedule -> batch of a worker -> the best rate for one worker alone (`dynamix bench recipes`)
    rates          global batch -> its best constant rate, from which tuning begins
    batch_sizes    small, middle and large batch of a worker, for tuning
    periods        few and many local steps between averagings, for tuning
    """

    workload: str
    target: float
    budget: int
    every_samples: int
    recipes: Mapping[str, Mapping[int, float]]
    rates: Mapping[int, float] = field(default_factory=dict)
    limit_s: float = 240.0
    batch_sizes: tuple[int, int, int] = (32, 64, 128)
    periods: tuple[int, int] = (8, 32)

    @property
    def limit_samples(self) -> int:
        """Samples after which a run to the target is ended: six budgets."""
        return 6 * self.budget

    def usual_factor(self, workers: int) -> float:
        """W for W workers; its root with an optimizer that divides by the size of its gradients."""
        optimizer = make_workload(self.workload).make_optimizer([nn.Parameter(torch.zeros(1))])
        return math.sqrt(workers) if rule_of(AUTO, optimizer) is root_of_gain else float(workers)

    def recipe(self, schedule: str, batch: int) -> float:
        """The rate of one worker's recipe. Raises `ConfigError` if none is recorded for that batch."""
        known = self.recipes.get(schedule, {})
        if batch not in known:
            allowed = ", ".join(map(str, known)) or "none yet"
            raise ConfigError(f"batch of a recipe of {self.workload}", batch, allowed, "find its best rate first")
        return known[batch]


def _claimed(workload: str, budget: int, recipes: Mapping[str, Mapping[int, float]]) -> JobNumbers:
    """A frozen job, with the target and the rates of its curve."""
    known = CLAIM_JOBS[workload]
    return JobNumbers(workload, known.target, budget, 2000, recipes, known.rates)


def _recipes(cosine: tuple[float, float], constant: tuple[float, float]) -> dict[str, dict[int, float]]:
    """Rates for 32 and 128 samples."""
    pairs = (("cosine", cosine), ("constant", constant))
    return {name: dict(zip((32, 128), rates, strict=True)) for name, rates in pairs}


def _fresh(workload: str, target: float, budget: int, recipes: Mapping[str, Mapping[int, float]]) -> JobNumbers:
    """A job of the first run. Tuning begins at its recipes' rates."""
    return JobNumbers(workload, target, budget, budget // 40, recipes, recipes["constant"])


def _of_rates(workload: str, budget: int, rate: float) -> JobNumbers:
    """A job for comparing rules for the rate: a budget with a cosine, and one worker's best rate for 32 samples."""
    return JobNumbers(workload, 1.0, budget, budget // 40, {"cosine": {32: rate}})


def _of_paper(workload: str, cosine: float, constant: float) -> JobNumbers:
    """A job with the DYNAMIX paper's settings: 24 epochs, and one worker's best rates for 32 samples."""
    return JobNumbers(workload, 1.0, 192_000, 192_000 // 40, {"cosine": {32: cosine}, "constant": {32: constant}})


JOBS = {
    job.workload: job
    for job in (
        _claimed("teacher", 48_000, _recipes((0.025, 0.1), (0.00625, 0.025))),
        _claimed("teacher-classes", 70_000, _recipes((0.05, 0.2), (0.025, 0.1))),
        _claimed("mnist1d-noisy-mlp", 72_000, _recipes((0.05, 0.2), (0.025, 0.1))),
        _fresh("pulse", 0.66, 40_000, _recipes((0.025, 0.1), (0.0125, 0.05))),
        _fresh("pulse-2d", 0.545, 60_000, _recipes((0.04, 0.2), (0.02, 0.1))),
        _fresh("pysource-windows", 0.431, 48_000, _recipes((0.016, 0.032), (0.016, 0.032))),
        _fresh("pysource-windows-lstm", 0.455, 48_000, _recipes((1 / 32, 1 / 16), (1 / 64, 1 / 32))),
        _of_rates("mnist1d", 48_000, 0.05),
        _of_rates("digits-mlp", 28_740, 0.2),
        _of_rates("digits-adamw", 28_740, 0.016),
        _of_rates("pysource-pieces", 48_000, 0.5),
        _of_rates("pysource-pieces-adamw", 48_000, 0.016),
        _of_paper("mnist1d-vgg", 0.04, 0.01),
        _of_paper("mnist1d-vgg-adam", 0.008, 0.002),
        _of_paper("mnist1d-resnet", 0.02, 0.02),
        _of_paper("mnist1d-resnet-adam", 0.008, 0.004),
    )
}
OUTAGES = {
    "device-replaced": (Outage(host=2, from_s=15.0, until_s=20.0),),
    "device-swapped": (Outage(host=1, from_s=2.4, until_s=3.2),),
}
"""By scenario: the hosts that it loses for a time, on the virtual clock."""

_TIMES = re.compile(r"(.+)-x([1-9]\d*)")  # a scenario with all its hosts several times


@dataclass(frozen=True, slots=True)
class Place:
    """A job on a cluster of device hosts: a scenario and a workload. As text "device-even/teacher".

    budget   samples of a run, instead of the job's own

    >>> Place.of("device-even/teacher").key
    'device-even-teacher'
    """

    scenario: str
    workload: str
    budget: int | None = None

    @classmethod
    def of(cls, text: str, budget: int | None = None) -> Place:
        """Parse a place. Raises `ConfigError` if the text is no place, and if its hosts have no device."""
        scenario, slash, workload = text.rpartition("/")
        if not slash:
            raise ConfigError("place", text, "a scenario and a workload, as in device-even/teacher", "name both")
        place = cls(scenario, workload, budget)
        if workload not in JOBS:
            fix = "take one whose numbers were fixed beforehand"
            raise ConfigError("workload", workload, ", ".join(JOBS), fix)
        if place.load().device is None:
            raise ConfigError("place", text, "a scenario of device hosts, whose times are known", "take device-even")
        return place

    def load(self) -> Scenario:
        """The scenario: shipped, a file, or a regime's. "device-paper-like-x4" has each device-paper-like host 4 times.

        >>> Place.of("device-paper-like-x2/teacher").load().workers
        16
        """
        if is_regime(self.scenario):
            return regime(self.scenario, self.workload)
        if (times := _TIMES.fullmatch(self.scenario)) is None:
            return load_scenario(self.scenario)
        one = load_scenario(times[1])
        return one.model_copy(update={"hosts": one.hosts * int(times[2])})

    @property
    def key(self) -> str:
        """The place as part of file names."""
        return f"{self.scenario.rpartition('/')[2].removesuffix('.yaml')}-{self.workload}"

    @property
    def job(self) -> JobNumbers:
        """The job's numbers."""
        known = JOBS[self.workload]
        return known if self.budget is None else replace(known, budget=self.budget)

    @property
    def limit_s(self) -> float:
        """Clock time at which a run to the target is ended."""
        return self.job.limit_s * (REGIME_LONGER if is_regime(self.scenario) else 1)

    def world(self, seed: int, batch_size: int) -> DeviceWorld:
        """The virtual cluster of a run with this seed. Each worker begins with `batch_size` samples."""
        return DeviceWorld(
            self.load(),
            seed=DISTURBANCE + seed,
            batch_size=batch_size,
            buckets=gradient_buckets(make_workload(self.workload).make_model(0)),
            outages=self.outages,
            extras=EXTRAS if is_regime(self.scenario) else None,
            interval=INTERVAL,
        )

    @property
    def outages(self) -> tuple[Outage, ...]:
        """Times in which hosts are lost, on the virtual clock."""
        return OUTAGES.get(self.scenario, ())

    def least_s(self, seed: int, batch_size: int, outages: Sequence[Outage] = ()) -> float:
        """A lower bound, s, on the time in which these devices compute the job's budget, with exact shares.

        batch_size   mean samples per worker and step: every device needs the fixed time of each step

        outages      times in which devices compute nothing until they are replaced

        Exchange, update and waiting count as 0 s.
        """
        scenario, job = self.load(), self.job
        device = scenario.device
        assert device is not None
        steps, course = math.ceil(job.budget / (batch_size * scenario.workers)), Course(scenario, DISTURBANCE + seed)
        now_s, work_s = 0.0, [0.0] * scenario.workers
        ends = sorted({at for outage in outages for at in (outage.from_s, outage.until_s)})
        each_s = (device.per_sample_ms + device.per_cost_ms * self._mean_cost(seed)) / 1000
        fixed_s = steps * device.fixed_ms / 1000

        def samples(more_s: float, speeds: list[float]) -> float:
            return sum(
                max(done + more_s * speed - fixed_s, 0.0) / each_s for done, speed in zip(work_s, speeds, strict=True)
            )

        while True:
            stretch = course.at(now_s)
            lost = {outage.host for outage in outages if outage.from_s <= now_s < outage.until_s}
            speeds = [0.0 if host in lost else speed for host, speed in enumerate(stretch.speeds)]
            until_s = min([stretch.until_s, *(at for at in ends if at > now_s)])
            if math.isinf(until_s) or samples(until_s - now_s, speeds) >= job.budget:
                break
            work_s = [done + (until_s - now_s) * speed for done, speed in zip(work_s, speeds, strict=True)]
            now_s = until_s
        low, high = 0.0, 1.0
        while samples(high, speeds) < job.budget:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if samples(middle, speeds) < job.budget else (low, middle)
        return now_s + high

    def _mean_cost(self, seed: int) -> float:
        workload = make_workload(self.workload)
        return 0.0 if workload.costs is None else float(workload.costs(workload.make_data(seed).train).mean())


def places_named(names: tuple[str, ...]) -> tuple[str, ...]:
    """Parse names of places. "regimes" stands for all 24 of the map of regimes. Raises `ConfigError` for others."""
    found = [text for name in names for text in (regime_places() if name == "regimes" else (name,))]
    keys = [Place.of(text).key for text in found]
    if not keys or len(set(keys)) < len(keys):
        raise ConfigError("places", ", ".join(found), "one or more that differ", "name scenario/workload")
    return tuple(found)
