"""C clusters at once, one window per step, as a live job's controller sees them; and rollouts of a policy."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix_lab.simulator.calibration import calibration
from dynamix_lab.simulator.clusters import Clusters, bounds_of
from dynamix_lab.simulator.compute import costs_of_samples, costs_when_cut, jitter, near_normal
from dynamix_lab.simulator.disturbances import LEAST, MovingNeighbour, Slowdowns, SlowdownTrace
from dynamix_lab.simulator.measuring import RECENT, Averaged, StepsTaken
from dynamix_lab.simulator.network import exchange_time, step_time
from dynamix_lab.simulator.rounds import RoundApart
from dynamix_lab.simulator.statistics import Generalisation, along, efficiency, noise_scale
from dynamix_lab.simulator.streams import Bits, RandomStream

TOGETHER_MEMORY = 0.9  # of the slowdown common to all workers, per step: the emulator's windows of 5 correlate by half
MEMORY = 0.5  # fraction of a host's memory in use
NOISE_MEMORY = 0.9  # of the error of log phi, per window: the estimate is smoothed, so its errors are correlated
ERROR_STEPS = 5  # length of the windows for which errors of measurement are given
NORMS_EVERY = 5  # squared norms are measured in a window's first step and in every fifth after it


class ClusterEnv:
    """`reset()` returns the first `Window` (equal shares). `step(sizes)` applies sizes (C, W), returns the next window.

    Sizes are a policy's answer, and are treated as in a job: the nearest ones within `bounds` apply (`project`).

    If an allocation changes, a step first makes `delay` optimizer steps with the previous one (the time that a decision
    takes to arrive; they belong to no window), then `interval` measured steps with the new one. Otherwise the next
    window begins at once. `clock_s` and `progress` (in base-batch samples) are (C,) totals. Every policy sees the same
    world: disturbances follow the wall clock, and random numbers are counter-based. `step(sizes, lengths)` sets each
    cluster's window length, (C,) steps.

    trace     slowdowns recorded elsewhere, in addition to the clusters' own; its width must be W
    lr_rule   "adascale": a step's progress follows the noise scale. "none": a constant learning rate, whose step-count
              curve was measured on a real workload (`calibration().step_count_ratio`)

    >>> from dynamix_lab.simulator import sample_clusters
    >>> env = ClusterEnv(sample_clusters(3, 4, seed=0), seed=1)
    >>> env.step(env.reset().batch_size).compute.shape
    (3, 4)
    """

    def __init__(
        self,
        clusters: Clusters,
        *,
        seed: int,
        interval: int = 5,
        delay: int = 1,
        trace: SlowdownTrace | None = None,
        lr_rule: str = "adascale",
    ) -> None:
        if interval < 1 or delay < 0:
            allowed = "interval 1 or more, delay 0 or more"
            raise ConfigError("interval, delay", (interval, delay), allowed, "use 5 and 1")
        if lr_rule not in ("adascale", "none"):
            raise ConfigError("lr_rule", lr_rule, "adascale, none", "other rules have no model of progress here")
        if trace is not None and trace.factors.shape[1] != clusters.shape[1]:
            width = trace.factors.shape[1]
            raise ConfigError("workers", clusters.shape[1], f"{width}, as the trace has", "sample such clusters")
        self.clusters, self.seed, self.interval, self.delay = clusters, seed, interval, delay
        self.trace, self.lr_rule = trace, lr_rule
        self.bounds, self.costs = bounds_of(clusters), clusters.costs
        self._jitter, self._slices, self._cpu, self._measured, self._training, self._timed = (
            RandomStream(seed, purpose, clusters.shape)
            for purpose in ("jitter", "slices", "cpu", "measured", "training", "timed")
        )
        self._samples, self._cuts = (RandomStream(seed, purpose, clusters.shape) for purpose in ("samples", "cuts"))
        self._together, self._noise, self._wander = (
            RandomStream(seed, purpose, clusters.shape[:1]) for purpose in ("together", "noise", "wander")
        )
        # Factor on the measured noise scale. With a constant learning rate the measured critical batch replaces it.
        self.critical_share = 1.0 if lr_rule == "adascale" else calibration().step_count_ratio
        self.reset()

    def reset(self) -> Window:
        """Restart the same world. Returns the first window, with equal shares of the base batch."""
        c = self.clusters
        count, workers = c.shape
        slow = c.slow_off_s, c.slow_on_s, c.slow_strongest
        weakest = LEAST if c.slow_weakest is None else c.slow_weakest
        self.slowdowns = Slowdowns(self.seed, *slow, weakest=weakest, even=c.slow_even, group=c.slow_group)
        self.links = None
        if c.link_off_s is not None and c.link_on_s is not None and c.link_strongest is not None:
            links = c.link_off_s, c.link_on_s, c.link_strongest
            self.links = Slowdowns(self.seed, *links, group=c.link_group, purpose="link")
        self.neighbour = MovingNeighbour(self.seed, workers, c.neighbour_period_s, c.neighbour_factor)
        self.windows = 0
        self.counts: Ints = np.zeros(count, dtype=np.int64)  # optimizer steps of each cluster
        self._recent_s = np.full((RECENT, count), np.nan)  # seconds of whole steps in windows, the newest last
        self.clock_s, self.progress, self._octaves, self._noise_error, self._wave = np.zeros((5, count))
        self._drift = np.zeros(c.shape)
        self._work: Floats = np.full(c.shape, np.nan)  # cost of the last step's samples, in samples of mean cost
        self._changed: np.ndarray | None = None  # clusters (C,) whose next step has the cost of a change,
        self._deciding: np.ndarray | None = None  # or of a decision
        self.batch: Ints = np.broadcast_to((c.base_batch // workers)[:, None], c.shape).copy()
        return self._measure(self.batch, np.full(count, self.interval), np.zeros(count, dtype=np.int64))

    def step(self, sizes: ArrayLike, lengths: Ints | None = None) -> Window:
        """Apply `sizes` (C, W), after the delay if they differ. Returns the window measured with them.

        lengths   (C,) measured steps, 1 or more; None: `interval` for all clusters

        Raises `ConfigError` for an answer that a job refuses: of another shape, negative or not finite.
        """
        if (wish := np.asarray(sizes)).shape != self.batch.shape:
            fix = "return one size per worker"
            raise ConfigError("shape of the policy's answer", wish.shape, str(self.batch.shape), fix)
        count = len(self.batch)
        steps = np.broadcast_to(np.asarray(self.interval if lengths is None else lengths, dtype=np.int64), (count,))
        if (steps < 1).any():
            raise ConfigError("lengths", int(steps.min()), "1 step or more", "give each window a step")
        allowed = project(wish, self.bounds, current=self.batch)
        self.decided()
        changed = (allowed != self.batch).any(-1)
        return self._measure(allowed, steps, np.where(changed, self.delay, 0))

    @property
    def steps(self) -> int:
        """Optimizer steps of the cluster with most."""
        return int(self.counts.max())

    @steps.setter
    def steps(self, value: int) -> None:
        self.counts = np.full(len(self.batch), value, dtype=np.int64)

    @property
    def counter(self) -> Bits:
        """(C, 1) counter for the next step's random numbers."""
        return self.counts.astype(np.uint64)[:, None]

    def decided(self) -> None:
        """Record that a policy was called. If decisions take time, the next step includes it."""
        self._deciding = np.ones(len(self.batch), dtype=bool)

    def charge(self, costs: Floats) -> None:
        """Set the extra cost of the next step's samples, (C, W), if training is real and has such costs.

        Ignored here. A world with such costs stores it for its next `advance`.
        """

    def host_figures(self, busy_s: Floats, whole_s: Floats, steps: int) -> dict[str, Floats]:
        """The readings of the hosts' probes over a window, each (C, W) under its name in `Window`.

        For real training on this world's clock. A figure that is absent counts as not measured.

        busy_s    (C, W) seconds that each worker computed
        whole_s   (C,) seconds of the window
        steps     optimizer steps in it
        """
        cpu = busy_s / np.maximum(whole_s, 1e-9)[:, None]
        hidden = np.broadcast_to(self.clusters.missing_host[:, None], busy_s.shape)
        return {"cpu": np.where(hidden, np.nan, cpu), "memory": np.where(hidden, np.nan, MEMORY)}

    def apply(self, sizes: Ints) -> None:
        """Put `sizes` (C, W) in force. If they differ, the next `advance` includes the cost of a change."""
        if self.clusters.change_cost_s is not None:
            changed = (sizes != self.batch).any(-1)
            self._changed = changed if self._changed is None else self._changed | changed
        self.batch = np.asarray(sizes, dtype=np.int64)

    def slowdown(self) -> Floats:
        """Present factors (C, W) on computing."""
        factor = self.slowdowns.at(self.clock_s) * self.neighbour.at(self.clock_s)
        if self.clusters.stairs is not None:
            factor = factor * self.clusters.stairs.at(self.clock_s)
        return np.asarray(factor if self.trace is None else factor * self.trace.at(self.clock_s))

    def expected(self) -> Floats:
        """Mean factors (C, W) on a step's computing at this moment: slowdown, drift and mean stall."""
        c, factor = self.clusters, self.slowdown() * (1.0 + self.clusters.stall / 8)[:, None]
        return factor if c.jitter_memory is None else factor * np.maximum(1.0 + c.jitter_sd * self._drift, 0.3)

    def exchange(self) -> Floats:
        """Present seconds (C,) of an exchange."""
        return self._moving(1.0)

    def _moving(self, ratio: float) -> Floats:
        """Seconds (C,) for `ratio` times the bytes of an exchange now. If the bytes' share of it is unknown, they are
        all of it."""
        c = self.clusters
        if c.bytes_share is None:
            return c.exchange_s * ratio
        link = np.ones(c.shape) if c.link is None else c.link
        slowed = link if self.links is None else link * self.links.at(self.clock_s)
        return exchange_time(c.exchange_s, c.bytes_share, slowed * ratio)

    def true_noise_scale(self, batch: Floats | None = None) -> Floats:
        """Present phi (C,) at global batch `batch` (C,) or (C, K); None: the base batch."""
        c = self.clusters
        if c.noise_knots is None or c.noise_from is None:
            phi = noise_scale(c.noise_start, self.progress, c.noise_unit, c.noise_growth)
        else:
            fraction = c.noise_from + self.progress / c.noise_unit
            phi = c.noise_start * np.exp(along(c.noise_knots, fraction) - along(c.noise_knots, c.noise_from))
            if c.noise_wander is not None:
                low, part = np.floor(fraction * 32.0), fraction * 32.0 % 1.0
                near, far = (self._wander.normal((low + i).astype(np.uint64)) for i in (0, 1))
                phi = phi * np.exp(c.noise_wander * ((1 - part) * near + part * far))
        if batch is None:
            return phi
        more = (slice(None), *[None] * (batch.ndim - 1))
        if c.noise_rho is None:
            return np.broadcast_to(phi[more], batch.shape)
        return np.asarray(phi[more] * (batch / c.base_batch[more]) ** c.noise_rho[more])

    def gain(self, batch: Floats) -> Floats:
        """Present progress per sample (C,) or (C, K) at global batch `batch`: AdaScale's gain at that batch's phi."""
        more = (slice(None), *[None] * (batch.ndim - 1))
        base = self.clusters.base_batch[more].astype(np.float64)
        return efficiency(self.critical_share * self.true_noise_scale(batch), batch, base)

    def accuracy(self, model: Generalisation) -> Floats:
        """Present test accuracy (C,), by a model of it; progress counts from the start of the whole training."""
        c = self.clusters
        done = np.zeros(len(self.progress)) if c.noise_from is None else c.noise_from
        return model.accuracy(done + self.progress / c.noise_unit, self._octaves / np.maximum(self.counts, 1))

    def advance(self, running: np.ndarray | None = None) -> tuple[Floats, Floats]:
        """Make one optimizer step. Returns computing (C, W) and the whole step (C,), s. If `running` (C,) is given,
        other clusters do not change, and their values have no meaning."""
        at_rest = self._drift, self._wave, self._changed, self._deciding
        busy = self._computing(self.costs.seconds(self.batch.astype(np.float64)))
        whole = self._changing(step_time(busy.max(-1), self.exchange(), self.clusters.overlap))
        self._passed(whole, running)
        if running is not None:
            drift, wave, changed, deciding = at_rest
            self._drift = np.where(running[:, None], self._drift, drift)
            self._wave = np.where(running, self._wave, wave)
            self._changed = None if changed is None else changed & ~running
            self._deciding = None if deciding is None else deciding & ~running
        return busy, whole

    def advance_apart(self, done: RoundApart) -> tuple[Floats, Floats]:
        """Make one round of C = 1 cluster, whose workers divide `batch` into `done.pieces`. As `advance`; computing is
        that of all a worker's steps. Disturbances act as on one step, and averaging overlaps with nothing."""
        steps_s = [self.costs.seconds(sizes.astype(np.float64)) for sizes in done.batches()]
        busy = self._computing(np.sum(steps_s, axis=0))
        whole = self._changing(busy.max(-1) + self._moving(done.bytes_ratio))
        self._passed(whole)
        return busy, whole

    def _computing(self, seconds: Floats) -> Floats:
        """The seconds (C, W) of the next step's computing, given the undisturbed ones."""
        c = self.clusters
        if c.cost_sigma is not None:
            normal, sigma = self._samples.normal(self.counter), c.cost_sigma[:, None]
            self._work = costs_of_samples(self.batch, sigma, normal)
            if c.costs_known is not None:
                cut = costs_when_cut(self.batch, sigma, normal, self._cuts.uniform(self.counter))
                self._work = np.where(c.costs_known[:, None], cut, self._work)
            seconds = seconds + c.beta * (self._work - self.batch)
        busy = seconds * self.slowdown() * self._jitters()
        if c.together_sd is not None:
            fresh = near_normal(self._together.bits(self.counter[:, 0]))
            self._wave = TOGETHER_MEMORY * self._wave + np.sqrt(1 - TOGETHER_MEMORY**2) * fresh
            busy = busy * np.exp(c.together_sd * self._wave)[:, None]
        if c.jitter_s is not None:
            slices = c.jitter_s * near_normal(self._slices.bits(self.counter))
            busy = np.maximum(busy + np.where(self.batch > 0, slices, 0.0), 0.3 * busy)
        return np.asarray(busy)

    def _changing(self, whole_s: Floats) -> Floats:
        """`whole_s` (C,) of the next step plus the costs of a pending decision and of a new allocation."""
        decision_s, cost_s = self.clusters.decision_s, self.clusters.change_cost_s
        if self._deciding is not None and decision_s is not None:
            whole_s = whole_s + np.where(self._deciding, decision_s, 0.0)
        if self._changed is not None and cost_s is not None:
            whole_s = whole_s + np.where(self._changed, cost_s, 0.0)
        self._deciding = self._changed = None
        return whole_s

    def _passed(self, whole_s: Floats, running: np.ndarray | None = None) -> None:
        """Record one optimizer step with the present allocation: `whole_s` (C,), in the clusters (C,) `running`."""
        total, took = self.batch.sum(-1).astype(np.float64), 1.0 if running is None else running.astype(np.float64)
        self.progress = self.progress + took * total * self.gain(total)
        self._octaves = self._octaves + took * np.log2(total)
        self.clock_s = self.clock_s + took * whole_s
        self.counts = self.counts + (1 if running is None else running)

    def _jitters(self) -> Floats:
        c, bits = self.clusters, self._jitter.bits(self.counter)
        deviation = near_normal(bits)
        if c.jitter_memory is not None:
            memory = c.jitter_memory[:, None]
            deviation = self._drift = memory * self._drift + np.sqrt(1 - memory**2) * deviation
        return jitter(bits, c.jitter_sd * deviation, c.stall[:, None])

    def _measure(self, sizes: Ints, lengths: Ints, delays: Ints) -> Window:
        """Windows of `lengths` (C,) steps with `sizes` (C, W), in force after `delays` (C,); all end together."""
        begins = int((lengths + delays).max()) - lengths
        taken = StepsTaken()
        for now in range(int(begins[0] + lengths[0])):
            if (starts := begins == now).any():
                self.apply(np.where(starts[:, None], sizes, self.batch))
            running, errors = now >= begins - delays, self._time_errors()
            busy, whole = self.advance() if running.all() else self.advance(running)
            work = None if self.clusters.costs_known is None else self._work
            taken.add(busy, whole, errors, now >= begins, work)
        self.windows += 1
        return self._window(taken.averaged(self._recent_s), lengths)

    def _time_errors(self) -> Floats | None:
        """Factors (C, W) for the errors of the next step's measured times."""
        error = self.clusters.time_error
        if error is None:
            return None
        drawn = near_normal(self._timed.bits(self.counter))
        return np.asarray(np.maximum(1.0 + np.sqrt(ERROR_STEPS) * error[:, None] * drawn, 0.3))

    def _window(self, of: Averaged, lengths: Ints) -> Window:
        unseen, wait = self.batch == 0, of.wait
        if self.clusters.missing_times is not None:
            lost = self._measured.uniform(np.uint64(2 * self.windows + 1)) < self.clusters.missing_times[:, None]
            unseen, wait = unseen | lost, np.where(lost, np.nan, wait)
        seen: dict[str, Any] = {"wait": wait, "communication": of.exchange[:, None], "data": of.busy * 0.002}
        seen["compute"] = np.where(unseen, np.nan, of.compute)
        seen["compute_std"] = np.where(unseen, np.nan, of.compute_std)
        if (known := self.clusters.costs_known) is not None and of.work is not None:
            seen["work"] = np.where(known[:, None], of.work, np.nan)
        seen |= self._training_statistics(lengths) | self._host_statistics(of.busy, of.wait, of.exchange)
        when = {"steps": lengths, "age": lengths, "step": self.counts, "base_batch": self.clusters.base_batch}
        return Window.of(self.batch, **when, **seen)

    def _training_statistics(self, lengths: Ints) -> dict[str, Floats]:
        c, counter = self.clusters, np.uint64(self.windows)
        fresh = c.noise_error * self._noise.normal(counter) / np.sqrt(np.ceil(lengths / NORMS_EVERY))
        self._noise_error = NOISE_MEMORY * self._noise_error + np.sqrt(1 - NOISE_MEMORY**2) * fresh
        unknown = c.missing_noise | (self.windows < 2)
        phi = self.true_noise_scale(self.batch.sum(-1).astype(np.float64))
        change = self._training.normal(counter) * 0.7
        hidden = (c.missing_training | (self.windows < 2) | (lengths < 2))[:, None]
        noise, signal = np.where(unknown, np.nan, [phi * np.exp(self._noise_error), np.ones_like(phi)])
        loss, accuracy = np.where(hidden, np.nan, [change - 0.05, 0.05 - 0.8 * change])
        return {"noise": noise, "signal": signal, "loss_change": loss, "accuracy_change": accuracy}

    def _host_statistics(self, busy: Floats, wait: Floats, exchange: Floats) -> dict[str, Floats]:
        hidden = self.clusters.missing_host[:, None]
        noise = 1.0 + 0.05 * self._cpu.normal(np.uint64(self.windows))
        cpu = np.clip(busy / np.maximum(busy + np.nan_to_num(wait + exchange[:, None]), 1e-9) * noise, 0.0, 1.0)
        return {"cpu": np.where(hidden, np.nan, cpu), "memory": np.where(hidden, np.nan, MEMORY)}


class AnswersWindows(Protocol):
    """What a rollout needs from a policy: sizes (C, W) for a window of C clusters."""

    def decide(self, window: Window, bounds: Bounds) -> Ints: ...


def rollout(policy: AnswersWindows, env: ClusterEnv, windows: int | None = None) -> Iterator[Window]:
    """Reset `env` and let `policy` decide `windows` times, or for ever (None): yields the first window and all others.

    A decision is made when its window is requested, so between two windows the caller sees `env` in that state. A
    policy with an attribute `window_length`, steps (C,), sets the next window's length (`dynamix.policies.wrappers`).

    >>> from dynamix.policies.proportional import LBBSP
    >>> from dynamix_lab.simulator import sample_clusters
    >>> env = ClusterEnv(sample_clusters(3, 4, seed=0), seed=1)
    >>> [window.batch_size.shape for window in rollout(LBBSP(), env, windows=2)]
    [(3, 4), (3, 4), (3, 4)]
    """
    window = env.reset()
    yield window
    while windows is None or windows > 0:
        sizes = policy.decide(window, env.bounds)
        window = env.step(sizes, getattr(policy, "window_length", None))
        yield window
        windows = None if windows is None else windows - 1


def rollout_path(policy: AnswersWindows, env: ClusterEnv, windows: int) -> Floats:
    """Seconds and progress, (windows + 1, 2, C), before the first decision and after each."""
    return np.array([(env.clock_s, env.progress) for _ in rollout(policy, env, windows)])
