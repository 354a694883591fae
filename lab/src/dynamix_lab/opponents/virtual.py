"""Runs of opponents on the virtual clock: real training in this process, with time from a simulated cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dynamix.data.plan import pieces_of
from dynamix.errors import ConfigError
from dynamix.policies import Policy, make_policy
from dynamix.policies.registry import OtherFactory
from dynamix.runtime import random_state
from dynamix.runtime.limits import fixed_at
from dynamix.runtime.rate.budget import Budget
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds, Floats, Ints
from dynamix_lab.harness.reference import references
from dynamix_lab.opponents.course import Course
from dynamix_lab.opponents.local import EndlessOrder, LocalWorker, RoundBook, ScheduledRate, train_step
from dynamix_lab.opponents.profiled import Profiled
from dynamix_lab.opponents.runs import HELD_OUT, HeldOut, RunLimits, RunLog, TrialRun
from dynamix_lab.opponents.trial import Trial, set_rate
from dynamix_lab.opponents.world import WorkerTimes, round_s, step_extra_s
from dynamix_lab.simulator import ClusterEnv
from dynamix_lab.simulator.rounds import RoundApart
from dynamix_lab.tasks import Data, Workload, as_is
from dynamix_lab.virtual.cluster import VirtualCluster

INTERVAL = 5  # optimizer steps per window
ALONE_S = 60.0  # of work, to find the fastest worker
SCHEDULE_PARTS = 1000  # of the budget: how often a policy's learning rate follows its schedule


def run_virtual(
    trial: Trial,
    workload: Workload,
    data: Data,
    world: ClusterEnv,
    *,
    seed: int,
    limits: RunLimits,
    others: Mapping[str, OtherFactory] | None = None,
    interval: int = INTERVAL,
    held_out: int = HELD_OUT,
) -> TrialRun:
    """Run any row's trial once. The same seed means the same weights, order of samples and disturbances.

    world     one simulated cluster that can also time single workers (`WorkerTimes`), such as `DeviceWorld`; new for
              each run, since its clock continues
    others    policies that need facts of the caller's, as in `make_policy`; "profiled" is always available, and so is
              "reference" if the world has a scenario
    interval  optimizer steps in a policy's window
    held_out  samples of the test set on which the run is scored, off the clock

    Raises `ConfigError` for a world that cannot time single workers, and errors of training.
    """
    if not isinstance(world, WorkerTimes):
        allowed = "a world with finish_s, device_s and meeting_s"
        raise ConfigError("world", type(world).__name__, allowed, "take a DeviceWorld")
    workers = world.clusters.shape[1]
    log, scorer = RunLog(trial, limits, workers), HeldOut(workload, data.test, held_out)
    outside = random_state.capture()
    torch.manual_seed(seed)
    engine: _Engine
    try:
        if trial.kind in ("policy", "rounds"):
            policy = policy_of(trial, {**references_of(world), **(others or {})})
            engine = _UnderPolicy(trial, workload, data, world, seed, policy, interval)
        elif trial.kind == "single":
            engine = _Alone(trial, workload, data, world, seed)
        else:
            engine = _Meeting(trial, workload, data, world, seed, limits.samples)
        log.scored(*scorer.score(engine.model))
        while not (log.over or log.arrived):
            log.met(*engine.advance(), spent=engine.spent)
            if log.due:
                log.scored(*scorer.score(engine.model))
        engine.close()
    finally:
        random_state.restore(outside)
    return log.result(seed, "virtual")


def policy_of(trial: Trial, others: Mapping[str, OtherFactory] | None) -> Policy:
    """A trial's policy by name, including "profiled"."""
    known: dict[str, OtherFactory] = {"profiled": lambda _: Profiled(), **(others or {})}
    return make_policy(str(trial.policy), others=known)


def references_of(world: ClusterEnv) -> dict[str, OtherFactory]:
    """The reference for the world's scenario, disturbances and clock; empty if the world has no scenario."""
    course = getattr(world, "course", None)
    if not isinstance(course, Course):
        return {}
    return references(course.scenario, seed=course.seed, clock=lambda: float(world.clock_s[0]))


def fastest_worker(times: WorkerTimes, workers: int) -> int:
    """The worker that first finishes a minute of work.

    Ties go to the lower number.
    """
    return int(np.argmin([times.finish_s(worker, ALONE_S, 0.0) for worker in range(workers)]))


def bounds_of_trial(trial: Trial, workload: Workload) -> tuple[int, int]:
    """Smallest and largest batch of a worker: the workload's, or the trial's if that is outside."""
    return min(workload.min_batch, trial.batch_size), max(workload.max_batch, trial.batch_size)


def least_round(trial: Trial, start: int) -> int:
    """The smallest global batch of a policy that changes it: the initial one, as in `Controller`.

    A profile also uses smaller ones.
    """
    return 1 if trial.policy == "profiled" else start


def round_of(trial: Trial, workers: int, samples: int) -> int:
    """A worker's samples of the first round if `Controller` averages parameters; at most an epoch of `samples`."""
    assert trial.local is not None
    steps = min(trial.local.steps, samples // (workers * trial.batch_size))
    return max(steps, 1) * trial.batch_size


def averaging_of(trial: Trial) -> Averaging | None:
    """How `Controller` averages parameters in a trial; None if it averages gradients."""
    local = trial.local
    if local is None:
        return None
    outer = None
    if local.outer == "nesterov":
        rate, momentum = local.outer_rate, local.outer_momentum

        def outer(parameters: list[Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=rate, momentum=momentum, nesterov=momentum > 0)

    return Averaging(optimizer_state=local.momentum, outer=outer)  # type: ignore[arg-type]


def schedule_of(trial: Trial, optimizer: torch.optim.Optimizer) -> tuple[LambdaLR, int] | None:
    """A trial's schedule for `Controller.scheduler` with its nominal batch; None for a constant rate."""
    if trial.schedule == "constant" or trial.budget is None:
        return None
    nominal = max(trial.budget // SCHEDULE_PARTS, 1)
    return LambdaLR(optimizer, lambda step: trial.rate_factor(step * nominal)), nominal


class _Engine(Protocol):
    """Trains `model` until the next synchronisation; returns its end, samples by worker, and steps in it.

    spent   part of the trial's budget used so far; None: its samples
    """

    model: nn.Module

    @property
    def spent(self) -> float | None: ...

    def advance(self) -> tuple[float, Ints, int]: ...

    def close(self) -> None: ...


class _UnderPolicy:
    """`Controller` with shares by a policy: `VirtualCluster`, which averages gradients or parameters."""

    def __init__(
        self, trial: Trial, workload: Workload, data: Data, world: ClusterEnv, seed: int, policy: Policy, interval: int
    ) -> None:
        self.model = workload.make_model(seed)
        optimizer = workload.make_optimizer(self.model.parameters())
        set_rate(optimizer, trial.learning_rate)
        self._cluster = VirtualCluster(
            self.model,
            optimizer,
            workload.loss,
            data.train,
            clusters=world,
            policy=policy,
            **_settings_of(trial, workload, world.clusters.shape[1], len(data.train)),
            interval=interval,
            lr_rule=trial.lr_rule,
            rate_for=trial.rate_for,
            seed=seed,
            collate_fn=as_is,
            sample_costs=costs_of(workload, data),
        )
        if (schedule := schedule_of(trial, optimizer)) is not None:
            self._cluster.scheduler(schedule[0], nominal_batch_size=schedule[1])
        self._budget: Budget | None = None
        if trial.count == "progress" and trial.budget is not None:
            self._budget = self._cluster.budget(trial.budget)

    @property
    def spent(self) -> float | None:
        return None if self._budget is None else self._budget.spent

    def advance(self) -> tuple[float, Ints, int]:
        run = self._cluster.run(steps=1)
        counts, piece = run.counts[0], int(run.pieces[0])
        steps = max(len(pieces_of(n, piece)) for n in counts.tolist()) if piece else 1
        return float(run.time_s[0]), counts, steps

    def close(self) -> None:
        self._cluster.close()


def _settings_of(trial: Trial, workload: Workload, workers: int, samples: int) -> dict[str, Any]:
    """A trial's settings of `VirtualCluster`: how much a worker does, and what workers average."""
    if (local := trial.local) is None:
        return {"batch_size": trial.batch_size, "bounds": _bounds(trial, workload, workers)}
    if trial.meets_in_both_ways:
        either: dict[str, Any] = {"batch_size": trial.batch_size, "bounds": _bounds(trial, workload, workers)}
        return {
            **either,
            "meet": "auto",
            "averaging": averaging_of(trial),
            "rounds": "adaptive" if trial.batch_moves else "fixed",
        }
    ours = {"batch_size": round_of(trial, workers, samples), "micro_batch": trial.batch_size, "meet": "parameters"}
    return {**ours, "averaging": averaging_of(trial), "rounds": "adaptive" if local.period == "ratio" else "fixed"}


def _bounds(trial: Trial, workload: Workload, workers: int) -> Bounds:
    bounds = Bounds.of(workers, *bounds_of_trial(trial, workload))
    start = workers * trial.batch_size
    if trial.global_batch == "fixed":
        return fixed_at(bounds, start)
    least = least_round(trial, start)
    return dataclasses.replace(bounds, total_low=np.asarray(least, dtype=np.int64))


class _Alone:
    """The fastest worker alone: no synchronisation, no exchange."""

    spent: float | None = None

    def __init__(self, trial: Trial, workload: Workload, data: Data, world: Any, seed: int) -> None:
        self.trial, self.workload, self.data, self._times = trial, workload, data.train, world
        self.model = workload.make_model(seed)
        self.model.train()
        self._optimizer = workload.make_optimizer(self.model.parameters())
        self._rate = ScheduledRate(trial, self._optimizer)
        self._order, self._costs = EndlessOrder(len(data.train), seed), _SampleCosts(workload, data)
        self._workers = world.clusters.shape[1]
        self._fastest, self._extra_s = fastest_worker(world, self._workers), step_extra_s(world)
        self._samples, self._now_s = 0, 0.0

    def advance(self) -> tuple[float, Ints, int]:
        chosen = self._order.take(self._samples, self.trial.batch_size)
        self._rate.at(self._samples)
        train_step(self.workload, self.model, self._optimizer, self.data, chosen)
        work_s = self._times.device_s(len(chosen), self._costs.of(chosen))
        self._now_s = self._times.finish_s(self._fastest, work_s, self._now_s) + self._extra_s
        self._samples += len(chosen)
        used: Ints = np.zeros(self._workers, dtype=np.int64)
        used[self._fastest] = len(chosen)
        return self._now_s, used, 1

    def close(self) -> None:
        pass


class _Meeting:
    """Workers with local steps: their rounds run one after another in this process."""

    spent: float | None = None

    def __init__(self, trial: Trial, workload: Workload, data: Data, world: Any, seed: int, limit: int | None) -> None:
        self._times, count = world, world.clusters.shape[1]
        self._book = RoundBook(trial, count, limit=limit)
        self._all = [LocalWorker(trial, workload, data.train, seed, rank, count) for rank in range(count)]
        self.model = self._all[0].model
        self._costs, self._now_s = _SampleCosts(workload, data), 0.0

    def advance(self) -> tuple[float, Ints, int]:
        plan = self._book.plan()
        losses = [worker.train(plan) for worker in self._all]
        costs = np.array([self._costs.of(worker.indices(plan).reshape(-1)) for worker in self._all])
        each = zip(plan.steps.tolist(), plan.pieces.tolist(), strict=True)
        pieces, payload_bytes = [[piece] * steps for steps, piece in each], self._all[0].baggage.payload_bytes
        busy, whole_s = round_s(self._times, RoundApart(pieces, payload_bytes, payload_bytes), costs, self._now_s)
        total: Tensor | None = None
        for worker, loss, step_s in zip(self._all, losses, (busy / plan.steps).tolist(), strict=True):
            packed = worker.baggage.packed(int(plan.samples[worker.rank]), loss, step_s)
            total = packed if total is None else total.add_(packed)
        assert total is not None
        met = self._all[0].baggage.unpacked(total)
        for worker in self._all:
            worker.baggage.taken_home(met)
        self._now_s += whole_s
        self._book.met(plan, met)
        return self._now_s, plan.samples, int(plan.steps.max())

    def close(self) -> None:
        pass


class _SampleCosts:
    """Sums of the samples' extra costs; 0 if the workload defines none."""

    def __init__(self, workload: Workload, data: Data) -> None:
        self._each = costs_of(workload, data)

    def of(self, chosen: Tensor) -> float:
        return 0.0 if self._each is None else float(self._each[chosen.numpy()].sum())


def costs_of(workload: Workload, data: Data) -> Floats | None:
    """The extra cost of each training sample, (n,), besides the time per sample. None if samples have none."""
    return None if workload.costs is None else workload.costs(data.train)
