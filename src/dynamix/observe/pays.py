"""Whether distributing pays, from what was measured; and the rung of the ladder that is predicted to be best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynamix.observe.findings import Findings
from dynamix.observe.gains import HIGH, LOW, WORTH, Gain, Gains
from dynamix.observe.joined import LEAST_WINDOW, Joined
from dynamix.window import Floats

ALONE, WITHOUT, PLAIN = "do not distribute", "leave one out", "plain"
BALANCE, ADAPT, MEET = "balance", "adapt", "adapt and choose how to meet"
STRETCHES = 10  # of the steps: a range covers what most of them say
# Parts of a balanced step that the exchange takes. In the first runs of docs/results.md a larger batch saved time where
# it was about half, and cost time where it was a quarter; workers that seldom meet are first on all nets from 0.75 on.
LARGE, VERY_LARGE = 1 / 3, 0.6


@dataclass(frozen=True)
class Pays:
    """What fewer workers would reach, and what to begin with.

    alone      the fastest worker by itself, in steps of its own batch: no exchange, and what a step costs beside its
               samples once for each of them
    without    all but the slow rank, each with its own batch, and with the exchange as it was measured
    exchange   part of a balanced step that the exchange takes; NaN where it was not measured
    best       the rung that is predicted to be best; None where too little is known

    `rank` of the first two says who is alone, or is left out. Either is None where it cannot be said.
    """

    alone: Gain | None
    without: Gain | None
    exchange: float
    best: str | None


def weigh(job: Joined, found: Findings, gains: Gains) -> Pays:
    """What fewer workers would reach beside what `gains` promise, and the best of all."""
    alone = _alone(job)
    without = None if found.slow is None else _without(job, job.ranks.index(found.slow.rank))
    balanced = 1.0 if gains.balance is None else max(gains.balance.median, 1.0)
    exchange = balanced * found.transfer_s / found.step_s if found.step_s else float("nan")
    can_meet = job.facts[0].get("stack") == "DDP" and gains.pieces == 1  # what meet="auto" needs
    return Pays(alone, without, exchange, _best(gains, alone, without, exchange, can_meet=can_meet))


def _best(gains: Gains, alone: Gain | None, without: Gain | None, exchange: float, *, can_meet: bool) -> str | None:
    """In doubt the lower rung. The batch and the way of meeting change what is learned, so less sure is not enough."""
    if gains.balance is None:
        return None
    balanced = max(gains.balance.median, 1.0)
    fewer = 0.0 if without is None else without.median
    if alone is not None and WORTH * alone.median >= max(balanced, fewer):
        return ALONE
    if fewer >= WORTH * balanced:
        return WITHOUT
    sure = WORTH * max(gains.balance.high, 1.0)
    if can_meet and exchange >= VERY_LARGE and gains.meet is not None and gains.meet.low >= sure:
        return MEET
    if exchange >= LARGE and gains.adapt is not None and gains.adapt.median >= sure:
        return ADAPT
    return BALANCE if gains.balance.worth_it else PLAIN


def _alone(job: Joined) -> Gain | None:
    samples, busy = job.part("samples")[job.kept], job.busy[job.kept]
    with np.errstate(invalid="ignore", divide="ignore"):
        speeds = samples.sum(0) / busy.sum(0)
    if len(job.ranks) < 2 or not np.isfinite(speeds).all():
        return None
    at = int(speeds.argmax())
    return _beside_now(job, samples[:, at], busy[:, at], job.ranks[at])


def _without(job: Joined, at: int) -> Gain | None:
    if len(job.ranks) < 3:
        return None
    samples, busy, exchange = (x[job.kept] for x in (job.part("samples"), job.busy, job.part("exchange")))
    others = np.arange(len(job.ranks)) != at
    own = busy[:, others].max(-1) + exchange.min(-1)
    return _beside_now(job, samples[:, others].sum(-1), own, job.ranks[at])


def _beside_now(job: Joined, samples: Floats, seconds: Floats, rank: int) -> Gain | None:
    """`samples` in `seconds`, by step, over what all ranks did; the range over stretches of the job."""
    trained = job.part("samples")[job.kept].sum(-1)
    took = (job.busy + job.part("exchange"))[job.kept].mean(-1)
    known = np.isfinite(samples + seconds + trained + took) & (seconds > 0)
    if job.missing or known.sum() < LEAST_WINDOW:
        return None
    rows = np.stack([samples, seconds, trained, took])[:, known]
    parts = np.stack([part.sum(-1) for part in np.array_split(rows, min(STRETCHES, rows.shape[1]), axis=1)], -1)
    each, whole = ((x[0] / x[1]) / (x[2] / x[3]) for x in (parts, rows.sum(-1)))
    low, high = np.quantile(each, [LOW, HIGH])
    return Gain(float(whole), min(float(low), float(whole)), max(float(high), float(whole)), rank)
