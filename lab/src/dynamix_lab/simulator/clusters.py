"""A simulated cluster, and a sampler of varied clusters whose best batch is inside the bounds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.window import Bounds, Floats, Ints
from dynamix_lab.simulator.compute import Costs
from dynamix_lab.simulator.disturbances import Staircases
from dynamix_lab.simulator.network import ring_all_reduce


@dataclass(frozen=True, slots=True)
class Clusters:
    """C clusters of W workers. Optional fields are None if no cluster has that feature.

    Computing, (C, W)
      alpha, beta            s, s/sample
      curve, cliff_at, cliff_slope   where it is not affine; see `Costs`
      memory_cap             most samples that fit
      jitter_sd, stall (C,)  of every step, relative; jitter_memory (C,) its AR(1) coefficient from step to step
      jitter_s               sd in s of every step, whatever its batch: time slices, interrupts, the run queue
      together_sd (C,)       relative sd of a slowdown that all workers share, AR(1) from step to step
      cost_sigma (C,)        sd of the log of one sample's cost (`costs_of_samples`); if seconds are affine
      costs_known (C,)       whether the job knows the samples' costs: it divides rounds by them; windows have `work`
    Disturbances
      slow_off_s, slow_on_s, slow_weakest, slow_strongest (C, W), slow_even (C,), slow_group (C, W)   see `Slowdowns`
      neighbour_period_s, neighbour_factor (C,)   a moving neighbour
      stairs (C, W)          factors that follow the clock, unknown to all policies beforehand
      change_cost_s (C,)     added to the first step of a new allocation
      decision_s (C,)        added to the step after a window, in which a decision is made; 0 if it overlaps
    Exchange, (C,)
      exchange_s, overlap    s at rest; exponent of `step_time`
      bytes_share            fraction of it that depends on the slowest link
      link, link_off_s, link_on_s, link_strongest (C, W), link_group   slowness of links and its episodes
    Training, (C,)
      base_batch             global samples at the start
      noise_start            noise scale at the start, samples, of the base batch
      noise_unit, noise_growth   `statistics.noise_scale`; or, with noise_knots (C, K) of log phi relative to the start,
                             noise_unit is the samples of the whole training and noise_from the fraction done before
      noise_rho, noise_wander   phi grows with (B/B0)^rho; sd of slow unpredictable changes of log phi
    Measuring, (C,)
      noise_error, time_error   sd of the error of log phi, and of the relative error of a worker's mean time over a
                             window of 5 steps (that of a step is sqrt(5) times as large)
      missing_times          chance that a worker's times of a window are not measured
      missing_noise, missing_training, missing_host   whole groups never measured
    """

    alpha: Floats
    beta: Floats
    jitter_sd: Floats
    slow_off_s: Floats
    slow_on_s: Floats
    slow_strongest: Floats
    exchange_s: Floats
    overlap: Floats
    stall: Floats
    neighbour_period_s: Floats
    neighbour_factor: Floats
    noise_start: Floats
    noise_unit: Floats
    noise_growth: Floats
    noise_error: Floats
    base_batch: Ints
    missing_noise: np.ndarray
    missing_training: np.ndarray
    missing_host: np.ndarray
    curve: Ints | None = None
    cliff_at: Floats | None = None
    cliff_slope: Floats | None = None
    memory_cap: Ints | None = None
    jitter_memory: Floats | None = None
    jitter_s: Floats | None = None
    together_sd: Floats | None = None
    slow_weakest: Floats | None = None
    slow_even: np.ndarray | None = None
    slow_group: Ints | None = None
    change_cost_s: Floats | None = None
    decision_s: Floats | None = None
    bytes_share: Floats | None = None
    link: Floats | None = None
    link_off_s: Floats | None = None
    link_on_s: Floats | None = None
    link_strongest: Floats | None = None
    link_group: Ints | None = None
    noise_knots: Floats | None = None
    noise_from: Floats | None = None
    noise_rho: Floats | None = None
    noise_wander: Floats | None = None
    time_error: Floats | None = None
    missing_times: Floats | None = None
    cost_sigma: Floats | None = None
    costs_known: np.ndarray | None = None
    stairs: Staircases | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(C, W)."""
        return int(self.alpha.shape[0]), int(self.alpha.shape[1])

    @property
    def costs(self) -> Costs:
        """Seconds by batch size."""
        return Costs(self.alpha, self.beta, self.curve, self.cliff_at, self.cliff_slope)

    def take(self, rows: Any) -> Clusters:
        """Some of the clusters."""
        names = [field.name for field in dataclasses.fields(self)]
        chosen: Any = {n: None if (value := getattr(self, n)) is None else value[rows] for n in names}
        return Clusters(**chosen)


def exposed_decisions(count: int, rng: np.random.Generator) -> Floats:
    """Seconds (C,) that a decision adds to a step: 0 in half of the clusters, whose devices compute meanwhile.

    In the others it is a decision's processor time (`dynamix bench overhead`): from 2.6 ms, the goodput rule's for 4
    workers, to 14 ms, that of `dynamix` for 1,024.
    """
    return np.where(rng.random(count) < 0.5, 0.0, np.exp(rng.uniform(np.log(0.0026), np.log(0.014), count)))


def bounds_of(clusters: Clusters) -> Bounds:
    """The bounds of `Controller`: 1 to 8 times the starting size of each worker, limited by its memory."""
    workers = clusters.shape[1]
    high = np.broadcast_to(np.maximum(clusters.base_batch // workers, 1)[:, None] * 8, clusters.shape)
    if clusters.memory_cap is not None:
        high = np.minimum(high, clusters.memory_cap)
    return Bounds.of(workers, 1, high)


def sample_clusters(count: int, workers: int, seed: int) -> Clusters:
    """Varied clusters: speed ratios up to 5:1, quiet and disturbed, cheap and expensive exchange.

    The noise scale is chosen from the costs so that the best global batch at the start is 0.35 to 2.5 times the base
    batch. Otherwise most optima are at a bound and there is nothing to learn. A quarter are like the demo: four unequal
    hosts with CPU quotas, and a moving neighbour that halves the speed of one of them.
    """
    rng = np.random.default_rng([seed, workers, 77])
    shape, even = (count, workers), np.ones((count, workers))
    demo = rng.random(count) < 0.25
    per_worker = np.where(demo, 128, 2 ** rng.integers(5, 9, count))
    spread = rng.uniform(0, np.log(5), (count, 1))
    beta = np.exp(spread * rng.uniform(-0.5, 0.5, shape))
    quotas = np.array([0.56, 0.42, 0.25, 0.17])[rng.permuted(np.arange(workers) % 4 * even.astype(int), axis=1)]
    beta = np.where(demo[:, None], 0.35 / quotas, beta)
    total_s = np.exp(rng.uniform(np.log(0.05), np.log(0.6), (count, 1)))  # median compute at the base batch
    total_s = np.where(demo[:, None], rng.uniform(0.08, 0.16, (count, 1)), total_s)
    beta = beta * total_s / per_worker[:, None]
    alpha = beta * per_worker[:, None] * rng.uniform(0.02, 0.35, shape)
    fraction = np.where(demo, rng.uniform(0.2, 0.45, count), rng.uniform(0.03, 0.5, count))
    exchange = total_s[:, 0] * fraction / (1 - fraction)
    gradient_bytes, share_latency = np.exp(rng.uniform(np.log(1e6), np.log(4e8), count)), rng.uniform(0, 0.5, count)
    hops = max(2 * (workers - 1), 1)
    latency = exchange * share_latency / hops
    bandwidth = gradient_bytes * hops / workers / np.maximum(exchange * (1 - share_latency), 1e-9)
    exchange = ring_all_reduce(workers, latency, gradient_bytes, bandwidth)
    overlap = np.where(demo, rng.uniform(1, 1.6, count), rng.uniform(1, 4, count))

    base = per_worker * workers
    fixed, growing = exchange + np.mean(alpha, 1), 1 / np.sum(1 / beta, 1) * base
    optimum = np.exp(rng.uniform(np.log(0.35), np.log(2.5), count))
    noise = np.clip(optimum**2 * base * growing / fixed, 0.1 * base, 20 * base)

    hazard = rng.choice(3, (count, 1), p=[0.3, 0.4, 0.3])  # quiet, rare, frequent
    off = np.array([np.inf, 90.0, 25.0])[hazard] * np.exp(rng.normal(0, 0.4, shape)) * np.sqrt(workers / 4)
    on = np.exp(rng.uniform(np.log(4), np.log(40), shape))
    has_neighbour = demo | (rng.random(count) < 0.3)
    return Clusters(
        alpha=alpha,
        beta=beta,
        jitter_sd=np.exp(rng.uniform(np.log(0.01), np.log(0.15), (count, 1))) * even,
        slow_off_s=np.where(np.isfinite(off), np.minimum(off, 1e6), 1e12),
        slow_on_s=on,
        slow_strongest=np.exp(rng.uniform(np.log(1.3), np.log(4), (count, 1))) * even,
        exchange_s=np.asarray(exchange, np.float64),
        overlap=overlap,
        stall=np.where(demo | (rng.random(count) < 0.3), rng.uniform(0.05, 0.35, count), 0.0),
        neighbour_period_s=np.where(demo, rng.uniform(12, 18, count), rng.uniform(8, 60, count)),
        neighbour_factor=np.where(has_neighbour, np.where(demo, 2.0, rng.uniform(1.3, 3, count)), 1.0),
        noise_start=noise,
        noise_unit=base * rng.uniform(50, 400, count),
        noise_growth=rng.uniform(0.0, 1.0, count),
        noise_error=rng.uniform(0.05, 0.4, count),
        base_batch=base.astype(np.int64),
        missing_noise=rng.random(count) < 0.05,
        missing_training=rng.random(count) < 0.3,
        missing_host=rng.random(count) < 0.3,
        decision_s=exposed_decisions(count, rng.spawn(1)[0]),
    )
