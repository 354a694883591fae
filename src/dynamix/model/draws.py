"""Random draws of a job model's unknowns: equally likely worlds, drawn once and used for every question."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from dynamix.model.costs import WorkerCosts, prior_loss, samples_by_candidate
from dynamix.model.exchange import OVERLAPS, Exchange
from dynamix.window import Floats

WORLDS = 256
EXCHANGE_ERROR = 0.1  # standard deviation of the log of an exchange's length in the next steps, around the fitted one
STEPS = 32  # simulated steps, each with its slowest worker


@dataclass(frozen=True)
class Draws:
    """Numbers of `WORLDS` worlds for W workers. Each is spread evenly over its range, in its own order.

    offset    (S,) in (0, 1): selects the true fixed-cost candidate, for all workers alike: they run one program
    level     (S, W) standard normal, for each worker's level
    overlap   (S,) in (0, 1): selects the true exponent of the exchange
    exchange  (S,) standard normal, for its length
    jitter    (STEPS, W) standard normal, for steps; the same in all worlds
    """

    offset: Floats
    level: Floats
    overlap: Floats
    exchange: Floats
    jitter: Floats


@functools.lru_cache(maxsize=16)
def draws_for(workers: int) -> Draws:
    """The draws for this number of workers, always the same.

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
    """Index (S, ...) of the candidate that each number in `uniform` (S,) selects; `weights` (..., G).

    >>> chosen(np.array([0.25, 0.75]), np.array([0.2, 0.9])).tolist()
    [0, 1]
    """
    reached = weights.cumsum(-1)
    at = uniform.reshape(-1, *([1] * weights.ndim)) * reached[..., -1:]
    return np.asarray(np.minimum((reached < at).sum(-1), weights.shape[-1] - 1))


def drawn_log_seconds(costs: WorkerCosts, batch: Floats, even: Floats, draws: Draws) -> Floats:
    """Log busy seconds (S, ..., W) of `batch` (..., W) samples in each of S equally likely worlds; -inf for 0 samples.

    Uncertain are the candidates, each worker's level, and the distance of a size from the last measured one. `even` as
    in `WorkerCosts.seconds`. NaN for workers never measured.
    """
    logs = costs.level + np.log(samples_by_candidate(even, np.maximum(batch, 1.0)))
    at = chosen(np.broadcast_to(costs.weights, logs.shape), draws.offset)
    picked = np.take_along_axis(np.broadcast_to(logs, (len(at), *logs.shape)), at[..., None], -1)[..., 0]
    apart = np.log(np.maximum(batch, 1.0)) - costs.size
    sd = np.sqrt(costs.variance + (costs.spacing * np.where(np.isnan(apart), 0.0, apart)) ** 2)
    own = draws.level.reshape(len(at), *([1] * (picked.ndim - 2)), -1)
    return np.where(batch > 0, picked + own * sd, -np.inf)


def drawn_log_step(exchange: Exchange, computing: Floats, draws: Draws) -> Floats:
    """Log seconds (S, ...) of steps in each world, if the slowest worker's log seconds are `computing` (S, ...)."""
    weights, powers = exchange.believed
    at = chosen(np.broadcast_to(weights, (*computing.shape[1:], len(OVERLAPS))), draws.overlap)
    power = np.take_along_axis(np.broadcast_to(powers, (*at.shape, len(OVERLAPS))), at[..., None], -1)[..., 0]
    exponent, length = OVERLAPS[at], draws.exchange.reshape(-1, *([1] * (at.ndim - 1))) * EXCHANGE_ERROR
    return np.asarray(np.logaddexp(exponent * computing, power + exponent * length) / exponent)


def told(costs: WorkerCosts) -> Floats:
    """Nats (..., W) by which windows have moved the belief about fixed and per-sample costs from the prior.

    0 if a worker was only measured at one size: then the two costs cannot be separated.
    """
    prior = np.exp(-prior_loss())
    weights = np.maximum(costs.weights, 1e-300)
    return np.asarray((weights * np.log(weights * prior.sum() / prior)).sum(-1))
