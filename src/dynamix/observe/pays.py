"""Measures whether distributing pays, and chooses the rung of the ladder that is predicted to be best."""

from __future__ import annotations

import dataclasses

import numpy as np

from dynamix.observe.findings import Findings
from dynamix.observe.gains import HIGH, LOW, Gain, Gains, Pays, best_rung
from dynamix.observe.joined import LEAST_WINDOW, Joined
from dynamix.window import Floats

WINDOW = 10  # steps, after which shares follow
STRETCHES = 10  # equal stretches of the steps; a range covers most of them


def weigh(job: Joined, found: Findings, gains: Gains) -> Pays:
    """Compare what fewer workers would reach with what all of them could gain, and find the best of all."""
    slow = found.slow
    without = None if slow is None else _without(job, job.ranks.index(slow.rank))
    unsteady = found.verdict == "changing" or (slow is not None and not slow.steady)
    followed = _followed(job) if unsteady else None
    balance = followed or gains.balance
    balanced = 1.0 if balance is None else max(balance.median, 1.0)
    exchange = balanced * found.transfer_s / found.step_s if found.step_s else float("nan")
    pays = Pays(_alone(job), without, balance, followed is not None, exchange, None)
    can_meet = job.facts[0].get("stack") == "DDP" and gains.pieces == 1  # requirements of meet="auto"
    return dataclasses.replace(pays, best=best_rung(pays, gains, leave=not unsteady, can_meet=can_meet))


def _kept(job: Joined) -> tuple[Floats, Floats, Floats]:
    """Samples, and seconds of own work and of the exchange: (steps, ranks) of the kept steps."""
    return job.part("samples")[job.kept], job.busy[job.kept], job.part("exchange")[job.kept]


def _alone(job: Joined) -> Gain | None:
    samples, busy, _ = _kept(job)
    with np.errstate(invalid="ignore", divide="ignore"):
        speeds = samples.sum(0) / busy.sum(0)
    if len(job.ranks) < 2 or not np.isfinite(speeds).all():
        return None
    at = int(speeds.argmax())
    return _beside_now(job, samples[:, at], busy[:, at], job.ranks[at])


def _without(job: Joined, at: int) -> Gain | None:
    if len(job.ranks) < 3:
        return None
    samples, busy, exchange = _kept(job)
    others = np.arange(len(job.ranks)) != at
    own = busy[:, others].max(-1) + exchange.min(-1)
    return _beside_now(job, samples[:, others].sum(-1), own, job.ranks[at])


def _followed(job: Joined) -> Gain | None:
    """The gain of all ranks, with shares by each rank's time for a sample in the window before."""
    samples, busy, exchange = _kept(job)
    each = busy / samples
    if len(each) < 2 * WINDOW:
        return None
    means = np.stack([each[at : at + WINDOW].mean(0) for at in range(0, len(each), WINDOW)])
    before = np.repeat(means, WINDOW, 0)[: len(each) - WINDOW]
    shares = samples[WINDOW:].sum(-1, keepdims=True) / before / (1 / before).sum(-1, keepdims=True)
    seconds = np.full(len(each), np.nan)
    seconds[WINDOW:] = (shares * each[WINDOW:]).max(-1) + exchange[WINDOW:].min(-1)
    return _beside_now(job, samples.sum(-1), seconds)


def _beside_now(job: Joined, samples: Floats, seconds: Floats, rank: int | None = None) -> Gain | None:
    """The gain of `samples` in `seconds`, by step, over all ranks as they were; its range is over stretches."""
    all_samples, busy, exchange = _kept(job)
    trained, took = all_samples.sum(-1), (busy + exchange).mean(-1)
    known = np.isfinite(samples + seconds + trained + took) & (seconds > 0)
    if not job.predictable or known.sum() < LEAST_WINDOW:
        return None
    rows = np.stack([samples, seconds, trained, took])[:, known]
    parts = np.stack([part.sum(-1) for part in np.array_split(rows, min(STRETCHES, rows.shape[1]), axis=1)], -1)
    each, whole = ((x[0] / x[1]) / (x[2] / x[3]) for x in (parts, rows.sum(-1)))
    low, high = np.quantile(each, [LOW, HIGH])
    return Gain(float(whole), min(float(low), float(whole)), max(float(high), float(whole)), rank)
