"""Families of clusters sampled from the calibration. Half of them violate the baselines' assumptions, based on data.

A family is a name and a function that changes the plain cluster: mixed GPUs of one calibrated model, ring all-reduce
over equal links, light jitter, errors of measurement, no disturbance.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.window import Floats, Ints
from dynamix_lab.simulator.calibration import Affine, calibration
from dynamix_lab.simulator.clusters import Clusters, bounds_of, exposed_decisions
from dynamix_lab.simulator.disturbances import Staircases

# Models with a fitted noise scale. yolov3 has one too but no affine costs.
AFFINE_MODELS = ("cifar10", "deepspeech2", "imagenet")
NEVER = 1e12
Gpus = list[list[Affine]]  # for every worker of every cluster
Change = Callable[[Clusters, np.random.Generator], Clusters]


def sample_family(name: str, count: int, workers: int, seed: int) -> Clusters:
    """`count` clusters of `workers` workers of a family. Raises `ConfigError` for an unknown name.

    >>> sample_family("pai-straggler", 3, 4, seed=0).shape
    (3, 4)
    """
    if name not in FAMILIES:
        raise ConfigError("family", name, ", ".join(FAMILIES), "check the spelling")
    rng = np.random.default_rng([seed, workers, *name.encode()])
    models = ("yolov3", "imagenet", "ncf") if name == "non-affine" else AFFINE_MODELS
    return FAMILIES[name](_plain(models, count, workers, rng), rng)


def _plain(models: tuple[str, ...], count: int, workers: int, rng: np.random.Generator) -> Clusters:
    """The plain cluster. With its noise scale most optima are inside the bounds (`docs/design/simulator.md`)."""
    shape = (count, workers)
    gpus, per_worker = _draw_gpus(models, shape, rng)
    alpha, beta = (np.array([[getattr(fit, name) for fit in row] for row in gpus]) for name in ("alpha_s", "beta_s"))
    curve = np.array([[calibration().curve(fit.model, fit.gpu) for fit in row] for row in gpus])
    cap = np.array([[fit.batch_max for fit in row] for row in gpus])
    base = per_worker * workers
    computing = (alpha + beta * per_worker[:, None]).max(-1)
    fraction = rng.uniform(0.03, 0.5, count)
    exchange = computing * fraction / (1 - fraction) if workers > 1 else np.zeros(count)
    spread = np.exp(rng.normal(0, 1, shape) * _pai_spread(count, rng)[:, None])
    alpha, beta = alpha * spread, beta * spread
    plain = Clusters(
        alpha=alpha,
        beta=beta,
        curve=curve if (curve >= 0).any() else None,
        memory_cap=cap,
        jitter_sd=np.broadcast_to(np.exp(rng.uniform(np.log(0.01), np.log(0.06), (count, 1))), shape),
        jitter_s=computing[:, None] * np.exp(rng.uniform(np.log(0.002), np.log(0.1), (count, 1))) * np.ones(shape),
        together_sd=np.exp(rng.uniform(np.log(0.003), np.log(0.12), count)),
        stall=np.zeros(count),
        slow_off_s=np.full(shape, NEVER),
        slow_on_s=np.ones(shape),
        slow_strongest=np.ones(shape),
        neighbour_period_s=np.full(count, 60.0),
        neighbour_factor=np.ones(count),
        exchange_s=exchange,
        overlap=rng.uniform(1, 4, count),
        bytes_share=rng.uniform(0.5, 1.0, count),
        change_cost_s=rng.uniform(0.0, 0.05, count) * computing,
        decision_s=exposed_decisions(count, rng.spawn(1)[0]),
        base_batch=base.astype(np.int64),
        noise_start=np.ones(count),
        noise_unit=np.ones(count),
        noise_growth=np.zeros(count),
        noise_error=rng.uniform(0.05, 0.4, count),
        time_error=rng.uniform(0.0, 0.05, count),
        missing_noise=rng.random(count) < 0.05,
        missing_training=rng.random(count) < 0.3,
        missing_host=rng.random(count) < 0.3,
    )
    return _with_noise(gpus, rng, plain)


def _draw_gpus(models: tuple[str, ...], shape: tuple[int, int], rng: np.random.Generator) -> tuple[Gpus, Ints]:
    """One to three GPU types per cluster, and samples per worker (C,) that fit the smallest memory several times."""
    rows, per_worker = [], []
    for _ in range(shape[0]):
        model = str(rng.choice(models))
        fits = [fit for (name, _), fit in calibration().affine.items() if name == model]
        if models == AFFINE_MODELS:
            fits = calibration().affine_models()[model]
        kinds = rng.choice(len(fits), min(int(rng.integers(1, 4)), len(fits)), replace=False)
        row = [fits[int(kind)] for kind in rng.choice(kinds, shape[1])]
        rows.append(row)
        least, most = max(fit.batch_min for fit in row), min(fit.batch_max for fit in row)
        per_worker.append(round(float(np.exp(rng.uniform(np.log(least), np.log(max(most / 2, least + 1)))))))
    return rows, np.array(per_worker)


def _with_noise(gpus: Gpus, rng: np.random.Generator, clusters: Clusters) -> Clusters:
    """Noise-scale curves of the clusters' models, scaled so that the best B at the start is 0.5 to 2 times B0."""
    count, known = clusters.shape[0], calibration().noise
    curves = [known.get(row[0].model, known["cifar10"]) for row in gpus]
    base = clusters.base_batch.astype(np.float64)
    growing, fixed = base / (1 / clusters.beta).sum(-1), clusters.exchange_s + clusters.alpha.mean(-1)
    best = np.exp(rng.uniform(np.log(0.5), np.log(2.0), count))
    return replace(
        clusters,
        noise_start=np.clip(best**2 * base * growing / fixed, 0.1 * base, 50 * base),
        noise_knots=np.array([curve.knots for curve in curves]),
        noise_from=rng.uniform(0.0, 0.8, count),
        noise_unit=base * np.exp(rng.uniform(np.log(1000), np.log(8000), count)),
        noise_rho=np.array([curve.rho for curve in curves]),
        noise_wander=np.array([0.5 * curve.residual for curve in curves]),
    )


def _pai_spread(count: int, rng: np.random.Generator) -> Floats:
    """Spread between equal workers: log-normal through the median of 100 PAI jobs, cut at 0.3."""
    spread = calibration().processes["spread-of-100-jobs"]
    sd = np.log(spread["p90"] / spread["median"]) / 1.2816
    return np.asarray(np.minimum(spread["median"] * np.exp(sd * rng.normal(size=count)), 0.3))


def _slowdowns(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Slowdowns of each worker by itself, rare or frequent."""
    count, workers = c.shape
    off = rng.choice([90.0, 25.0], (count, 1)) * np.exp(rng.normal(0, 0.4, c.shape)) * np.sqrt(workers / 4)
    strongest = np.broadcast_to(np.exp(rng.uniform(np.log(1.3), np.log(4), (count, 1))), c.shape)
    on = np.exp(rng.uniform(np.log(4), np.log(40), c.shape))
    return replace(c, slow_off_s=off, slow_on_s=on, slow_strongest=strongest)


def _pai_steady(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Steady but uneven: jitter as in that PAI job, spread between workers from its neighbours'."""
    job = calibration().processes["steady-uneven"]
    uneven = np.exp(rng.normal(0, 1, c.shape) * 2 * job["spread"])
    return replace(c, alpha=c.alpha * uneven, beta=c.beta * uneven, jitter_sd=np.full(c.shape, job["jitter"]))


def _pai_straggler(c: Clusters, rng: np.random.Generator, *, name: str, share: float) -> Clusters:
    """A fraction of the workers, at least one, slows down for some minutes, by factors similar to that PAI job's."""
    job = calibration().processes[name]
    hit = _hit(c, share, rng)
    off, strongest = (
        np.where(hit, rng.uniform(30, 200, c.shape), NEVER),
        max(1.0 + 2.5 * (job["slow_factor"] - 1.0), 1.3),
    )
    c = replace(c, slow_off_s=off, slow_on_s=np.full(c.shape, max(job["slow_mean_s"], 30.0)))
    return replace(c, slow_strongest=np.full(c.shape, strongest), jitter_sd=np.full(c.shape, job["jitter"]))


def _dbs(c: Clusters, rng: np.random.Generator) -> Clusters:
    """DBS's own test: 5-10 s extra per epoch for 4-20 epochs, with chance 0.1 an epoch; here an epoch takes 15-60 s."""
    epoch_s = rng.uniform(15, 60, (c.shape[0], 1)) * np.ones(c.shape)
    c = replace(c, slow_off_s=epoch_s / 0.1, slow_on_s=12 * epoch_s, slow_even=np.ones(c.shape[0], bool))
    return replace(c, slow_weakest=1 + 5 / epoch_s, slow_strongest=1 + 10 / epoch_s)


def _links(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Unequal links, some of which slow down at times."""
    slowness = np.exp(-rng.exponential(0.6, c.shape))
    slowness /= slowness.max(-1, keepdims=True)
    off = rng.uniform(40, 200, c.shape) * max(c.shape[1] / 4, 1)
    on, strongest = rng.uniform(5, 40, c.shape), np.full(c.shape, 4.0)
    return replace(c, link=slowness, link_off_s=off, link_on_s=on, link_strongest=strongest)


def _neighbour(c: Clusters, rng: np.random.Generator) -> Clusters:
    """A tenant that moves from worker to worker."""
    count = c.shape[0]
    return replace(c, neighbour_period_s=rng.uniform(8, 60, count), neighbour_factor=rng.uniform(1.3, 3, count))


def _cliff(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Too little memory: beyond a part of the largest batch measured, time grows faster than the batch."""
    at = (c.base_batch / c.shape[1])[:, None] * rng.uniform(0.8, 2.0, c.shape)
    return replace(_slowdowns(c, rng), cliff_at=at, cliff_slope=rng.uniform(0.5, 2.0, c.shape))


def _colocation(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Other jobs share the GPU at times; their slowdowns are drawn from Gavel's measured pairs."""
    measured = np.stack([quantiles for _, quantiles in sorted(calibration().colocation.items())])
    quantiles = measured[rng.integers(0, len(measured), c.shape)]
    low, high = quantiles[..., 5], np.minimum(quantiles[..., 17], 6.0)  # the middle of the pairs' slowdowns
    off, on = (np.exp(rng.uniform(np.log(least), np.log(200), c.shape)) for least in (30, 20))
    return replace(c, slow_off_s=off, slow_on_s=on, slow_weakest=low, slow_strongest=high)


def _correlated(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Racks: neighbouring workers slow down together."""
    rack = np.maximum(rng.integers(2, 5, c.shape[0]), 2)[:, None]
    group, slowed = np.broadcast_to(np.arange(c.shape[1]), c.shape) // rack, _slowdowns(c, rng)
    off, on = (np.take_along_axis(field, group, 1) for field in (slowed.slow_off_s, slowed.slow_on_s))
    return replace(slowed, slow_off_s=off, slow_on_s=on, slow_group=group)


def _drifting(c: Clusters, rng: np.random.Generator) -> Clusters:
    """AR(1) jitter: most of a step's deviation remains in the next, so speeds wander."""
    sd = np.broadcast_to(np.exp(rng.uniform(np.log(0.03), np.log(0.2), (c.shape[0], 1))), c.shape)
    return replace(c, jitter_sd=sd, jitter_memory=rng.uniform(0.7, 0.98, c.shape[0]))


def _contention(c: Clusters, rng: np.random.Generator) -> Clusters:
    """A shared switch: all links slow down together, more with more workers."""
    alike = np.ones(c.shape)
    strongest = 1.5 + rng.uniform(0.3, 0.8, (c.shape[0], 1)) * np.log2(max(c.shape[1], 2)) * alike
    off, on = (rng.uniform(*range_s, (c.shape[0], 1)) * alike for range_s in ((15, 60), (5, 40)))
    c = replace(c, link=alike, link_group=np.zeros(c.shape, dtype=np.int64))
    return replace(c, link_off_s=off, link_on_s=on, link_strongest=strongest)


def _poor_probes(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Times with 5-25 % error, up to a third of them missing, and a noise scale that is very noisy or unknown."""
    c, count = _slowdowns(c, rng), c.shape[0]
    c = replace(c, time_error=rng.uniform(0.05, 0.25, count), missing_times=rng.uniform(0.05, 0.33, count))
    return replace(c, noise_error=rng.uniform(0.3, 1.0, count), missing_noise=rng.random(count) < 0.3)


def _data_dependent(c: Clusters, rng: np.random.Generator, *, sigma: float) -> Clusters:
    """Samples with log-normal costs, like sentences of different length. A batch's cost is known after it is done."""
    return replace(c, cost_sigma=np.full(c.shape[0], sigma))


def with_lengths(clusters: Clusters) -> Clusters:
    """The same clusters, for jobs that know each sample's cost (`batch_sampler(dataset, lengths=...)`)."""
    return replace(clusters, costs_known=np.full(clusters.shape[0], True))


def _rotating(c: Clusters, rng: np.random.Generator) -> Clusters:
    """One tenant for every four workers. It visits its workers in turn, always in the same order."""
    count, workers = c.shape
    turns = -(-workers // max(workers // 4, 1))
    turn = rng.permuted(np.broadcast_to(np.arange(workers), c.shape), axis=1) % turns
    period, factor = rng.uniform(8, 60, (count, 1)), rng.uniform(1.3, 3, (count, 1)) * np.ones(c.shape)
    one = np.ones(c.shape)
    times = np.stack([0 * one, turn * period, (turn + 1) * period], -1)
    return replace(c, stairs=Staircases(times, np.stack([one, factor, one], -1), turns * period * one, 0 * one))


def _periodic(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Half of the workers, at least one, have a tenant that is there periodically, each with its own period."""
    hit = _hit(c, 0.5, rng)
    period, share = rng.uniform(20, 120, c.shape), rng.uniform(0.2, 0.6, c.shape)
    factor = np.where(hit, rng.uniform(1.3, 4, c.shape), 1.0)
    stairs = np.stack([np.zeros(c.shape), share * period], -1), np.stack([factor, np.ones(c.shape)], -1)
    return replace(c, stairs=Staircases(*stairs, period, rng.uniform(0, 1, c.shape) * period))


def _throttling(c: Clusters, rng: np.random.Generator) -> Clusters:
    """Half of the workers, at least one, overheat: their clocks fall in six steps and recover in two, repeatedly.

    Throttling follows the wall clock, whatever a worker computes; the ranges are ours.
    """
    hit, period = _hit(c, 0.5, rng), rng.uniform(60, 240, c.shape)
    most = np.where(hit, rng.uniform(1.3, 2.5, c.shape), 1.0)[..., None]
    at, heat = np.array([0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.95]), np.array([0, 1, 2, 3, 4, 5, 6, 3]) / 6
    stairs = Staircases(period[..., None] * at, 1 + (most - 1) * heat, period, rng.uniform(0, 1, c.shape) * period)
    return replace(c, stairs=stairs)


def _warm_up(c: Clusters, rng: np.random.Generator) -> Clusters:
    """All workers begin slowly (caches, compilers, clocks) and reach their speed at different times."""
    slowest, slow_s = rng.uniform(1.5, 4, c.shape)[..., None], rng.uniform(5, 40, c.shape)[..., None]
    at = np.linspace(0, 3, 13)
    left = np.append(np.exp(-at[:-1]), 0.0)
    forever = np.full(c.shape, np.inf)
    return replace(c, stairs=Staircases(slow_s * at, 1 + (slowest - 1) * left, forever, np.zeros(c.shape)))


def _replaced(c: Clusters, rng: np.random.Generator) -> Clusters:
    """A tenth of the workers, at least one, is lost once. The others wait. The replacement has another speed.

    The step of the loss takes longer by the time without the worker, at the base batch.
    """
    hit, one = _hit(c, 0.1, rng), np.ones(c.shape)
    lost, away = rng.uniform(15, 120, c.shape), rng.uniform(2, 10, c.shape)
    new = np.where(hit, np.exp(rng.uniform(np.log(0.4), np.log(2.5), c.shape)), 1.0)
    own = np.broadcast_to((c.base_batch / c.shape[1])[:, None], c.shape)
    waiting = np.where(hit, 1 + away / c.costs.seconds(own), 1.0)
    times, factors = np.stack([0 * one, lost, lost + away], -1), np.stack([one, waiting, new], -1)
    return replace(c, stairs=Staircases(times, factors, np.inf * one, 0 * one))


def _hit(c: Clusters, share: float, rng: np.random.Generator) -> np.ndarray:
    """A fraction of the workers (C, W), at least one in every cluster."""
    hit = rng.random(c.shape) < share
    hit[np.arange(len(hit)), rng.integers(0, c.shape[1], len(hit))] = True
    return np.asarray(hit)


CONFORMING: dict[str, Change] = {
    "affine-quiet": lambda clusters, rng: clusters,
    "affine-slowdowns": _slowdowns,
    "pai-steady": _pai_steady,
    "pai-straggler": partial(_pai_straggler, name="late-straggler", share=0.1),
    "pai-stragglers": partial(_pai_straggler, name="several-stragglers", share=0.3),
    "dbs-process": _dbs,
    "moving-neighbour": _neighbour,
}
BREAKING: dict[str, Change] = {
    "non-affine": _slowdowns,
    "memory-cliff": _cliff,
    "co-location": _colocation,
    "correlated": _correlated,
    "ar1-jitter": _drifting,
    "link-contention": _contention,
    "poor-probes": _poor_probes,
}
# Added later, for development: no shipped policy was trained on them. Developers see them, so a claim needs unseen
# families: `--families-from` of the suites.
DEVELOPMENT: dict[str, Change] = {
    "data-dependent": partial(_data_dependent, sigma=0.5),
    "data-dependent-wide": partial(_data_dependent, sigma=1.0),
    "rotating-neighbours": _rotating,
    "periodic-neighbours": _periodic,
    "throttling": _throttling,
    "warm-up": _warm_up,
    "replaced-worker": _replaced,
}
TRAINING: tuple[str, ...] = (*CONFORMING, *BREAKING, "unequal-links")  # the default families for training policies
FAMILIES: dict[str, Change] = {**CONFORMING, **BREAKING, "unequal-links": _links, **DEVELOPMENT}


def interior_share(sizes: Ints, clusters: Clusters) -> Any:
    """Fraction of workers (C,) whose size is inside its bounds, so that a policy can change it either way."""
    bounds = bounds_of(clusters)
    return ((sizes > bounds.low) & (sizes < bounds.high)).mean(-1)
