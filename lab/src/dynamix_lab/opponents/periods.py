"""The period of averaging parameters: how many local steps lie between two averagings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Protocol

from dynamix_lab.opponents.trial import DECAYS, Trial

ADACOMM_PARTS = 20  # how often AdaComm evaluates the loss in a run; in the paper every 60 s of 5 to 30 minutes
ADACOMM_GAMMA = 0.5  # factor on H if the loss has stopped falling


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a run at an averaging, the same on all ranks.

    samples   trained so far by all workers
    rate      learning rate of the next step
    loss      mean training loss of the previous round, NaN before the first
    """

    samples: int
    rate: float
    loss: float


class Period(Protocol):
    """A rule: `steps` is the mean number of local steps per worker. `at` a moment returns the next round's rule."""

    @property
    def steps(self) -> int: ...

    def at(self, now: Moment) -> Period: ...


@dataclass(frozen=True, slots=True)
class FixedPeriod:
    """H never changes (local SGD, arXiv 1805.09767)."""

    steps: int

    def at(self, now: Moment) -> FixedPeriod:
        return self


@dataclass(frozen=True, slots=True)
class PostLocal:
    """Post-local SGD (arXiv 1808.07217): averages after every step at first, and after every `later` steps from the
    first decay of the learning rate on, which is at `switch` samples.

    >>> [PostLocal(8, switch=1000).at(Moment(samples, 0.1, 1.0)).steps for samples in (0, 999, 1000)]
    [1, 1, 8]
    """

    later: int
    switch: int
    steps: int = 1

    def at(self, now: Moment) -> PostLocal:
        return dataclasses.replace(self, steps=self.later if now.samples >= self.switch else 1)


@dataclass(frozen=True, slots=True)
class AdaComm:
    """AdaComm (arXiv 1810.08313): H = ceil(sqrt(rate_0 / rate * F / F_0) * H_0), updated every `every` samples.

    With a constant rate H only falls: if the formula does not lower it, it is multiplied by `ADACOMM_GAMMA`. The paper
    derives (rate_0 / rate)^3 under the root and advises the first power in practice, which is used here.
    Differences: the paper's interval is 60 s, here it is a number of samples; F is the last round's mean training loss.

    >>> import itertools
    >>> seen = [Moment(samples, 0.1, loss) for samples, loss in ((10, 4.0), (100, 4.0), (210, 1.0), (320, 1.0))]
    >>> rules = itertools.accumulate(seen, lambda rule, now: rule.at(now), initial=AdaComm(16, every=100, most=64))
    >>> [rule.steps for rule in rules]
    [16, 16, 8, 4, 2]
    """

    start: int
    every: int
    most: int
    steps: int = 0
    first_loss: float = math.nan
    first_rate: float = math.nan
    last_rate: float = math.nan
    due: int = 0

    def __post_init__(self) -> None:
        if not self.steps:
            object.__setattr__(self, "steps", self.start)

    def at(self, now: Moment) -> AdaComm:
        if math.isnan(now.loss):
            return self
        if math.isnan(self.first_loss):
            rate = now.rate
            return dataclasses.replace(self, first_loss=now.loss, first_rate=rate, last_rate=rate, due=self.every)
        if now.samples < self.due:
            return self
        ratio = (self.first_rate / now.rate) * (now.loss / self.first_loss)
        wanted = max(math.ceil(math.sqrt(ratio) * self.start), 1)
        if now.rate >= self.last_rate and wanted >= self.steps:
            wanted = max(math.ceil(ADACOMM_GAMMA * self.steps), 1)
        due = (now.samples // self.every + 1) * self.every
        return dataclasses.replace(self, steps=min(wanted, self.most), last_rate=now.rate, due=due)


@dataclass(frozen=True, slots=True)
class QSR:
    """The quadratic synchronization rule (arXiv 2310.14423): H = max(H_base, floor((alpha / rate)^2)).

    >>> [QSR(4, alpha=0.2, most=100).at(Moment(0, rate, 1.0)).steps for rate in (0.2, 0.05, 0.02, 0.001)]
    [4, 16, 100, 100]
    """

    base: int
    alpha: float
    most: int
    steps: int = 0

    def __post_init__(self) -> None:
        if not self.steps:
            object.__setattr__(self, "steps", self.base)

    def at(self, now: Moment) -> QSR:
        wanted = math.floor((self.alpha / now.rate) ** 2 + 1e-9)  # rounding makes 0.2 / 0.02 slightly less than 10
        return dataclasses.replace(self, steps=min(max(self.base, wanted), self.most))


def period_of(trial: Trial) -> Period:
    """The rule that a trial names."""
    local = trial.local
    assert local is not None
    budget = trial.budget or 0
    if local.period == "post_local":
        part = DECAYS[0] if trial.schedule == "steps" else local.switch_at
        return PostLocal(local.steps, switch=math.ceil(part * budget))
    if local.period == "adacomm":
        return AdaComm(local.steps, every=max(budget // ADACOMM_PARTS, 1), most=local.most_steps)
    if local.period == "qsr":
        return QSR(local.steps, local.alpha, local.most_steps)
    return FixedPeriod(local.steps)
