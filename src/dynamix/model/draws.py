"""The unknowns of a job model, as equally likely worlds: numbers drawn once, the same for every question."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from dynamix.model.costs import WorkerCosts, prior_loss, samples_by_candidate
from dynamix.model.exchange import OVERLAPS, Exchange
from dynamix.window import Floats

WORLDS = 256
EXCHANGE_ERROR = 0.1  # standard deviation of the log of an exchange's length in the next steps, around what was fitted
STEPS = 32  # in which the slowest worker of each is looked for


@dataclass(frozen=True)
class Draws:
    """Numbers of `WORLDS` worlds for W workers. Each is spread evenly over its range, in an order of its own.

    offset    (S,) in (0, 1): which candidate of the fixed cost is true, for all workers alike: they run one program
    level     (S, W) standard normal, of each worker's level
    overlap   (S,) in (0, 1): which exponent of the exchange is true
    exchange  (S,) standard normal, of its length
    jitter    (STEPS, W) standard normal, of steps; the same in all worlds
    """

    offset: Floats
    level: Floats
    overlap: Floats
    exchange: Floats
    jitter: Floats


@functools.lru_cache(maxsize=16)
def draws_for(workers: int) -> Draws:
    """Those for so many workers, always the same.

    >>> bool((draws_for(3).level == draws_for(3).level).all()), draws_for(3).level.shape
    (True, (256, 3))
    """
    rng = np.random.default_rng(0)
    even = (np.arange(WORLDS) + 0.5) / WORLDS
    offset, overlap = rng.permutation(even), rng.permutation(even)
    level, exchange = rng.standard_normal((WORLDS, workers)), rng.standard_normal(WORLDS)
    jitter = rng.standard_normal((STEPS, workers))
    jitter -= jitter.mean(0)
    return Draws(offset, level, overlap, exchange, jitter)


def chosen(weights: Floats, uniform: Floats) -> np.ndarray:
    """Index (S, ...) of the candidate that each of the `uniform` (S,) numbers falls on; `weights` (..., G).

    >>> chosen(np.array([0.25, 0.75]), np.array([0.2, 0.9])).tolist()
    [0, 1]
    """
    reached = weights.cumsum(-1)
    at = uniform.reshape(-1, *([1] * weights.ndim)) * reached[..., -1:]
    return np.asarray(np.minimum((reached < at).sum(-1), weights.shape[-1] - 1))


def drawn_log_seconds(costs: WorkerCosts, batch: Floats, even: Floats, draws: Draws) -> Floats:
    """Log busy seconds (S, ..., W) of `batch` (..., W) samples in each of S equally likely worlds; -inf for none.

    Uncertain are the candidates, each worker's level, and how far a size is from the last one seen. `even` as in
    `WorkerCosts.seconds`. NaN for workers never measured.
    """
    logs = costs.level + np.log(samples_by_candidate(even, np.maximum(batch, 1.0)))
    at = chosen(np.broadcast_to(costs.weights, logs.shape), draws.offset)
    picked = np.take_along_axis(np.broadcast_to(logs, (len(at), *logs.shape)), at[..., None], -1)[..., 0]
    apart = np.log(np.maximum(batch, 1.0)) - costs.size
    sd = np.sqrt(costs.variance + (costs.spacing * np.where(np.isnan(apart), 0.0, apart)) ** 2)
    own = draws.level.reshape(len(at), *([1] * (picked.ndim - 2)), -1)
    return np.where(batch > 0, picked + own * sd, -np.inf)


def drawn_log_step(exchange: Exchange, computing: Floats, draws: Draws) -> Floats:
    """Log seconds (S, ...) of steps whose slowest worker's log seconds are `computing` (S, ...), in each world."""
    weights, powers = exchange.believed
    at = chosen(np.broadcast_to(weights, (*computing.shape[1:], len(OVERLAPS))), draws.overlap)
    power = np.take_along_axis(np.broadcast_to(powers, (*at.shape, len(OVERLAPS))), at[..., None], -1)[..., 0]
    exponent, length = OVERLAPS[at], draws.exchange.reshape(-1, *([1] * (at.ndim - 1))) * EXCHANGE_ERROR
    return np.asarray(np.logaddexp(exponent * computing, power + exponent * length) / exponent)


def told(costs: WorkerCosts) -> Floats:
    """Nats (..., W) by which windows have moved the belief about fixed and growing costs from that beforehand.

    0 where a worker was only seen at one size: then the two cannot be told apart.
    """
    prior = np.exp(-prior_loss())
    weights = np.maximum(costs.weights, 1e-300)
    return np.asarray((weights * np.log(weights * prior.sum() / prior)).sum(-1))
