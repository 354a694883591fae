"""C clusters at once, one window per step, as the controller of a live job would see and delay them."""

from __future__ import annotations

import numpy as np

from dynamix.errors import ConfigError
from dynamix.simulator.clusters import Clusters, bounds_of
from dynamix.simulator.compute import compute_time, jitter
from dynamix.simulator.disturbances import MovingNeighbour, Slowdowns
from dynamix.simulator.network import step_time
from dynamix.simulator.statistics import efficiency, noise_scale
from dynamix.simulator.streams import Stream
from dynamix.window import Floats, Ints, Window


class ClusterEnv:
    """`reset()` gives the first `Window` (equal shares); `step(sizes)` takes an allocation (C, W), gives the next.

    A step is `delay` optimizer steps on the allocation in force (a decision needs one step to travel, more with loader
    workers; they belong to no window), then `interval` measured steps on the new one. `clock_s` and `progress`
    (base-batch samples' worth of training) are (C,) totals; disturbances follow the wall clock, and all random numbers
    are counter-based, so that every policy meets the same world.

    >>> from dynamix.simulator import sample_clusters
    >>> env = ClusterEnv(sample_clusters(3, 4, seed=0), seed=1)
    >>> window = env.reset()
    >>> window = env.step(window.batch_size)
    >>> window.compute.shape
    (3, 4)
    """

    def __init__(self, clusters: Clusters, *, seed: int, interval: int = 5, delay: int = 1) -> None:
        if interval < 1 or delay < 0:
            raise ConfigError(
                "interval, delay", (interval, delay), "interval 1 or more, delay 0 or more", "use 5 and 1"
            )
        self.clusters, self.seed, self.interval, self.delay = clusters, seed, interval, delay
        self.bounds = bounds_of(clusters)
        count = clusters.shape[0]
        self._jitter = Stream(seed, "jitter", clusters.shape)
        self._cpu = Stream(seed, "cpu", clusters.shape)
        self._training = Stream(seed, "training", clusters.shape)
        self._noise = Stream(seed, "noise", (count,))
        self.reset()

    def reset(self) -> Window:
        """Start over, the same world again; the first window at equal shares of the base batch."""
        c = self.clusters
        count, workers = c.shape
        self.slowdowns = Slowdowns(self.seed, c.slow_off_s, c.slow_on_s, c.slow_strongest)
        self.neighbour = MovingNeighbour(self.seed, workers, c.neighbour_period_s, c.neighbour_factor)
        self.clock_s, self.progress = np.zeros(count), np.zeros(count)
        self.steps = self.windows = 0
        self._noise_error = np.zeros(count)
        self.batch: Ints = np.broadcast_to((c.base_batch // workers)[:, None], c.shape).copy()
        return self._measure()

    def step(self, sizes: Ints) -> Window:
        """Apply `sizes` (C, W) after the delay and return the window measured under it."""
        if sizes.shape != self.batch.shape:
            raise ConfigError("allocation shape", sizes.shape, str(self.batch.shape), "one size per cluster and worker")
        for _ in range(self.delay):
            self.advance()
        self.batch = np.asarray(sizes, dtype=np.int64)
        return self._measure()

    def slowdown(self) -> Floats:
        """Factors (C, W) on compute now."""
        return np.asarray(self.slowdowns.at(self.clock_s) * self.neighbour.at(self.clock_s))

    def true_noise_scale(self) -> Floats:
        """phi (C,) now."""
        c = self.clusters
        return noise_scale(c.noise_start, self.progress, c.noise_unit, c.noise_growth)

    def advance(self) -> tuple[Floats, Floats]:
        """One optimizer step; compute (C, W) and the whole step (C,), s."""
        c = self.clusters
        factor = self.slowdown() * jitter(self._jitter, np.uint64(self.steps), c.jitter_sd, c.stall[:, None])
        busy = compute_time(c.alpha, c.beta, self.batch.astype(np.float64), factor)
        whole = step_time(busy.max(-1), c.exchange_s, c.overlap)
        total = self.batch.sum(-1).astype(np.float64)
        self.progress = self.progress + total * efficiency(
            self.true_noise_scale(), total, c.base_batch.astype(np.float64)
        )
        self.clock_s = self.clock_s + whole
        self.steps += 1
        return busy, whole

    def _measure(self) -> Window:
        mean, square, wait = np.zeros((3, *self.batch.shape))
        exchange = np.zeros(len(self.batch))
        for _ in range(self.interval):
            busy, whole = self.advance()
            slowest = busy.max(-1)
            mean += busy
            square += busy * busy
            wait += slowest[:, None] - busy
            exchange += whole - slowest
        k = self.interval
        mean, wait, exchange = mean / k, wait / k, exchange / k
        variance = np.maximum(square / k - mean**2, 0.0) * (k / (k - 1) if k > 1 else np.nan)
        self.windows += 1
        idle = self.batch == 0
        return Window.of(
            self.batch,
            compute=np.where(idle, np.nan, mean),
            compute_std=np.where(idle, np.nan, np.sqrt(variance)),
            wait=wait,
            communication=exchange[:, None],
            data=mean * 0.002,
            steps=k,
            age=k,
            step=self.steps,
            base_batch=self.clusters.base_batch,
            **self._training_statistics(),
            **self._host_statistics(mean, wait, exchange),
        )

    def _training_statistics(self) -> dict[str, Floats]:
        c, counter = self.clusters, np.uint64(self.windows)
        # The estimate is smoothed over windows, so its error is too (AR(1)).
        self._noise_error = 0.9 * self._noise_error + np.sqrt(1 - 0.81) * c.noise_error * self._noise.normal(counter)
        unknown = c.missing_noise | (self.windows < 2)
        noise = np.where(unknown, np.nan, self.true_noise_scale() * np.exp(self._noise_error))
        change = self._training.normal(counter) * 0.7
        hidden = (c.missing_training | (self.windows < 2))[:, None]
        return {
            "noise": noise,
            "signal": np.where(unknown, np.nan, 1.0),
            "loss_change": np.where(hidden, np.nan, change - 0.05),
            "accuracy_change": np.where(hidden, np.nan, 0.05 - 0.8 * change),
        }

    def _host_statistics(self, busy: Floats, wait: Floats, exchange: Floats) -> dict[str, Floats]:
        hidden = self.clusters.missing_host[:, None]
        noise = 1.0 + 0.05 * self._cpu.normal(np.uint64(self.windows))
        cpu = np.clip(busy / np.maximum(busy + wait + exchange[:, None], 1e-9) * noise, 0.0, 1.0)
        return {"cpu": np.where(hidden, np.nan, cpu), "memory": np.where(hidden, np.nan, 0.5)}
