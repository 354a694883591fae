"""All rows are tuned alike: the same number of trials, the same tuning seeds, and the same rule for halving.

A grid has learning rates times three choices of a row's other settings, for each schedule of the rate. These are batch
sizes if they are fixed, rules and starting batches if a policy changes them, periods and momentum with local steps. The
search continues from the best trial to its neighbours, so that the grid's edge does not limit any row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix_lab.opponents.runs import TrialRun
from dynamix_lab.opponents.shares import FIRST_STEPS
from dynamix_lab.opponents.trial import FIXED_TOTAL, LocalSettings, Trial
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS

RATE_FACTORS = (0.5, 1.0, 2.0)  # of the curve's best rate at the batch that sets the rate's gradient noise
ALONE = 4  # times the other rows' batch sizes, because one worker alone has the whole batch
CHOICES = 3  # of all other settings; with the rates above 9 trials a row
CLIMBS, STEPS_OF_CLIMB = 2, 3  # how often, and how many neighbours of the best trial
KEPT, FEWEST = 3, 3  # one of KEPT trials continues on the next seed, but at least FEWEST do
LONGER = math.sqrt(2)  # factor from one length of a schedule to the next
CONSTANT = ("constant", 1.0)

FIXED_SHARES = ("static", "profiled", "reference")
POLICIES = ("dbs", "lb_bsp", "noise_scale", "pollux", "cannikin", "goodput", "dynamix", "dynamix-paper", "stigmergic")
LOCAL = ("local", "post_local", "adacomm", "qsr", "diloco")
ROUNDS = ("lb_bsp-parameters", "dynamix-parameters")  # policies with local steps
EITHER = ("lb_bsp-auto", "dynamix-auto")  # policies that average gradients or parameters, whichever is faster
STEPS = ("lb_bsp-steps", "dynamix-steps")  # the same, with a tuned, constant number of local steps
ROWS = ("single", *FIXED_SHARES, *POLICIES, *LOCAL, *ROUNDS, *EITHER, *STEPS)

# `Run` runs a trial with a seed. `Judge` rates it: less is better, and infinite if the run did not arrive.
Run = Callable[[Trial, int], TrialRun]
Judge = Callable[[TrialRun], float]


@dataclass(frozen=True, slots=True)
class TuningSpace:
    """The grids of a job.

    rates          global batch -> best learning rate, from the job's step-count curve; linear in logarithms between
                   them, and the nearest outside
    workers        that share a global batch
    budget         samples for which a run is planned
    batch_sizes    three sizes of a worker's batch, small to large
    periods        few and many local steps between averagings
    schedules      of the rate, each with its length in budgets; every row tries all of them
    """

    rates: Mapping[int, float]
    workers: int
    budget: int
    batch_sizes: tuple[int, int, int] = (16, 32, 64)
    periods: tuple[int, int] = (8, 32)
    schedules: tuple[tuple[str, float], ...] = (CONSTANT,)

    def rate_at(self, batch: float) -> float:
        """The rate at the centre of a grid, with two digits.

        >>> TuningSpace({64: 0.1, 256: 0.4}, 4, 1000).rate_at(128)
        0.2
        """
        known = sorted(self.rates)
        logs = np.interp(math.log(batch), np.log(known), np.log([self.rates[size] for size in known]))
        return float(f"{math.exp(logs):.2g}")

    def __post_init__(self) -> None:
        for name, count in (("batch_sizes", CHOICES), ("periods", 2)):
            values = getattr(self, name)
            if len(values) != count or list(values) != sorted(set(values)) or min(values) < 1:
                raise ConfigError(name, values, f"{count} rising whole numbers of 1 or more", "choose other ones")
        if not self.rates or min(self.rates) < 1 or not all(0 < rate < math.inf for rate in self.rates.values()):
            raise ConfigError("rates", dict(self.rates), "one or more above 0, by global batch", "see the job's curve")


def grid(row: str, space: TuningSpace) -> list[Trial]:
    """The first trials of a row: nine for each schedule. Raises `ConfigError` for an unknown row.

    >>> space = TuningSpace({128: 0.1}, 4, 20_000)
    >>> {len(grid(row, space)) for row in ROWS}
    {9}
    >>> trial = grid("local", space)[-1]
    >>> trial.batch_size, trial.learning_rate, trial.local.steps, trial.local.momentum
    (32, 0.2, 8, 'averaged')
    """
    if row not in ROWS:
        raise ConfigError("row", row, ", ".join(ROWS), "check the spelling")
    return [
        _at_rate(choice, rate)
        for schedule, length in space.schedules
        for choice in _choices(row, space, schedule, math.ceil(length * space.budget))
        for rate in (factor * space.rate_at(_global_batch(choice, space.workers)) for factor in RATE_FACTORS)
    ]


def neighbours(trial: Trial, space: TuningSpace) -> list[Trial]:
    """The trials that follow a trial in the search: first those beyond the grid's edge, then finer rates.

    If the batch size changes, the rate keeps its ratio to the curve.

    >>> space = TuningSpace({64: 0.1, 256: 0.4}, 4, 20_000)
    >>> [(t.batch_size, round(t.learning_rate, 2)) for t in neighbours(grid("static", space)[1], space)]
    [(32, 0.2), (16, 0.2), (16, 0.05), (8, 0.1), (16, 0.14), (16, 0.07)]
    """
    rate = trial.learning_rate
    here = space.rate_at(_global_batch(trial, space.workers))

    def sized(size: int) -> Trial:
        other = replace(trial, batch_size=size)
        return _at_rate(other, rate * space.rate_at(_global_batch(other, space.workers)) / here)

    near = [sized(2 * trial.batch_size), _at_rate(trial, 2 * rate), _at_rate(trial, rate / 2)]
    near += _other_lengths(trial)
    near += [sized(trial.batch_size // 2)] if trial.batch_size > 1 else []
    near += [_at_rate(_with_steps(trial, steps), rate) for steps in _other_steps(trial)]
    return [*near, _at_rate(trial, rate * math.sqrt(2)), _at_rate(trial, rate / math.sqrt(2))]


def _other_lengths(trial: Trial) -> list[Trial]:
    """Longer and shorter schedules, if the rate falls; a constant rate has no length."""
    if trial.schedule == "constant" or trial.budget is None:
        return []
    return [replace(trial, budget=int(float(f"{trial.budget * factor:.3g}"))) for factor in (1 / LONGER, LONGER)]


def _other_steps(trial: Trial) -> list[int]:
    if trial.local is None or trial.local.period in ("ratio", "auto"):
        return []
    return [2 * trial.local.steps] + ([trial.local.steps // 2] if trial.local.steps > 1 else [])


def _with_steps(trial: Trial, steps: int) -> Trial:
    """The same trial with so many steps between averagings."""
    return replace(trial, local=_settings(trial.row, 4 * steps if trial.row == "qsr" else steps))


def _at_rate(trial: Trial, rate: float) -> Trial:
    return replace(trial, learning_rate=rate, local=_local_at_rate(trial, rate))


def _global_batch(trial: Trial, workers: int) -> float:
    """The batch that sets a learning rate's gradient noise. For local steps it is between a worker's and the global.

    A row that chooses what to average begins with gradients, and keeps that rate.
    """
    return trial.batch_size * _SHARED["policy" if trial.meets_in_both_ways else trial.kind](workers)


_SHARED: dict[str, Callable[[int], float]] = {
    "single": lambda workers: 1.0,
    "local": math.sqrt,
    "rounds": math.sqrt,
    "policy": float,
}


def _choices(row: str, space: TuningSpace, schedule: str, budget: int) -> list[Trial]:
    """The row's three choices, at a learning rate of 1."""
    small, middle, _ = space.batch_sizes
    common: dict[str, Any] = {"schedule": schedule, "budget": budget}
    if row == "single":
        return [Trial(row, None, ALONE * size, 1.0, **common) for size in space.batch_sizes]
    if row in FIXED_SHARES or row in FIXED_TOTAL:
        return [Trial(row, row, size, 1.0, **common) for size in space.batch_sizes]
    policy = row.removesuffix("-parameters").removesuffix("-auto")
    if row in ROUNDS or policy in POLICIES:  # the number of local steps follows from measurements
        either = LocalSettings(steps=FIRST_STEPS, period="ratio" if row in ROUNDS else "auto")
        ours: dict[str, Any] = {**common, "local": None if row in POLICIES else either}
        if row in ROUNDS or policy in FIXED_TOTAL:
            return [Trial(row, policy, size, 1.0, **ours) for size in space.batch_sizes]
        pairs = (("adascale", small), ("adascale", middle), ("none", middle))
        return [Trial(row, policy, size, 1.0, rule, **ours) for rule, size in pairs]
    few, many = space.periods
    rounds = ((small, few), (small, many), (middle, few))
    decides = row.removesuffix("-steps") if row in STEPS else None
    return [Trial(row, decides, size, 1.0, local=_settings(row, steps), **common) for size, steps in rounds]


def _settings(row: str, steps: int) -> LocalSettings:
    """Settings of local steps. Momentum is kept for short periods, where both are equal, else averaged."""
    if row == "qsr":  # alpha is set with the rate, so that H at the first rate is the period
        return LocalSettings(period=row, steps=max(steps // 4, 1), most_steps=8 * steps)
    small = steps <= 4 or row == "post_local"  # whole steps of slow workers would cost most there
    settings = LocalSettings(steps=steps, momentum="kept" if steps <= 4 else "averaged", smaller_pieces=small)
    if row == "diloco":  # there each worker keeps its inner state
        return replace(settings, outer="nesterov", momentum="kept")
    return replace(settings, period=row) if row in ("post_local", "adacomm") else settings


def _local_at_rate(trial: Trial, rate: float) -> LocalSettings | None:
    """Set QSR's alpha, so that H begins at its base and grows as the rate falls. Other settings do not change."""
    local = trial.local
    if local is None or local.period != "qsr":
        return local
    return replace(local, alpha=rate * math.sqrt(local.steps))


@dataclass(frozen=True, slots=True)
class TriedTrial:
    """One trial of a grid, and its value on each tuning seed. Less is better."""

    trial: Trial
    worth: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Geometric mean over seeds; infinite if a run did not arrive."""
        if not all(0 < w < math.inf for w in self.worth):
            return math.inf
        return math.exp(sum(map(math.log, self.worth)) / len(self.worth))

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON; None for a run that did not arrive."""
        return {"trial": self.trial.to_dict(), "worth": [w if math.isfinite(w) else None for w in self.worth]}


def tune(
    trials: Sequence[Trial],
    run: Run,
    judge: Judge,
    *,
    seeds: Sequence[int] = TUNING_SEEDS,
    near: Callable[[Trial], Sequence[Trial]] | None = None,
    climbs: int = CLIMBS,
) -> tuple[Trial, list[TriedTrial]]:
    """Successive halving: all trials run on the first seed, the best third on the next, and so on, at least three.

    With `near` the first seed also sees neighbours of its best trial: `climbs` times three new ones. Returns the best
    of the trials that saw every seed, and all trials, those with more seeds first and better ones first among them. If
    no run arrives, the first trials of the grid continue. Raises `ConfigError` without trials or seeds.

    >>> trials = [Trial("single", None, size, 0.1) for size in (8, 16, 32, 64)]
    >>> best, tried = tune(trials, lambda trial, seed: trial, lambda run: abs(run.batch_size - 15))
    >>> best.batch_size, [len(t.worth) for t in tried]
    (16, [2, 2, 2, 1])
    """
    if not trials or not seeds:
        raise ConfigError("trials, seeds", (len(trials), len(seeds)), "1 or more of both", "pass grid(row, space)")

    def seen(some: Sequence[TriedTrial], seed: int) -> list[TriedTrial]:
        return [TriedTrial(tried.trial, (*tried.worth, judge(run(tried.trial, seed)))) for tried in some]

    def best_first(some: list[TriedTrial]) -> list[TriedTrial]:
        return sorted(some, key=lambda tried: tried.mean)

    running, done = [TriedTrial(trial, ()) for trial in trials], list[TriedTrial]()
    for at, seed in enumerate(seeds):
        if at:
            keep = max(-(-len(running) // KEPT), FEWEST)
            running, done = running[:keep], running[keep:] + done
        running = best_first(seen(running, seed))
        for _ in range(climbs if near is not None and not at else 0):
            known = {_rounded(tried.trial) for tried in running}
            new = [trial for trial in near(running[0].trial) if _rounded(trial) not in known] if near else []
            running = best_first(running + seen([TriedTrial(trial, ()) for trial in new[:STEPS_OF_CLIMB]], seed))
    return running[0].trial, running + done


def _rounded(trial: Trial) -> tuple[object, ...]:
    """The key of a trial: rates that differ only by rounding are equal."""
    steps = None if trial.local is None else trial.local.steps
    length = trial.budget if trial.schedule != "constant" else None
    return trial.batch_size, float(f"{trial.learning_rate:.2g}"), trial.lr_rule, steps, trial.schedule, length
