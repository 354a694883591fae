"""Whether distributing pays, from what was measured; and the rung of the ladder that is predicted to be best."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dynamix.observe.findings import Findings
from dynamix.observe.gains import HIGH, LOW, WORTH, Gain, Gains
from dynamix.observe.joined import LEAST_WINDOW, Joined
from dynamix.window import Floats

ALONE, WITHOUT, PLAIN = "do not distribute", "leave one out", "plain"
BALANCE, ADAPT, MEET = "balance", "adapt", "adapt and choose how to meet"
WINDOW = 10  # steps, after which shares follow
STRETCHES = 10  # of the steps: a range covers what most of them say
# Parts of a balanced step that the exchange takes. In the first runs of docs/results.md a larger batch saved time where
# it was about half, and cost time where it was a quarter; workers that seldom meet are first on all nets from 0.75 on.
LARGE, VERY_LARGE = 1 / 3, 0.6


@dataclass(frozen=True)
class Pays:
    """What fewer workers would reach, what balance would, and what to begin with.

    alone      the fastest worker by itself, in steps of its own batch: no exchange, and what a step costs beside its
               samples once for each of them; `rank` says which
    without    all but the slow rank, which is `rank`; each with its own batch, and with the exchange as it was measured
    balance    as the job model says of how ranks are now; or, if it `follows`, as shares would have reached that are
               always those of the window before: where slowness comes and goes
    exchange   part of a balanced step that the exchange takes; NaN where it was not measured
    best       the rung that is predicted to be best

    None where it cannot be said.
    """

    alone: Gain | None
    without: Gain | None
    balance: Gain | None
    follows: bool
    exchange: float
    best: str | None


def weigh(job: Joined, found: Findings, gains: Gains) -> Pays:
    """What fewer workers would reach beside what all of them could gain, and the best of all."""
    slow = found.slow
    alone = _alone(job)
    without = None if slow is None else _without(job, job.ranks.index(slow.rank))
    unsteady = found.verdict == "changing" or (slow is not None and not slow.steady)
    followed = _followed(job) if unsteady else None
    balance = followed or gains.balance
    balanced = 1.0 if balance is None else max(balance.median, 1.0)
    exchange = balanced * found.transfer_s / found.step_s if found.step_s else float("nan")
    pays = Pays(alone, without, balance, followed is not None, exchange, None)
    can_meet = job.facts[0].get("stack") == "DDP" and gains.pieces == 1  # what meet="auto" needs
    return dataclasses.replace(pays, best=_best(pays, gains, leave=not unsteady, can_meet=can_meet))


def _best(pays: Pays, gains: Gains, *, leave: bool, can_meet: bool) -> str | None:
    """In doubt the lower rung. The batch and the way of meeting change what is learned, so less sure is not enough."""
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
    return BALANCE if pays.balance.worth_it else PLAIN


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


def _followed(job: Joined) -> Gain | None:
    """All ranks, with shares by what each took for a sample in the window before."""
    samples, exchange = job.part("samples")[job.kept], job.part("exchange")[job.kept]
    each = job.busy[job.kept] / samples
    if len(each) < 2 * WINDOW:
        return None
    means = np.stack([each[at : at + WINDOW].mean(0) for at in range(0, len(each), WINDOW)])
    before = np.repeat(means, WINDOW, 0)[: len(each) - WINDOW]
    shares = samples[WINDOW:].sum(-1, keepdims=True) / before / (1 / before).sum(-1, keepdims=True)
    seconds = np.full(len(each), np.nan)
    seconds[WINDOW:] = (shares * each[WINDOW:]).max(-1) + exchange[WINDOW:].min(-1)
    return _beside_now(job, samples.sum(-1), seconds)


def _beside_now(job: Joined, samples: Floats, seconds: Floats, rank: int | None = None) -> Gain | None:
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
