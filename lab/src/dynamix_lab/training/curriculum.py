"""The clusters for training policies: every mechanism of the simulator, in random combinations and wide random ranges.

Families of `simulator.families` that violate an assumption are tests. Training clusters share the simulator's
mechanisms with them, but no parameters, no measured non-affine curves, no co-location or PAI figures, and no seed.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dynamix.window import Floats
from dynamix_lab.simulator import Clusters, sample_clusters, sample_family
from dynamix_lab.simulator.disturbances import Staircases
from dynamix_lab.simulator.families import NEVER

Mechanism = Callable[[Clusters, np.random.Generator, Floats], Clusters]
_FIRST_SEED = 5_000_000  # of training clusters; suites and evaluation use seeds below a million


def training_clusters(count: int, workers: int, seed: int, *, hardness: float = 1.0) -> Clusters:
    """`count` clusters of `workers`. `hardness` in [0, 1] scales how often each mechanism acts. In two clusters of five
    there is little but slowdowns. Costs are those of calibrated GPUs or of `sample_clusters`.

    >>> training_clusters(3, 4, seed=0).shape
    (3, 4)
    """
    rng = np.random.default_rng([seed, workers, 99])
    drawn = count, workers, _FIRST_SEED + int(rng.integers(2**30))
    clusters = sample_family("affine-quiet", *drawn) if rng.random() < 0.6 else sample_clusters(*drawn)
    rate = _rate(rng, hardness, count)
    return _interior(disturbed(_cheap(_small(clusters, rng, rate), rng), rng, rate), rng)


def disturbed(clusters: Clusters, rng: np.random.Generator, rate: Floats) -> Clusters:
    """Clusters with every mechanism except small batches, as often as `rate` (C, 1) says."""
    for mechanism in (_slowed, _neighbour, _jitter, _bent, _links, _measured, _unlike, _recurring):
        clusters = mechanism(clusters, rng, rate)
    return clusters


def _rate(rng: np.random.Generator, hardness: float, count: int) -> Floats:
    """How often mechanisms act, (C, 1): in two clusters of five hardly ever."""
    return hardness * np.where(_hit(rng, 0.4, count), 0.1, 1.0)


def _log_uniform(rng: np.random.Generator, low: float, high: Floats | float, shape: tuple[int, ...]) -> Floats:
    return np.asarray(np.exp(rng.uniform(np.log(low), np.log(high), shape)))


def _hit(rng: np.random.Generator, chance: Floats | float, count: int) -> np.ndarray:
    """Which clusters a mechanism acts on, (C, 1)."""
    return rng.random((count, 1)) < chance


def _small(c: Clusters, rng: np.random.Generator, hardness: Floats) -> Clusters:
    """Small batches, and batches with dominating fixed costs: small networks on throttled hosts."""
    count, workers = c.shape
    old = (c.base_batch / workers)[:, None]
    new = np.where(_hit(rng, 0.25, count), np.minimum(rng.integers(4, 33, (count, 1)), old), old).astype(np.int64)
    beta = c.beta * old / new
    cap = np.full(c.shape, 1 << 30) if c.memory_cap is None else c.memory_cap
    own = new * _log_uniform(rng, 1.5, 12.0, c.shape)
    cap = np.where(new < old, own, np.minimum(cap, np.where(rng.random((count, 1)) < 0.5, own, 1 << 30)))
    whole = c.alpha + beta * new
    fixed = np.where(_hit(rng, 0.3, count), rng.uniform(0.3, 0.85, (count, 1)), c.alpha / whole)
    fixed = np.clip(fixed * np.exp(0.1 * rng.normal(size=c.shape)), 0.0, 0.95)
    base, unit = (new[:, 0] * workers).astype(np.int64), c.noise_unit * (new / old)[:, 0]
    c = replace(c, alpha=fixed * whole, beta=(1 - fixed) * whole / new)
    return replace(c, base_batch=base, memory_cap=np.maximum(cap, new).astype(np.int64), noise_unit=unit)


def _cheap(c: Clusters, rng: np.random.Generator) -> Clusters:
    """In a third of the clusters the samples take nearly all time: fixed costs and exchange are some per cent."""
    count = c.shape[0]
    cheap, share = _hit(rng, 1 / 3, count), (c.base_batch / c.shape[1])[:, None]
    whole = c.alpha + c.beta * share
    fixed = _log_uniform(rng, 0.02, 0.3, (count, 1)) * np.exp(0.1 * rng.normal(size=c.shape))
    exchange = whole.max(-1) * _log_uniform(rng, 0.02, 0.3, (count,))
    c = replace(c, exchange_s=np.where(cheap[:, 0], exchange, c.exchange_s))
    alpha, beta = np.where(cheap, [fixed * whole, (1 - fixed) * whole / share], [c.alpha, c.beta])
    return replace(c, alpha=alpha, beta=beta)


def _slowed(c: Clusters, rng: np.random.Generator, hardness: Floats) -> Clusters:
    """Slowdowns of any length and rate, of some or all workers, each by itself or by rack."""
    count, workers = c.shape
    spread = np.exp(0.5 * rng.normal(size=c.shape))
    off = _log_uniform(rng, 15, 300, (count, 1)) * spread * (workers / 4) ** rng.uniform(0, 0.5, (count, 1))
    on = _log_uniform(rng, 4, 250, (count, 1)) * np.exp(0.5 * rng.normal(size=c.shape))
    reach = np.where(_hit(rng, 0.6, count), 1.0, rng.uniform(0.05, 0.5, (count, 1)))
    at_work = _hit(rng, 0.4 + 0.4 * hardness, count) & (rng.random(c.shape) < reach)
    weakest = rng.uniform(1.05, 1.4, (count, 1)) * np.ones(c.shape)
    rack = np.where(_hit(rng, 0.25, count), rng.integers(2, 9, (count, 1)), 1)
    group = np.broadcast_to(np.arange(workers), c.shape) // rack
    off, on = (np.take_along_axis(field, group, 1) for field in (off, on))
    at_work = np.take_along_axis(at_work, group, 1)
    strongest = weakest * _log_uniform(rng, 1.2, 4.5, (count, 1))
    c = replace(c, slow_off_s=np.where(at_work, off, NEVER), slow_on_s=on, slow_even=None, slow_group=group)
    return replace(c, slow_weakest=weakest, slow_strongest=strongest)


def _neighbour(c: Clusters, rng: np.random.Generator, hardness: Floats) -> Clusters:
    """A tenant that moves from worker to worker."""
    count = c.shape[0]
    factor = np.where(_hit(rng, 0.3, count)[:, 0], rng.uniform(1.2, 3.5, count), 1.0)
    return replace(c, neighbour_period_s=_log_uniform(rng, 6, 90, (count,)), neighbour_factor=factor)


def _jitter(c: Clusters, rng: np.random.Generator, hardness: Floats) -> Clusters:
    """Jitter from nearly none to strong, from white to slow, of each step or common to all workers; stalls."""
    count = c.shape[0]
    computing = (c.alpha + c.beta * (c.base_batch[:, None] / c.shape[1])).mean(-1, keepdims=True)
    sd = _log_uniform(rng, 0.005, 0.05 + 0.15 * hardness, (count, 1)) * np.ones(c.shape)
    # White or slow in all clusters of a call, because `lagged` takes the last deviation as permanent.
    memory = rng.uniform(0.4, 0.99, count) if rng.random() < 0.35 * hardness.mean() else None
    stall = np.where(_hit(rng, 0.3 * hardness, count)[:, 0], rng.uniform(0.03, 0.35, count), 0.0)
    c = replace(
        c, jitter_sd=sd, jitter_memory=memory, stall=stall, together_sd=_log_uniform(rng, 0.002, 0.15, (count,))
    )
    own_s = computing * _log_uniform(rng, 0.001, 0.03 + 0.12 * hardness, (count, 1)) * np.ones(c.shape)
    return replace(c, jitter_s=own_s)


def _bent(c: Clusters, rng: np.random.Generator, hardness: Floats) -> Clusters:
    """Time that grows faster than the batch from some size on: steeply at once, or early and gently."""
    count, workers = c.shape
    share = (c.base_batch / workers)[:, None]
    steep, gentle = _hit(rng, 0.3 * hardness, count), _hit(rng, 0.15 * hardness, count)
    at = share * np.where(steep, _log_uniform(rng, 0.5, 4.0, (count, 1)), _log_uniform(rng, 0.1, 1.0, (count, 1)))
    at = at * np.exp(rng.uniform(0, 0.4, (count, 1)) * rng.normal(size=c.shape))
    slope = np.where(steep, _log_uniform(rng, 0.2, 2.5, c.shape), _log_uniform(rng, 0.02, 0.3, c.shape))
    bent = (steep | gentle) & (_hit(rng, 0.7, count) | (rng.random(c.shape) < 0.5))
    return replace(c, cliff_at=np.where(bent, at, NEVER), cliff_slope=np.where(bent, slope, 0.0))


def _links(c: Clusters, rng: np.random.Generator, hardness: Floats) -> Clusters:
    """Unequal links that slow down at times, each by itself or all together."""
    count, workers = c.shape
    slowness = np.exp(-rng.exponential(0.5, c.shape) * _hit(rng, 0.5, count))
    together = _hit(rng, 0.5, count)
    group = np.where(together, 0, np.arange(workers))
    off = _log_uniform(rng, 12, 200, (count, 1)) * np.where(together, 1.0, max(workers / 4, 1.0)) * np.ones(c.shape)
    at_work = _hit(rng, 0.35 * hardness, count)
    share = rng.uniform(0.3, 1.0, count) if c.bytes_share is None else c.bytes_share
    on, strongest = (_log_uniform(rng, low, high, (count, 1)) * np.ones(c.shape) for low, high in ((4, 60), (1.3, 7.0)))
    c = replace(c, link=slowness / slowness.max(-1, keepdims=True), link_group=group, bytes_share=share)
    return replace(c, link_off_s=np.where(at_work, off, NEVER), link_on_s=on, link_strongest=strongest)


def _measured(c: Clusters, rng: np.random.Generator, hardness: Floats) -> Clusters:
    """Errors of times and of the noise scale, missing times, and the cost of a change."""
    count = c.shape[0]

    def some(chance: float, low: float, high: float, otherwise: Floats) -> Floats:
        return np.where(rng.random(count) < chance * hardness[:, 0], rng.uniform(low, high, count), otherwise)

    return replace(
        c,
        time_error=some(0.3, 0.05, 0.3, rng.uniform(0, 0.05, count)),
        missing_times=some(0.3, 0.02, 0.4, np.zeros(count)),
        noise_error=some(0.25, 0.4, 1.1, rng.uniform(0.05, 0.4, count)),
        missing_noise=rng.random(count) < 0.05 + 0.07 * hardness[:, 0],
        missing_training=rng.random(count) < 0.5,
        missing_host=rng.random(count) < 0.5,
        change_cost_s=rng.uniform(0.0, 0.05, count) * (c.alpha.mean(-1) + c.beta.mean(-1) * c.base_batch / c.shape[1]),
    )


def _unlike(c: Clusters, rng: np.random.Generator, hardness: Floats) -> Clusters:
    """In some calls the samples' costs differ much in half of the clusters."""
    rng, count = rng.spawn(1)[0], c.shape[0]
    if rng.random() > 0.4:
        return c
    at_work = _hit(rng, 0.6 * hardness, count)[:, 0]
    return replace(c, cost_sigma=np.where(at_work, rng.uniform(0.2, 1.2, count), 0.0))


def _recurring(c: Clusters, rng: np.random.Generator, hardness: Floats) -> Clusters:
    """In some calls workers of half of the clusters go through four speeds, once or repeatedly."""
    rng, (count, workers) = rng.spawn(1)[0], c.shape
    if rng.random() > 0.4:
        return c
    at_work = _hit(rng, 0.6 * hardness, count) & (rng.random(c.shape) < rng.uniform(0.1, 1.0, (count, 1)))
    period = _log_uniform(rng, 12, 240, (count, 1)) * np.exp(0.3 * rng.normal(size=c.shape))
    ends = np.sort(rng.random((count, workers, 3)), -1) * period[..., None]
    times = np.concatenate([np.zeros((count, workers, 1)), ends], -1)
    most = np.where(at_work, rng.uniform(1.1, 3.5, c.shape), 1.0)[..., None]
    level = rng.random(times.shape) * (rng.random(times.shape) < 0.6)
    once = _hit(rng, 0.25, count)
    start = np.where(once, 0.0, rng.random(c.shape) * period)
    return replace(c, stairs=Staircases(times, 1 + (most - 1) * level, np.where(once, np.inf, period), start))


def _interior(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Scale the noise scale so that the best B at the start is 0.35 to 3 times B0 for affine costs. In two clusters of
    seven it is 0.1 to 0.35, because a user's batch size is often too large."""
    count, base = c.shape[0], c.base_batch.astype(np.float64)
    growing, fixed = base / (1 / c.beta).sum(-1), c.exchange_s + c.alpha.mean(-1)
    usual, small = _log_uniform(rng, 0.35, 3.0, (count,)), _log_uniform(rng, 0.1, 0.35, (count,))
    best = np.where(rng.random(count) < 2 / 7, small, usual)
    rho = c.noise_rho if c.noise_rho is not None else rng.uniform(0, 0.6, count)
    start = np.clip(best**2 * base * growing / fixed, 0.02 * base, 50 * base)
    return _short(replace(c, noise_start=start, noise_rho=rho), rng)


def _short(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Short trainings: in a third of the clusters the noise scale changes much in a rollout, often falling first.

    A new network's gradients disagree. Within some steps they agree, and later they disagree more and more.
    """
    if c.noise_knots is None or c.noise_from is None:
        return replace(c, noise_unit=c.noise_unit * np.where(rng.random(c.shape[0]) < 1 / 3, 0.3, 1.0))
    count, points = c.noise_knots.shape
    short, at = _hit(rng, 1 / 3, count)[:, 0], np.linspace(0.0, 1.0, points)
    lowest, fall = rng.uniform(0.02, 0.25, (count, 1)), rng.uniform(0.0, 2.0, (count, 1))
    rise = rng.uniform(0.0, 2.5, (count, 1))
    bowl = fall * np.clip(1 - at / lowest, 0.0, 1.0) + rise * np.clip((at - lowest) / (1 - lowest), 0.0, 1.0)
    unit = np.where(short, c.base_batch * _log_uniform(rng, 80, 800, (count,)), c.noise_unit)
    begun = np.where(short, 0.3 * rng.integers(0, 2, count), c.noise_from)
    knots = np.where(short[:, None], bowl, c.noise_knots)
    return replace(c, noise_knots=knots, noise_from=begun, noise_unit=unit)
