"""One way to train a job: a row of the opponents' table with all of its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

from torch.optim import Optimizer

from dynamix.errors import ConfigError
from dynamix.runtime.rules import AUTO, RULES

PERIODS = ("fixed", "post_local", "adacomm", "qsr", "ratio", "auto")
OURS = ("fixed", "ratio", "auto")  # periods of `Controller`, under a policy
MOMENTUM = ("kept", "averaged", "reset")
OUTER = ("none", "nesterov")
SCHEDULES = ("constant", "cosine", "warm_cosine", "steps")
FIXED_TOTAL = ("dbs", "lb_bsp")  # policies that keep the initial global batch, as fixed shares do
COUNTS = ("samples", "progress")
GLOBAL_BATCHES = ("adaptive", "fixed")
WARM_UP = 0.05  # of the budget, during which "warm_cosine" raises the rate (arXiv 1706.02677: 5 of 90 epochs)
LEAST_RATE = 0.01  # of the first rate: the end of the cosine, so that a run beyond its budget still trains
DECAYS, DECAY = (0.5, 0.75), 0.1  # "steps": at these fractions of the budget the rate is multiplied by DECAY

Settings = TypeVar("Settings", "LocalSettings", "Trial")


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How workers with local steps average their parameters.

    period           the rule for the number of steps between two averagings (`periods`). "ratio" is `Controller`'s own;
                     so is "auto", which averages gradients instead when that is faster; both need a policy
    steps            mean H over workers for "fixed"; H_0 of AdaComm, H_base of QSR, H after post-local's switch; for
                     "ratio" that of the first rounds, in which speeds are measured
    momentum         the optimizer's state at an averaging: each worker keeps its own, it is averaged, or it is reset
    outer            "nesterov": an outer SGD step along the mean movement (DiLoCo); "none": the mean itself
    outer_rate, outer_momentum   of the outer step
    proportional     steps in proportion to measured speed (DyLU); False: the same number for all
    smaller_pieces   a worker whose one step takes longer than a fair round takes smaller batches; if workers average
                     after every step, batches are in proportion to speed
    speeds           given relative speeds of the workers; None: measured
    switch_at        part of the sample budget at which post-local begins to skip averagings, if no rate decays in steps
    alpha            of QSR: H = (alpha / rate)^2
    most_steps       upper limit for every rule
    """

    period: str = "fixed"
    steps: int = 8
    momentum: str = "averaged"
    outer: str = "none"
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    proportional: bool = True
    smaller_pieces: bool = False
    speeds: tuple[float, ...] | None = None
    switch_at: float = 0.5
    alpha: float = 0.1
    most_steps: int = 256

    def __post_init__(self) -> None:
        _one_of("period", self.period, PERIODS)
        _one_of("momentum", self.momentum, MOMENTUM)
        _one_of("outer", self.outer, OUTER)
        _number("steps", self.steps, 1, whole=True)
        _number("most_steps", self.most_steps, self.steps, whole=True)
        _number("outer_rate", self.outer_rate, 0, above=True)
        _number("alpha", self.alpha, 0, above=True)
        _number("outer_momentum", self.outer_momentum, 0, 1)
        _number("switch_at", self.switch_at, 0, 1)
        for speed in self.speeds or ():
            _number("speeds", speed, 0, above=True)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> LocalSettings:
        """The inverse of `dataclasses.asdict`, also after JSON. Raises `ConfigError` naming the wrong value."""
        speeds = plain.get("speeds")
        return _made(cls, {**plain, "speeds": None if speeds is None else tuple(speeds)})


@dataclass(frozen=True, slots=True)
class Trial:
    """The settings of one run. A row without a policy and without local settings is one worker alone.

    row            its name in tables: "single", "static", "local", ...
    policy         decides the shares, for `make_policy`; None for local steps without one, and for one worker
    batch_size     samples per worker and step at the start
    learning_rate  for the global batch at the start; with local steps or one worker, of its own step
    rate_for       samples of a step that the rate is meant for, given to `Controller`; None: the global batch
    count          of a policy's budget: "samples", or "progress", by which larger batches train on more of them
    lr_rule        how the rate follows the global batch (`dynamix.runtime.rate.scaling`)
    local          how workers average parameters; None: they average gradients. With a policy `Controller` does it,
                   `batch_size` is a piece's, and the period one of `OURS`
    schedule       of the rate over samples: "constant"; "cosine" down to a hundredth at `budget`; "warm_cosine", that
                   after a linear rise; "steps": a tenth from half of `budget` on, a hundredth from three quarters on
    budget         samples for which the run is planned; schedules, post-local and AdaComm count in fractions of it
    global_batch   of a policy: "adaptive", or "fixed" at its start, as in `Controller`

    Raises `ConfigError` for impossible values.

    >>> trial = Trial("local", None, 32, 0.1, local=LocalSettings(steps=16))
    >>> Trial.from_dict(trial.to_dict()) == trial, trial.kind
    (True, 'local')
    """

    row: str
    policy: str | None
    batch_size: int
    learning_rate: float
    lr_rule: str = "none"
    local: LocalSettings | None = None
    schedule: str = "constant"
    budget: int | None = field(default=None)
    global_batch: str = "adaptive"
    rate_for: int | None = None
    count: str = "samples"

    def __post_init__(self) -> None:
        _number("batch_size", self.batch_size, 1, whole=True)
        _number("learning_rate", self.learning_rate, 0, above=True)
        _one_of("lr_rule", self.lr_rule, (AUTO, *RULES))
        _one_of("global_batch", self.global_batch, GLOBAL_BATCHES)
        _one_of("schedule", self.schedule, SCHEDULES)
        period = "fixed" if self.local is None else self.local.period
        if self.policy is not None and period not in OURS:
            fix = "leave the policy out: the product has these"
            raise ConfigError("period", period, f"{', '.join(OURS)} with a policy", fix)
        if self.policy is None and period in OURS[1:]:
            raise ConfigError("policy", None, f"one where the period is {period!r}", "name what decides the shares")
        _one_of("count", self.count, COUNTS)
        if self.rate_for is not None:
            _number("rate_for", self.rate_for, 1, whole=True)
        if self.count == "progress" and (self.budget is None or self.policy is None):
            raise ConfigError(
                "count", self.count, "samples without a policy and a budget", "give both, or leave it out"
            )
        if self.budget is not None:
            _number("budget", self.budget, 1, whole=True)
        elif self.schedule != "constant" or (self.local and self.local.period in ("post_local", "adacomm")):
            what = self.schedule if self.schedule != "constant" or self.local is None else self.local.period
            raise ConfigError("budget", None, f"the samples that {what} counts parts of", "give the run's samples")

    @property
    def kind(self) -> Literal["policy", "rounds", "local", "single"]:
        """How it trains. "rounds" is `Controller` averaging parameters, at least at times."""
        if self.policy is not None:
            return "policy" if self.local is None else "rounds"
        return "single" if self.local is None else "local"

    @property
    def meets_in_both_ways(self) -> bool:
        """Whether `Controller` chooses between averaging gradients and parameters."""
        return self.local is not None and self.local.period == "auto"

    @property
    def batch_moves(self) -> bool:
        """Whether a policy changes the global batch."""
        return self.global_batch == "adaptive" and self.policy not in FIXED_TOTAL

    def rate_factor(self, samples: float) -> float:
        """The schedule's factor on the rate after `samples`.

        >>> [round(Trial("x", None, 8, 0.1, schedule="cosine", budget=100).rate_factor(s), 3) for s in (0, 50, 200)]
        [1.0, 0.505, 0.01]
        """
        if self.schedule == "constant" or self.budget is None:
            return 1.0
        part = min(samples / self.budget, 1.0)
        if self.schedule == "steps":
            return float(DECAY ** sum(part >= at for at in DECAYS))
        rise = min(0.1 + 0.9 * part / WARM_UP, 1.0) if self.schedule == "warm_cosine" else 1.0
        return rise * (LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * part)) / 2)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Trial:
        """The inverse of `to_dict`, also after JSON. Raises `ConfigError` naming the wrong value."""
        local = plain.get("local")
        if local is not None and not isinstance(local, Mapping):
            raise ConfigError("local", local, "an object of local settings, or null", "see LocalSettings")
        return _made(cls, {**plain, "local": None if local is None else LocalSettings.from_dict(local)})


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of the optimizer's first group. Rates of other groups keep their ratio to it."""
    first = float(optimizer.param_groups[0]["lr"])
    for group in optimizer.param_groups:
        group["lr"] = rate * float(group["lr"]) / first


def _made(cls: type[Settings], plain: Mapping[str, Any]) -> Settings:
    names = [entry.name for entry in fields(cls)]
    for name in plain:
        if name not in names:
            raise ConfigError(f"field of {cls.__name__}", name, ", ".join(names), "check the spelling")
    try:
        return cls(**plain)
    except TypeError as error:
        raise ConfigError(cls.__name__, sorted(plain), f"an object with {', '.join(names)}", str(error)) from error


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(name, value, ", ".join(allowed), "check the spelling")


def _number(
    name: str, value: object, least: float, most: float = math.inf, *, whole: bool = False, above: bool = False
) -> None:
    right = isinstance(value, int) if whole else isinstance(value, (int, float))
    if right and not isinstance(value, bool):
        number = float(value)  # type: ignore[arg-type]
        if (number > least if above else number >= least) and number <= most and math.isfinite(number):
            return
    low = f"above {least:g}" if above else f"{least:g} or more"
    kind = "a whole number" if whole else "a number"
    upper = "" if math.isinf(most) else f", at most {most:g}"
    raise ConfigError(name, value, f"{kind}, {low}{upper}", "check the trial")
