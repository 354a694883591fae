"""Runs of opponents on real ranks: each row in an initialised process group, on the clock of the leading rank.

A run ends at a clock time, at a number of samples, or with its budget. The weights of its snapshots stay in memory and
are scored after the clock has stopped.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dynamix.policies.registry import OtherFactory
from dynamix.runtime.controller import Controller
from dynamix.runtime.limits import Limits
from dynamix.runtime.rate.budget import Budget
from dynamix.window import Ints
from dynamix_lab.opponents.local import EndlessOrder, LocalWorker, RoundBook, ScheduledRate, tell_cost, train_step
from dynamix_lab.opponents.runs import HELD_OUT, HeldOut, RunLimits, RunLog, TrialRun
from dynamix_lab.opponents.trial import Trial, set_rate
from dynamix_lab.opponents.virtual import (
    INTERVAL,
    averaging_of,
    bounds_of_trial,
    least_round,
    policy_of,
    round_of,
    schedule_of,
)
from dynamix_lab.tasks import Arrays, Data, Workload, as_is

WARM_UP_STEPS = 20  # on a model that is discarded: first calls and allocations would take time on the clock
FLAG_STEPS = 8  # optimizer steps between two queries whether to stop, if there is no other communication
POLL_S = 0.2  # how often idle ranks check whether the training rank is done
_DONE = "dynamix_lab/opponents/single"


class RunObserver:
    """Reports a run while it runs, on the leading rank: 0, or the one that trains alone.

    This one does nothing; override what you need. The run's clock includes its calls.
    """

    def start(self) -> None:
        """All ranks are ready. The clock starts when this returns."""

    def met(self, time_s: float, samples: int, loss: float) -> None:
        """A step or a round ended. `loss` is this rank's mean over it."""

    def snapshot(self, time_s: float, samples: int, weights: Tensor) -> None:
        """A snapshot was stored for scoring. `weights` are the model's flattened parameters and buffers."""


def run_rank(
    trial: Trial,
    workload: Workload,
    data: Data,
    *,
    seed: int,
    limits: RunLimits,
    observer: RunObserver | None = None,
    others: Mapping[str, OtherFactory] | None = None,
    fastest: int = 0,
    interval: int = INTERVAL,
    warm_up_steps: int = WARM_UP_STEPS,
    held_out: int = HELD_OUT,
    events: str | PathLike[str] | None = None,
) -> TrialRun | None:
    """This rank's part of one run. Every rank of the default group calls it alike. Rank 0 gets the result, others None.

    limits    `time_s` counts from the moment at which all are ready. Targets do not end a live run, because it is
              scored only afterwards
    observer  on the leading rank; ignored on others
    others    policies that need facts of the caller's, as in `make_policy`; one that needs the run's clock takes it
              from `RunObserver.start`, as rank 0 decides
    fastest   the rank that trains in a run of one worker alone
    events    file for a policy's decisions

    Raises `ConfigError` for impossible settings, and errors of training.
    """
    torch.manual_seed(seed + dist.get_rank())
    leads = dist.get_rank() == (fastest if trial.kind == "single" else 0)
    watch = observer if observer is not None and leads else RunObserver()
    if trial.kind == "single" and not leads:
        dist.barrier()
        dist.barrier()
        return _result_of_other(trial)
    _warm_up(trial, workload, data.train, seed, warm_up_steps)
    engine: _LiveEngine
    if trial.kind in ("policy", "rounds"):
        policy = policy_of(trial, others)
        engine = _LivePolicy(trial, workload, data.train, seed, policy=policy, interval=interval, events=events)
    elif trial.kind == "single":
        engine = _LiveAlone(trial, workload, data.train, seed)
    else:
        engine = _LiveLocal(trial, workload, data.train, seed, limits.samples)
    log, kept = _train(engine, RunLog(trial, limits, dist.get_world_size()), watch, leads=leads)
    engine.close()
    if trial.kind == "single":
        _tell_others(_scored(log, kept, engine.model, HeldOut(workload, data.test, held_out)).result(seed, "live"))
        return _result_of_other(trial)
    dist.barrier()
    if not leads:
        return None
    return _scored(log, kept, engine.model, HeldOut(workload, data.test, held_out)).result(seed, "live")


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a step or round: samples by worker, steps in it, this rank's loss, whether all ranks stop now.

    spent   part of the trial's budget used so far, the same on all ranks; None: its samples
    """

    samples: Ints
    steps: int
    loss: float
    stop: bool
    spent: float | None = None


class _LiveEngine(Protocol):
    """Trains `model` from one synchronisation to the next. `wish`, on the leading rank, says whether to stop."""

    model: nn.Module

    def advance(self, wish: Callable[[], bool]) -> _Ended: ...

    def close(self) -> None: ...


_Kept = list[tuple[float, int, Tensor]]  # time, samples, weights


def _train(engine: _LiveEngine, log: RunLog, watch: RunObserver, *, leads: bool) -> tuple[RunLog, _Kept]:
    """The run itself. Only the leading rank keeps a log; the others follow it."""
    kept: _Kept = [(0.0, 0, weights_of(engine.model))] if leads else []
    last_s, seen, done = 0.0, 0, 0
    dist.barrier()
    if leads:
        watch.start()
    dist.barrier()
    began = time.perf_counter()

    def wish() -> bool:
        elapsed_s = time.perf_counter() - began
        return leads and log.limits.time_s is not None and elapsed_s >= log.limits.time_s

    while True:
        ended = engine.advance(wish)
        now_s = time.perf_counter() - began
        done += int(ended.samples.sum())
        if leads and not log.over:  # the run does not include training after the end of its clock
            log.met(now_s, ended.samples, ended.steps, spent=ended.spent)
            watch.met(now_s, log.samples, ended.loss)
            if log.over or log.limits.passed((last_s, seen), (now_s, log.samples)):
                kept.append((now_s, log.samples, weights_of(engine.model)))
                watch.snapshot(*kept[-1])
            last_s, seen = now_s, log.samples
        if ended.stop or log.limits.spent(done, ended.spent):
            return log, kept


def _scored(log: RunLog, kept: _Kept, model: nn.Module, scorer: HeldOut) -> RunLog:
    """Score the snapshots; overwrites the model's weights. A run that was stopped is scored at its end."""
    if kept[-1][1] != log.samples:
        kept.append((log.time_s, log.samples, weights_of(model)))
    for time_s, samples, weights in kept:
        put_weights(model, weights)
        log.scored(*scorer.score(model), at=(time_s, samples))
    return log


@torch.no_grad()
def weights_of(model: nn.Module) -> Tensor:
    """Flattened parameters and buffers, copied."""
    return torch.cat([value.detach().reshape(-1) for value in model.state_dict().values()])


@torch.no_grad()
def put_weights(model: nn.Module, weights: Tensor) -> None:
    """The inverse of `weights_of`."""
    at = 0
    for value in model.state_dict().values():
        value.copy_(weights[at : at + value.numel()].view_as(value))
        at += value.numel()


def _warm_up(trial: Trial, workload: Workload, data: Arrays, seed: int, steps: int) -> None:
    """Train a model that is discarded, with the run's kind of exchange."""
    net = workload.make_model(seed)
    optimizer = workload.make_optimizer(net.parameters())
    meets = trial.kind == "policy" or trial.meets_in_both_ways
    model: nn.Module = DistributedDataParallel(net) if meets else net
    chosen = torch.arange(min(trial.batch_size, len(data)))
    for _ in range(steps):
        train_step(workload, model, optimizer, data, chosen)
    if trial.kind in ("local", "rounds"):
        dist.all_reduce(weights_of(net))


class _LivePolicy:
    """`Controller`, as in the README: with DDP, or averaging parameters."""

    def __init__(
        self,
        trial: Trial,
        workload: Workload,
        data: Arrays,
        seed: int,
        *,
        policy: object,
        interval: int,
        events: str | PathLike[str] | None,
    ) -> None:
        self.workload = workload
        self.model = workload.make_model(seed)
        self._optimizer = workload.make_optimizer(self.model.parameters())
        set_rate(self._optimizer, trial.learning_rate)
        self._controller = Controller(
            policy=policy,  # type: ignore[arg-type]
            interval=interval,
            lr_rule=trial.lr_rule,
            rate_for=trial.rate_for,
            events=events,
            **settings_of(trial, workload, dist.get_world_size(), len(data)),
        )
        self._sampler = self._controller.batch_sampler(data, seed=seed)
        generator = torch.Generator()
        self._loader = DataLoader(data, batch_sampler=self._sampler, collate_fn=as_is, generator=generator)
        over_gradients = trial.local is None or trial.meets_in_both_ways
        wrapped = DistributedDataParallel(self.model) if over_gradients else self.model
        self._wrapped: nn.Module = self._controller.wrap(wrapped, self._optimizer, averaging=averaging_of(trial))
        if (schedule := schedule_of(trial, self._optimizer)) is not None:
            self._controller.scheduler(schedule[0], nominal_batch_size=schedule[1])
        self._budget: Budget | None = None
        if trial.count == "progress":
            self._budget = self._controller.budget(trial.budget)
        self._batches, self._flag = self._endless(), _StopFlag()

    def advance(self, wish: Callable[[], bool]) -> _Ended:
        losses = list[float]()
        while not losses or not self._controller.met:
            inputs, targets = next(self._batches)
            counts = self._sampler.plan().counts
            tell_cost(self.workload, inputs, targets)
            logits = self._wrapped(inputs)
            loss = self.workload.loss(logits, targets)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            classes = not targets.is_floating_point()  # a regression has no accuracy
            self._controller.step(loss=loss, logits=logits if classes else None, target=targets if classes else None)
            losses.append(float(loss.item()))
        spent = None if self._budget is None else self._budget.spent
        return _Ended(counts.copy(), len(losses), math.fsum(losses) / len(losses), self._flag.agreed(wish), spent)

    def close(self) -> None:
        self._flag.finish()
        self._controller.close()

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in itertools.count():
            self._sampler.set_epoch(epoch)
            yield from self._loader


def settings_of(trial: Trial, workload: Workload, workers: int, samples: int) -> dict[str, Any]:
    """A trial's arguments of `Controller`: how much a worker does, and what workers average."""
    moves = trial.local is None and trial.global_batch == "adaptive"
    least = least_round(trial, workers * trial.batch_size) if moves else None
    limits = Limits(*bounds_of_trial(trial, workload), min_global_batch=least)
    local, whole = trial.local, {"batch_size": trial.batch_size, "limits": limits}
    if local is None:
        return {**whole, "global_batch": trial.global_batch}
    if trial.meets_in_both_ways:
        return {**whole, "global_batch": "adaptive" if trial.batch_moves else "fixed", "meet": "auto"}
    ours = {"micro_batch": trial.batch_size, "batch_size": round_of(trial, workers, samples), "meet": "parameters"}
    return {**ours, "global_batch": "adaptive" if local.period == "ratio" else "fixed"}


class _StopFlag:
    """Rank 0's wish to stop, broadcast at one query and read at the next, so that no rank waits for it."""

    def __init__(self) -> None:
        self._steps, self._flag = 0, torch.zeros(1)
        self._work: dist.Work | None = None

    def agreed(self, wish: Callable[[], bool]) -> bool:
        """Call on every rank after every step. It becomes true on all of them after the same step."""
        self._steps += 1
        if self._steps % FLAG_STEPS:
            return False
        self.finish()
        if self._flag.item():
            return True
        self._flag.fill_(float(wish()))
        self._work = dist.broadcast(self._flag, 0, async_op=True)
        return False

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class _LiveLocal:
    """One worker with local steps: its steps of a round, then one all-reduce of parameters."""

    def __init__(self, trial: Trial, workload: Workload, data: Arrays, seed: int, limit: int | None) -> None:
        workers = dist.get_world_size()
        self._book = RoundBook(trial, workers, limit=limit)
        self._worker = LocalWorker(trial, workload, data, seed, dist.get_rank(), workers)
        self.model = self._worker.model

    def advance(self, wish: Callable[[], bool]) -> _Ended:
        plan, baggage = self._book.plan(), self._worker.baggage
        rank = self._worker.rank
        began = time.perf_counter()
        loss = self._worker.train(plan)
        step_s = (time.perf_counter() - began) / int(plan.steps[rank])
        packed = baggage.packed(int(plan.samples[rank]), loss, step_s, stop=wish())
        dist.all_reduce(packed)
        met = baggage.unpacked(packed)
        baggage.taken_home(met)
        self._book.met(plan, met)
        return _Ended(plan.samples, int(plan.steps.max()), met.loss, met.stop)

    def close(self) -> None:
        pass


class _LiveAlone:
    """The fastest rank alone; no collective until it is done."""

    def __init__(self, trial: Trial, workload: Workload, data: Arrays, seed: int) -> None:
        self.trial, self.workload, self.data = trial, workload, data
        self.model = workload.make_model(seed)
        self.model.train()
        self._optimizer = workload.make_optimizer(self.model.parameters())
        self._rate, self._order = ScheduledRate(trial, self._optimizer), EndlessOrder(len(data), seed)
        self._samples = 0

    def advance(self, wish: Callable[[], bool]) -> _Ended:
        chosen = self._order.take(self._samples, self.trial.batch_size)
        self._rate.at(self._samples)
        loss = train_step(self.workload, self.model, self._optimizer, self.data, chosen)
        self._samples += len(chosen)
        used: Ints = np.zeros(dist.get_world_size(), dtype=np.int64)
        used[dist.get_rank()] = len(chosen)
        return _Ended(used, 1, loss, wish())

    def close(self) -> None:
        pass


def _tell_others(run: TrialRun) -> None:
    """The single rank's run is over: put its result into the store, where the others look for it."""
    distributed_c10d._get_default_store().set(_DONE, json.dumps(run.to_dict()))


def _result_of_other(trial: Trial) -> TrialRun | None:
    """Wait for the training rank without using the processor or the group's timeout. Rank 0 gets its run."""
    store = distributed_c10d._get_default_store()
    while not store.check([_DONE]):
        time.sleep(POLL_S)
    result = TrialRun.from_dict(json.loads(store.get(_DONE))) if dist.get_rank() == 0 else None
    dist.barrier()
    if dist.get_rank() == 0:
        store.delete_key(_DONE)
    dist.barrier()  # the next run must not find this result
    return result
