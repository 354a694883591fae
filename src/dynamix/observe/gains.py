"""Predicts gains from the observed windows by `JobModel`: a range for each rung of the ladder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dynamix.model import JobModel
from dynamix.model.auto_sync import LEAST_STEPS
from dynamix.model.measured import exposed_seconds
from dynamix.model.rounds import RoundSize, samples_a_second
from dynamix.model.split import split
from dynamix.projection import project
from dynamix.window import Bounds, Ints, Window

LOW, HIGH = 0.1, 0.9  # quantiles of the ranges
WORTH = 1.03  # a smaller gain is not worth a change of the script
WORTH_FOLLOWING = 1.1  # the same if shares follow changing speeds: a policy follows later than this replay
UNIT = 1000  # parts of a batch with an unknown number of samples
ALONE, WITHOUT, PLAIN = "do not distribute", "leave one out", "plain"
BALANCE, ADAPT, MEET = "balance", "adapt", "adapt and choose how to meet"
# Part of a balanced step taken by the exchange. In the first runs of docs/results.md a larger batch saved time with
# about half, and cost time with a quarter; from 0.75 on averaging seldom was fastest on all nets.
LARGE, VERY_LARGE = 1 / 3, 0.6
_LARGEST = 64  # times the largest current batch


@dataclass(frozen=True)
class Gain:
    """The predicted factor on samples a second: its median, and its 80 % range.

    rank   the rank that works alone, or is left out; None if all ranks work
    """

    median: float
    low: float
    high: float
    rank: int | None = None

    @property
    def worth_it(self) -> bool:
        """Whether it exceeds the error of measurement."""
        return self.median >= WORTH


@dataclass(frozen=True)
class Gains:
    """The gains of all ranks on each rung of the ladder, and what is unknown.

    balance   with the same global batch, by changing shares to `sizes`
    adapt     with twice the global batch, and shares changed
    meet      by averaging parameters every `apart` steps
    grounded  whether batches of several sizes were measured
    sizes_known   whether batches have a known number of samples; else `sizes` are parts of a batch, in thousandths
    pieces    batches of an optimizer step: more than one if gradients accumulate
    """

    balance: Gain | None
    adapt: Gain | None
    meet: Gain | None
    sizes: list[int]
    now: list[int]
    apart: float
    grounded: bool
    sizes_known: bool
    pieces: int = 1


@dataclass(frozen=True)
class Pays:
    """The speed of fewer workers, the speed under balance, and the rung to begin with.

    alone      the fastest worker by itself, in steps of its own batch: no exchange, and every step pays its fixed costs
               alone; `rank` names it
    without    all but the slow rank, named by `rank`; each with its own batch, and with the measured exchange
    balance    by the job model for the ranks as they are now; or, if it `follows`, as reached by shares that always fit
               the window before: for slowness that comes and goes
    exchange   part of a balanced step taken by the exchange; NaN if not measured
    best       the rung that is predicted to be best

    A figure is None if it cannot be predicted.
    """

    alone: Gain | None
    without: Gain | None
    balance: Gain | None
    follows: bool
    exchange: float
    best: str | None


def best_rung(pays: Pays, gains: Gains, *, leave: bool, can_meet: bool) -> str | None:
    """The best rung. If in doubt it is the lower one, because batch and synchronisation change what is learned."""
    if pays.balance is None:
        return None
    balanced = max(pays.balance.median, 1.0)
    fewer = 0.0 if pays.without is None else pays.without.median
    if pays.alone is not None and WORTH * pays.alone.median >= max(balanced, fewer):
        return ALONE
    if leave and fewer >= WORTH * balanced:
        return WITHOUT
    sure = WORTH * max(pays.balance.high, 1.0)
    if can_meet and pays.exchange >= VERY_LARGE and gains.meet is not None and gains.meet.low >= sure:
        return MEET
    if pays.exchange >= LARGE and gains.adapt is not None and gains.adapt.median >= sure:
        return ADAPT
    following = pays.follows and pays.balance.median >= WORTH_FOLLOWING  # its range includes stretches without slowness
    return BALANCE if following or (pays.balance.worth_it and pays.balance.low >= 1.0) else PLAIN


def predict(windows: Iterable[Window], *, sizes_known: bool) -> Gains:
    """The gains of a job of two or more ranks, after these windows; None for unknown ones."""
    model, latest = JobModel(), None
    for window in windows:
        scaled = _whole(window if sizes_known else _in_parts(window))
        model = model.update(scaled)
        if latest is None or scaled.global_batch >= 0.9 * latest.global_batch:
            latest = scaled  # unless it is the small batch at the end of an epoch
    if latest is None or latest.workers < 2 or not bool(model.measured):
        return Gains(None, None, None, [], [], float("nan"), False, sizes_known)
    now = latest.batch_size
    model = model.update(dataclasses.replace(latest, step=np.asarray(float(model.step) + 1)))
    sizes = _balanced(model, int(now.sum()))
    meet, apart = _meet(model, latest)
    return Gains(
        _gain(model, sizes, now),
        _gain(model, _balanced(model, 2 * int(now.sum())), now),
        meet,
        sizes.tolist(),
        now.tolist(),
        apart,
        bool(model.grounded),
        sizes_known,
        max(int(latest.micro_batches), 1),
    )


def _whole(window: Window) -> Window:
    """All own work as computing: others wait for it, whether a rank computes or waits for its data."""
    return dataclasses.replace(window, compute=window.compute + np.nan_to_num(window.data), data=0.0 * window.data)


def _in_parts(window: Window) -> Window:
    return dataclasses.replace(window, batch_size=window.batch_size * UNIT, base_batch=window.base_batch * UNIT)


def _balanced(model: JobModel, total: int) -> Ints:
    """Whole sizes of sum `total` with the earliest finish of the slowest worker."""
    workers = model.sizes.shape[-1]
    bounds = Bounds.of(workers, 1, max(_LARGEST * total // workers, 2), total_low=total, total_high=total)
    return project(split(np.asarray(float(total)), *model.line, bounds), bounds)


def _gain(model: JobModel, sizes: np.ndarray, now: np.ndarray) -> Gain | None:
    median, low, high = (float(model.speedup(sizes, beside=now, quantile=at)) for at in (0.5, LOW, HIGH))
    return Gain(median, low, high) if np.isfinite([median, low, high]).all() else None


def _meet(model: JobModel, window: Window) -> tuple[Gain | None, float]:
    """The gain of averaging parameters: pieces of today's batches, their number set by each worker's speed."""
    speeds, meeting_s = samples_a_second(window), float(exposed_seconds(window))
    if speeds is None or not np.isfinite(meeting_s):
        return None, float("nan")
    workers, total = window.workers, int(window.batch_size.sum())
    size = RoundSize(total / workers)
    _, pace = size.best(Bounds.of(workers, 1, 100 * total), speeds, meeting_s, now=0)
    if size.steps < LEAST_STEPS:
        return None, size.steps
    low, median, high = (total / float(model.step_s(window.batch_size, quantile=q)) for q in (HIGH, 0.5, LOW))
    return Gain(pace / median, pace / high, pace / low), size.steps
