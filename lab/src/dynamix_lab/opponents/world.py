"""Scenarios of device hosts on the virtual clock, for synchronous training and for local steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from dynamix.errors import ConfigError
from dynamix.window import Floats, Window
from dynamix_lab.emulator import Device, Scenario
from dynamix_lab.opponents.buckets import GradientBucket
from dynamix_lab.opponents.course import Course, ring_mbit
from dynamix_lab.simulator import ClusterEnv, Clusters
from dynamix_lab.simulator.compute import near_normal
from dynamix_lab.simulator.rounds import RoundApart
from dynamix_lab.simulator.streams import RandomStream

# What live runs of device hosts add to their devices and links. First estimates, from a prototype on an idle machine
# with two cores, where an exchange used 8, 21 and 56 ms of processor time at 4, 8 and 16 ranks.
STEP_S = 0.001  # of every optimizer step after its exchange: the update, the controller, the next batch
STAGE_S = 0.0007  # of each of the 2 (W-1) stages of a ring all-reduce, whatever its size
JITTER_SD = 0.005  # of a worker's computing, relative, from step to step
CPU_SEEN = 0.06  # fraction of a host's processor in use, as the probe reads it while the device computes
RTT_S = 0.0002  # between sockets on one machine, without the scenario's latency


@dataclass(frozen=True, slots=True)
class LiveExtras:
    """What live device hosts add to devices and links. The defaults are this module's constants.

    step_s      s of every optimizer step that overlaps with nothing
    stage_s     s of each stage of a ring all-reduce
    jitter_sd   relative sd of a worker's computing in a step
    """

    step_s: float = STEP_S
    stage_s: float = STAGE_S
    jitter_sd: float = JITTER_SD


@dataclass(frozen=True, slots=True)
class Outage:
    """Host `host` is lost at `from_s`, and a replacement starts at `until_s`.

    The replacement's speed is the scenario's: put a `Change(at_s=until_s, host=host, cpu=...)` into its schedule.
    """

    host: int
    from_s: float
    until_s: float


@runtime_checkable
class WorkerTimes(Protocol):
    """What a simulated cluster must answer about workers with local steps."""

    def finish_s(self, worker: int, work_s: float, start_s: float) -> float:
        """When a worker finishes `work_s` of work begun at `start_s`."""

    def device_s(self, samples: int, cost: float = 0.0) -> float:
        """Work (s at speed 1) of one forward and backward pass over `samples` with total extra cost `cost`."""

    def meeting_s(self, payload_bytes: int, at_s: float) -> float:
        """How long the workers need to average `payload_bytes` each, once the last one is ready at `at_s`."""


def step_extra_s(times: object) -> float:
    """Seconds of an optimizer step without its pass over the samples, if the world has them (`LiveExtras`)."""
    extras = getattr(times, "extras", None)
    return 0.0 if extras is None else float(extras.step_s)


def round_s(times: WorkerTimes, done: RoundApart, costs: Floats, start_s: float) -> tuple[Floats, float]:
    """Seconds (W,) of every worker's steps in a round begun at `start_s`, and of the whole round with its averaging.

    costs   (W,) extra costs of a worker's samples of the round
    """
    busy = np.zeros(len(done.pieces))
    for worker, sizes in enumerate(done.pieces):
        # Costs are linear, so a round's work is the fixed part of each step plus the costs of all samples.
        each = float(costs[worker]) / max(sum(sizes), 1)
        work_s = sum(times.device_s(size, each * size) for size in sizes)
        busy[worker] = times.finish_s(worker, work_s, start_s) + len(sizes) * step_extra_s(times) - start_s
    last_s = start_s + float(busy.max())
    return busy, last_s + times.meeting_s(done.payload_bytes, last_s) - start_s


class DeviceWorld(ClusterEnv):
    """One simulated cluster (C = 1) on a scenario's device hosts. Its clock starts at 0.

    A worker's step of n samples needs `device_s(n, cost)` of its device, at the host's speed of each moment. A third of
    it is forward, the rest is spread over the layers. A bucket of gradients is exchanged once all workers have it and
    the previous bucket is exchanged: bytes over the slowest link of each moment, and a fixed time per stage. A round of
    local steps takes all their steps, and one ring all-reduce of what they send (`round_s`).

    Modelled: schedules, traces, neighbours and loads of the scenario in the middle of a step; rates, background
    traffic and latency of links; costs of samples; lost and replaced hosts (`outages`). Not modelled: packet loss,
    queues of single links, processors that the ranks of one machine share, memory, decisions (a live rank makes them in
    parallel with its device). Its noise scale is a constant: it is for real training, which has its own.

    scenario   with a `device`
    seed       of its disturbances and of the jitter
    batch_size samples per worker and step at the start
    buckets    of the model's gradients (`gradient_buckets`)
    outages    hosts that are lost for a time. The replacement repeats the worker's interrupted step, and the others
               wait for it, as in a job that restarts with a fixed number of workers. The restart itself takes no time,
               and no other worker repeats anything
    extras     what live runs add
    interval, delay   as in `ClusterEnv`

    Raises `ConfigError` for a scenario without `device` and for impossible outages.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        seed: int,
        batch_size: int,
        buckets: Sequence[GradientBucket],
        outages: Sequence[Outage] = (),
        extras: LiveExtras | None = None,
        interval: int = 1,
        delay: int = 1,
    ) -> None:
        if scenario.device is None:
            raise ConfigError("scenario", scenario.name, "one whose hosts have a device", "give it a device")
        self.scenario, self.device, self.buckets = scenario, scenario.device, tuple(buckets)
        self.extras, self.course = extras or LiveExtras(), Course(scenario, seed)
        self.outages = _checked(outages, scenario.workers)
        self._charged = np.zeros(scenario.workers)
        self._sent_bytes = sum(bucket.size_bytes for bucket in self.buckets)  # by a worker, in the previous step
        clusters = _device_clusters(self.device, scenario.workers, batch_size)
        self._device_jitter = RandomStream(seed, "device", clusters.shape)
        super().__init__(clusters, seed=seed, interval=interval, delay=delay)
        self.steps, self.clock_s, self.progress = 0, np.zeros(1), np.zeros(1)

    def reset(self) -> Window:
        self._charged = np.zeros(self.scenario.workers)
        return super().reset()

    # -- for workers with local steps

    def device_s(self, samples: int, cost: float = 0.0) -> float:
        """Device-seconds of one pass over `samples` with total extra cost `cost`; 0 for no samples.

        Formula: (fixed_ms + per_sample_ms samples + per_cost_ms cost) / 1000.
        """
        device = self.device
        whole_ms = device.fixed_ms + device.per_sample_ms * samples + device.per_cost_ms * cost
        return whole_ms / 1000 if samples else 0.0

    def finish_s(self, worker: int, work_s: float, start_s: float) -> float:
        """When `work_s` device-seconds begun at `start_s` are done, without jitter.

        The replacement repeats work that an outage interrupts. If a whole round is lost, give it in one call. Other
        workers do not wait for a lost worker that has nothing to do.
        """
        if work_s <= 0:
            return start_s
        begun_s, part_s = start_s, self._progressed(worker, work_s, start_s)
        for outage in self.outages:
            if outage.host == worker and outage.from_s < part_s and begun_s < outage.until_s:
                begun_s = outage.until_s
                part_s = self._progressed(worker, work_s, begun_s)
        return part_s

    def meeting_s(self, payload_bytes: int, at_s: float) -> float:
        """Seconds of a ring all-reduce of `payload_bytes` that all begin at `at_s`; 0 for one worker."""
        workers = self.scenario.workers
        if workers == 1:
            return 0.0
        begun_s = at_s + 2 * (workers - 1) * (self.extras.stage_s + self.course.at(at_s).latency_s)
        moved = ring_mbit(workers, payload_bytes)
        return self.course.done_s(moved, begun_s, lambda stretch: stretch.slowest_mbit_s) - at_s

    # -- the synchronous step

    def charge(self, costs: Floats) -> None:
        self._charged = costs[0]

    def slowdown(self) -> Floats:
        return 1.0 / np.array([self.course.at(float(self.clock_s[0])).speeds])

    def exchange(self) -> Floats:
        size = sum(bucket.size_bytes for bucket in self.buckets)
        return np.array([self.meeting_s(size, float(self.clock_s[0]))])

    def advance(self, running: np.ndarray | None = None) -> tuple[Floats, Floats]:
        """Make one optimizer step. Returns seconds of computing (1, W) and of the whole step (1,)."""
        start_s, workers = float(self.clock_s[0]), range(self.scenario.workers)
        passes = zip(self.batch[0].tolist(), self._charged.tolist(), strict=True)
        jitter = 1.0 + self.extras.jitter_sd * near_normal(self._device_jitter.bits(np.uint64(self.steps)))[0]
        work_s = np.array([self.device_s(n, cost) for n, cost in passes]) * np.maximum(jitter, 0.5)
        end_s = np.array([self.finish_s(i, float(work_s[i]), start_s) for i in workers])
        sent_s = start_s
        for bucket in self.buckets:
            ready_s = max(
                self._ready_s(i, float(work_s[i]), bucket.ready_at, start_s, float(end_s[i])) for i in workers
            )
            begun_s = max(ready_s, sent_s)
            sent_s = begun_s + self.meeting_s(bucket.size_bytes, begun_s)
        busy = end_s[None] - start_s
        whole = np.array([max(sent_s, float(end_s.max())) + self.extras.step_s - start_s])
        self._charged = np.zeros(len(end_s))
        self._passed(whole)
        return busy, whole

    def advance_apart(self, done: RoundApart) -> tuple[Floats, Floats]:
        """Make one round, without jitter, which averages out. Returns seconds of computing (1, W), the round (1,)."""
        busy, whole_s = round_s(self, done, self._charged, float(self.clock_s[0]))
        self._charged, self._sent_bytes = np.zeros(len(busy)), done.payload_bytes
        self._passed(whole := np.array([whole_s]))
        return busy[None], whole

    def host_figures(self, busy_s: Floats, whole_s: Floats, steps: int) -> dict[str, Floats]:
        """What the probes of live device hosts would read: a nearly idle processor, and the ring's traffic."""
        figures = super().host_figures(busy_s, whole_s, steps) | {"cpu": np.full(busy_s.shape, CPU_SEEN)}
        if self.scenario.workers == 1:
            return figures
        moved = ring_mbit(self.scenario.workers, self._sent_bytes) / 8e-6
        latency_s = 2 * self.course.at(float(self.clock_s[0])).latency_s
        return figures | {
            "bytes_per_s": np.broadcast_to(steps * moved / np.maximum(whole_s, 1e-9), busy_s.shape),
            "retransmits_per_s": np.zeros(busy_s.shape),
            "rtt_s": np.full(busy_s.shape, RTT_S + latency_s),
        }

    def _progressed(self, worker: int, work_s: float, start_s: float) -> float:
        return self.course.done_s(work_s, start_s, lambda stretch: stretch.speeds[worker])

    def _ready_s(self, worker: int, work_s: float, part: float, start_s: float, end_s: float) -> float:
        """When a part of a step's work is done, if the whole step ends at `end_s`."""
        begun_s = max(
            (o.until_s for o in self.outages if o.host == worker and start_s < o.until_s <= end_s), default=0.0
        )
        return self._progressed(worker, part * work_s, max(begun_s, start_s))


def _checked(outages: Sequence[Outage], workers: int) -> tuple[Outage, ...]:
    """The outages in order of time. Raises `ConfigError` for unknown hosts and invalid times."""
    for outage in outages:
        if not 0 <= outage.host < workers:
            raise ConfigError("outage of host", outage.host, f"0 to {workers - 1}", "name a host of the scenario")
        if not 0 <= outage.from_s < outage.until_s < float("inf"):
            times = (outage.from_s, outage.until_s)
            raise ConfigError("outage from_s, until_s", times, "0 or more, then later", "say when the host is replaced")
    return tuple(sorted(outages, key=lambda outage: outage.from_s))


def _device_clusters(device: Device, workers: int, batch_size: int) -> Clusters:
    """One cluster of devices of speed 1. `DeviceWorld` itself models speeds, links and jitter."""
    shape, one = (1, workers), np.ones(1)
    never, unit = np.full(shape, 1e12), np.ones(shape)
    base = np.array([workers * batch_size])
    return Clusters(
        alpha=device.fixed_ms / 1000 * unit,
        beta=device.per_sample_ms / 1000 * unit,
        jitter_sd=0 * unit,
        slow_off_s=never,
        slow_on_s=unit,
        slow_strongest=unit,
        exchange_s=0 * one,
        overlap=one,
        stall=0 * one,
        neighbour_period_s=60 * one,
        neighbour_factor=one,
        noise_start=base.astype(np.float64),
        noise_unit=1e12 * one,
        noise_growth=0 * one,
        noise_error=0 * one,
        base_batch=base,
        missing_noise=np.zeros(1, bool),
        missing_training=np.zeros(1, bool),
        missing_host=np.zeros(1, bool),
    )
