"""The record of an opponent's run, live or on the virtual clock, and when a run ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from dynamix.errors import ConfigError
from dynamix.window import Ints
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.statistics import time_to_target
from dynamix_lab.tasks import Arrays, Workload
from dynamix_lab.tasks.base import evaluating

HELD_OUT = 1000  # samples of the test set on which a run is scored
MEAN_OF = 5  # times the samples between two scores: scores are noisy, so their mean over this many samples counts
FALLS = 0.005  # of the metric: by how much later means may fall below a target that was reached
LATER = 10  # times the samples between two scores: how long a reached target must stay
ROWS = 250  # of the data in one pass when a model is scored


@dataclass(frozen=True, slots=True)
class RunLimits:
    """When a run ends, and how often it is scored. The first limit reached ends it.

    time_s    seconds of the run's clock
    samples   trained by all workers
    target    metric that two scores in a row reach; target_loss is the same for the held-out loss
    budget    of the trial, in samples or in progress (`Trial.count`)
    stays     the target must stay: the run continues until `reached_for_good` has seen enough
    every_samples, every_s   between scores; the start and the end are scored too

    Raises `ConfigError` if nothing would end the run.
    """

    time_s: float | None = None
    samples: int | None = None
    budget: int | None = None
    target: float | None = None
    target_loss: float | None = None
    stays: bool = False
    every_samples: int | None = None
    every_s: float | None = None

    def __post_init__(self) -> None:
        if self.time_s is None and self.samples is None:
            raise ConfigError("time_s, samples", None, "one of them or both", "say when the run ends at the latest")
        if self.stays and (self.target is None or self.every_samples is None):
            fix = "give target and every_samples"
            raise ConfigError("stays", True, "a target, and scores after so many samples", fix)
        for name in ("time_s", "samples", "budget", "every_samples", "every_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(name, value, "above 0", "check the limits of the run")

    def spent(self, samples: int, budget: float | None) -> bool:
        """Whether the run has used its samples or its budget. `budget`: the part used so far; None: its samples."""
        counted = samples if budget is None else budget
        reached = ((self.samples, samples), (self.budget, counted))
        return any(most is not None and count >= most for most, count in reached)

    def passed(self, before: tuple[float, float], now: tuple[float, float]) -> bool:
        """Whether a score is due between two moments, each (seconds, samples)."""
        steps = zip((self.every_s, self.every_samples), before, now, strict=True)
        return any(every is not None and _grid(at, then, every) for every, then, at in steps)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The model at one moment of the run's clock: held-out loss (infinite if it is NaN), and the workload's metric
    ("score")."""

    time_s: float
    samples: int
    loss: float
    score: float


@dataclass(frozen=True, slots=True)
class TrialRun:
    """One run of one trial.

    cluster            "virtual" or "live": the clock of its seconds
    evaluations        in order; the first is of the untrained model
    meetings_s         (k,) when each synchronous step, or each round of local steps, ended
    samples_by_worker  (W,) trained by each worker
    steps              optimizer steps; with local steps those of the worker that took most
    overrun            too many steps of an emulated device were late, so the run is no measurement
    waiting            fraction of all workers' time spent waiting for slower ones; None: not measured
    sizes              each change of the workers' batches, as (time_s, samples of each); empty: not recorded
    """

    trial: Trial
    seed: int
    cluster: str
    evaluations: tuple[Evaluation, ...]
    meetings_s: tuple[float, ...]
    samples_by_worker: tuple[int, ...]
    steps: int
    overrun: bool = False
    waiting: float | None = None
    sizes: tuple[tuple[float, tuple[int, ...]], ...] = ()

    @property
    def samples(self) -> int:
        """Samples trained by all workers."""
        return sum(self.samples_by_worker)

    @property
    def time_s(self) -> float:
        """When the last step or round ended."""
        return self.meetings_s[-1] if self.meetings_s else 0.0

    @property
    def diverged(self) -> bool:
        """Whether the loss is no longer finite."""
        return not math.isfinite(self.evaluations[-1].loss)

    def mean_score(self, window: float) -> float:
        """The mean of the evaluations in the last `window` samples; 0 if the loss is not finite."""
        if self.diverged:
            return 0.0
        last = self.evaluations[-1]
        there = [e.score for e in self.evaluations[1:] if e.samples > last.samples - window]
        return fmean(there or [last.score])

    def time_to_stay(self, target: float, window: float) -> float | None:
        """Seconds until the mean score of the last `window` samples reached `target` and stayed; None if it did not.

        Interpolated between the last mean below the target and the first at it, each at its last evaluation.
        """
        if self.diverged:
            return None
        means = mean_scores([e.samples for e in self.evaluations], [e.score for e in self.evaluations], window)
        if (at := reached_for_good(means, target)) is None:
            return None
        here, before = means[at], means[at - 1]
        if here is None or before is None or before >= target:
            return self.evaluations[at].time_s
        then_s, now_s = self.evaluations[at - 1].time_s, self.evaluations[at].time_s
        return then_s + (target - before) / (here - before) * (now_s - then_s)

    def time_to_score(self, target: float) -> float | None:
        """Seconds until the metric reached `target` for good (two scores in a row); None if it did not."""
        return time_to_target([e.time_s for e in self.evaluations], [e.score for e in self.evaluations], target)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON: evaluations as columns, NaN and infinity as None."""
        columns = {
            name: [_plain(getattr(e, name)) for e in self.evaluations]
            for name in ("time_s", "samples", "loss", "score")
        }
        return {
            "trial": self.trial.to_dict(),
            "seed": self.seed,
            "cluster": self.cluster,
            "evaluations": columns,
            "meetings_s": [round(t, 6) for t in self.meetings_s],
            "samples_by_worker": list(self.samples_by_worker),
            "steps": self.steps,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TrialRun:
        """The inverse of `to_dict`."""
        columns = plain["evaluations"]
        rows = zip(*(columns[name] for name in ("time_s", "samples", "loss", "score")), strict=True)
        evaluations = tuple(Evaluation(t, n, _number(loss, math.inf), score) for t, n, loss, score in rows)
        return cls(
            trial=Trial.from_dict(plain["trial"]),
            seed=plain["seed"],
            cluster=plain["cluster"],
            evaluations=evaluations,
            meetings_s=tuple(plain["meetings_s"]),
            samples_by_worker=tuple(plain["samples_by_worker"]),
            steps=plain["steps"],
        )


def mean_scores(samples: Sequence[int], scores: Sequence[float], window: float) -> list[float | None]:
    """The mean of the evaluations in the last `window` samples, at each evaluation; None before so many were trained.

    Windows are in samples, so that rows with rare scores (one per averaging) and rows with a score after each step
    average over the same length. The untrained model does not count.

    >>> mean_scores([0, 10, 20, 30], [0.0, 0.2, 0.4, 0.6], 20)
    [None, None, 0.30000000000000004, 0.5]
    """
    found: list[float | None] = []
    for at, now in enumerate(samples):
        there = [score for n, score in zip(samples[1 : at + 1], scores[1 : at + 1], strict=True) if n > now - window]
        found.append(fmean(there) if there and now >= window else None)
    return found


def reached_for_good(means: Sequence[float | None], target: float) -> int | None:
    """The index of the first mean at `target` after which none falls below it by more than `FALLS`; None if none.

    A single noisy score may cross the target by luck; a mean of several that stays does not.

    >>> reached_for_good([None, 0.9, 0.5], 0.8), reached_for_good([None, 0.5, 0.9, 0.9], 0.8)
    (None, 2)
    """
    found = None
    for at, mean in enumerate(means):
        if mean is None:
            continue
        if found is None:
            found = at if mean >= target else None
        elif mean < target - FALLS:
            found = None
    return found


class HeldOut:
    """A fixed part of the test set, evenly spaced."""

    def __init__(self, workload: Workload, test: Arrays, most: int = HELD_OUT) -> None:
        self.workload = workload
        chosen = np.linspace(0, len(test) - 1, min(most, len(test))).round().astype(np.int64)
        inputs, targets = test.__getitems__(chosen.tolist())
        self._targets = targets
        self._parts = list(zip(inputs.split(ROWS), targets.split(ROWS), strict=True))

    def score(self, model: nn.Module) -> tuple[float, float]:
        """(mean loss, metric) of the model in eval mode. Restores its mode."""
        with evaluating(model):
            if self.workload.count is None:
                outputs = torch.cat([model(inputs) for inputs, _ in self._parts])
                loss = float(self.workload.loss(outputs, self._targets).item())
                metric = self.workload.metric(outputs, self._targets) if math.isfinite(loss) else 0.0
            else:
                loss, metric = self._by_count(model)
        return (loss, metric) if math.isfinite(loss) else (math.inf, 0.0)

    def _by_count(self, model: nn.Module) -> tuple[float, float]:
        """Means over parts, because the outputs of all tokens would not fit into memory."""
        loss = metric = weight = 0.0
        for inputs, targets in self._parts:
            outputs, part = model(inputs), float(self.workload.divisor(targets))
            loss += part * float(self.workload.loss(outputs, targets).item())
            metric += part * self.workload.metric(outputs, targets)
            weight += part
        return loss / weight, metric / weight


class RunLog:
    """A run in progress: counts the samples, and says when to score and when to end."""

    def __init__(self, trial: Trial, limits: RunLimits, workers: int) -> None:
        self.trial, self.limits = trial, limits
        self.meetings_s = list[float]()
        self.evaluations = list[Evaluation]()
        self.by_worker: Ints = np.zeros(workers, dtype=np.int64)
        self.steps = 0
        self._spent: float | None = None

    @property
    def samples(self) -> int:
        return int(self.by_worker.sum())

    @property
    def time_s(self) -> float:
        return self.meetings_s[-1] if self.meetings_s else 0.0

    def met(self, time_s: float, samples: Ints, steps: int = 1, *, spent: float | None = None) -> None:
        """Record that a step or round ended at `time_s`, in which workers trained on `samples` (W,).

        spent   part of the trial's budget used so far; None: its samples
        """
        self.meetings_s.append(time_s)
        self.by_worker = self.by_worker + samples
        self.steps += steps
        self._spent = spent

    @property
    def over(self) -> bool:
        """Whether clock or samples have reached their limit."""
        limits = self.limits
        out_of_time = limits.time_s is not None and self.time_s >= limits.time_s
        return out_of_time or limits.spent(self.samples, self._spent)

    @property
    def due(self) -> bool:
        """Whether the model must be scored now."""
        if not self.evaluations or self.over:
            return True
        last = self.evaluations[-1]
        return self.limits.passed((last.time_s, last.samples), (self.time_s, self.samples))

    def scored(self, loss: float, score: float, *, at: tuple[float, int] | None = None) -> None:
        """Record a score of the present model, or of the model `at` that time and number of samples."""
        time_s, samples = at or (self.time_s, self.samples)
        self.evaluations.append(Evaluation(time_s, samples, loss, score))

    @property
    def arrived(self) -> bool:
        """Whether the target is reached (see `RunLimits`), or cannot be because the loss is not finite."""
        if self.evaluations and not math.isfinite(self.evaluations[-1].loss):
            return True
        last, limits = self.evaluations[-2:], self.limits
        if limits.stays and limits.target is not None:
            return self._stayed(limits.target)
        by_score = limits.target is not None and all(e.score >= limits.target for e in last)
        by_loss = limits.target_loss is not None and all(e.loss <= limits.target_loss for e in last)
        return len(last) == 2 and (by_score or by_loss)

    def _stayed(self, target: float) -> bool:
        """Whether the target was reached long enough ago. Computed after each score, as only scores change it."""
        every, seen = self.limits.every_samples, [e.samples for e in self.evaluations]
        if every is None or seen[-1] != self.samples:
            return False
        means = mean_scores(seen, [e.score for e in self.evaluations], MEAN_OF * every)
        found = reached_for_good(means, target)
        return found is not None and seen[-1] - seen[found] >= LATER * every

    def result(self, seed: int, cluster: str) -> TrialRun:
        """The record of the run."""
        return TrialRun(
            self.trial,
            seed,
            cluster,
            tuple(self.evaluations),
            tuple(self.meetings_s),
            tuple(self.by_worker.tolist()),
            self.steps,
        )


def _grid(now: float, before: float, every: float) -> bool:
    """Whether a multiple of `every` lies after `before` and not after `now`."""
    return math.floor(now / every + 1e-9) > math.floor(before / every + 1e-9)


def _plain(value: float) -> float | None:
    return None if not math.isfinite(value) else round(value, 6)


def _number(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
