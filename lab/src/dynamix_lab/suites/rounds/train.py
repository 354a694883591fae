"""Training of one row: what was lost and learned meeting by meeting, which any network may then be charged for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.window import Floats, Ints
from dynamix_lab.opponents.local import EndlessOrder
from dynamix_lab.opponents.meetings import Baggage
from dynamix_lab.opponents.runs import HeldOut
from dynamix_lab.opponents.shares import RoundPlan
from dynamix_lab.opponents.trial import LocalSettings
from dynamix_lab.suites.rounds.jobs import WORKERS, RoundsJob, pass_s, shards
from dynamix_lab.suites.rounds.rows import After, planner
from dynamix_lab.tasks import Arrays, Workload

JITTERS = (0.0, 0.3, 1.0)  # sd of the logarithm of a step's time
EVERY = 40  # scores in a budget
BENT_EVERY = 64  # pieces of a worker between two measurements of u


@dataclass
class Track:
    """A run: after each score samples, held-out loss, meetings so far, seconds of computing at each of `JITTERS`, and
    what u is made of since the score before, J and Jq summed (see `bend`)."""

    samples: list[int]
    loss: list[float]
    meetings: list[int]
    busy_s: list[list[float]]
    bent: list[list[float]]

    @classmethod
    def empty(cls) -> Track:
        return cls([], [], [], [], [])

    def arrived(self, target: float) -> bool:
        """Whether two scores in a row reach the target, or nothing will."""
        return not math.isfinite(self.loss[-1]) or (len(self.loss) > 1 and max(self.loss[-2:]) <= target)


def train_apart(job: RoundsJob, row: str, rate: float, speeds: Floats, seed: int) -> Track:
    """Workers step apart by a row's plans until the target, or twice the budget."""
    workload, most = job.load(), 2 * job.budget
    data, plans = workload.make_data(seed), planner(row, job, speeds)
    scorer = HeldOut(workload, data.test)
    workers = [Worker(job, workload, data.train, rate, seed, rank) for rank in range(WORKERS)]
    clock, track, bent = RoundClock(speeds, seed), Track.empty(), [0.0, 0.0]
    start, due, since = 0, 0, 0
    while not track.loss or not (track.arrived(job.target) or start >= most):
        if start >= due:
            due = start + job.budget // EVERY
            loss = scorer.score(workers[0].model)[0]
            clock.scored(track, start, loss, bent)
            bent = [0.0, 0.0]
            continue
        plan = plans.plan(start)
        factor = job.rate_factor(start)
        losses = [worker.train(plan, factor) for worker in workers]
        since += int(plan.steps.max())
        mine = 0.0, 0.0
        if since >= BENT_EVERY:
            since = 0
            mine = bend(workload, workers, plan)
            bent = [bent[0] + mine[0], bent[1] + mine[1]]
        meet(workers, plan, losses)
        clock.round(plan)
        start += int(plan.samples.sum())
        plans.met(After(start, job.rate_factor(start), float(np.average(losses, weights=plan.samples)), mine))
    return track


def train_together(job: RoundsJob, batch: int, rate: float, speeds: Floats, seed: int) -> Track:
    """One step of all workers after the other, on `batch` samples by speed; the global gradient does not know whose."""
    workload, most = job.load(), 2 * job.budget
    data = workload.make_data(seed)
    scorer, model = HeldOut(workload, data.test), workload.make_model(seed)
    model.train()
    optimizer, order = job.make(model.parameters(), rate), EndlessOrder(len(data.train), seed)
    clock, track, start, due = RoundClock(speeds, seed), Track.empty(), 0, 0
    counts = shares_together(batch, speeds)
    while not track.loss or not (track.arrived(job.target) or start >= most):
        if start >= due:
            due = start + job.budget // EVERY
            clock.scored(track, start, scorer.score(model)[0], [0.0, 0.0])
            continue
        step(workload, model, optimizer, data.train, order.take(start, batch))
        clock.round(RoundPlan(start, np.ones(WORKERS, dtype=np.int64), counts))
        start += batch
    return track


def shares_together(batch: int, speeds: Floats) -> Ints:
    """(W,) samples of one step that let all be done at the same time, as nearly as whole samples can."""
    shares = np.ones(WORKERS, dtype=np.int64)
    for _ in range(batch - WORKERS):
        shares[int(np.argmin(pass_s(shares + 1, speeds)))] += 1
    return shares


class Worker:
    """One worker's model, optimizer and data."""

    def __init__(self, job: RoundsJob, workload: Workload, data: Arrays, rate: float, seed: int, rank: int) -> None:
        self.workload, self.data, self.rank, self.rate = workload, data, rank, rate
        self.model = workload.make_model(seed)
        self.model.train()
        self.optimizer = job.make(self.model.parameters(), rate)
        self.baggage = Baggage(self.model, self.optimizer, LocalSettings(), rank, WORKERS)
        self.own = shards(data, job.unlike, seed)[rank] if job.unlike else None
        self._order = EndlessOrder(len(data) if self.own is None else len(self.own), seed)
        self._taken = 0

    def train(self, plan: RoundPlan, factor: float) -> float:
        """Its steps of a round; returns their mean loss."""
        steps, piece = int(plan.steps[self.rank]), int(plan.pieces[self.rank])
        if not steps:
            return 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * factor
        chosen = self.take(plan, steps * piece).view(steps, piece)
        return sum(step(self.workload, self.model, self.optimizer, self.data, some) for some in chosen) / steps

    def take(self, plan: RoundPlan, count: int) -> Tensor:
        """Indices of its next samples: of all, or of its own."""
        if self.own is None:
            return self._order.take(plan.begins(self.rank), count)
        self._taken += count
        return self.own[self._order.take(self._taken - count, count)]


def step(workload: Workload, model: nn.Module, optimizer: Optimizer, data: Arrays, chosen: Tensor) -> float:
    """One optimizer step; returns the loss."""
    loss = workload.loss(model(data.inputs[chosen]), data.targets[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def meet(workers: list[Worker], plan: RoundPlan, losses: list[float]) -> None:
    """Models and moments become their mean by samples."""
    total: Tensor | None = None
    for worker, loss in zip(workers, losses, strict=True):
        packed = worker.baggage.packed(int(plan.samples[worker.rank]), loss, 1.0)
        total = packed if total is None else total.add_(packed)
    assert total is not None
    met = workers[0].baggage.unpacked(total)
    for worker in workers:
        worker.baggage.taken_home(met)


def bend(workload: Workload, workers: list[Worker], plan: RoundPlan) -> tuple[float, float]:
    """J and Jq of u = 1 - J / Jq before a meeting, each worker on one fresh piece of its own samples.

    J = mean over workers of loss(theta_i) - loss(mean), Jq = half the mean of <g_i, theta_i - mean>. Where the loss is
    a parabola between the models both are the same; u is above 0 where the mean is worse than that.
    """
    weights = torch.tensor(plan.samples / plan.samples.sum(), dtype=torch.float32)
    flats = [worker.baggage.flat_parameters() for worker in workers]
    mean = sum(float(weight) * flat for weight, flat in zip(weights, flats, strict=True))
    assert isinstance(mean, Tensor)
    found, parabola = 0.0, 0.0
    generator = torch.Generator().manual_seed(plan.start)
    for weight, worker, flat in zip(weights.tolist(), workers, flats, strict=True):
        own = torch.arange(len(worker.data)) if worker.own is None else worker.own
        chosen = own[torch.randint(len(own), (int(plan.pieces[worker.rank]),), generator=generator)]
        inputs, targets = worker.data.inputs[chosen], worker.data.targets[chosen]
        worker.optimizer.zero_grad()
        loss = workload.loss(worker.model(inputs), targets)
        loss.backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in worker.baggage.parameters if p.grad is not None])
        worker.optimizer.zero_grad()
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(mean, worker.baggage.parameters)
            at_mean = workload.loss(worker.model(inputs), targets).item()
            torch.nn.utils.vector_to_parameters(flat, worker.baggage.parameters)
        found += weight * (loss.item() - at_mean)
        parabola += weight * float(gradient @ (flat - mean)) / 2
    return found, parabola


class RoundClock:
    """What computing takes, by jitter, as rounds go by."""

    def __init__(self, speeds: Floats, seed: int) -> None:
        self.speeds, self.meetings = speeds, 0
        self.busy_s = [0.0 for _ in JITTERS]
        self._random = np.random.default_rng(seed)

    def round(self, plan: RoundPlan) -> None:
        """All wait for the last of them. A step's time is log-normal with the mean that it has without jitter."""
        self.meetings += 1
        each = pass_s(plan.pieces, self.speeds)
        drawn = [self._random.standard_normal(int(steps)) for steps in plan.steps]
        for i, sd in enumerate(JITTERS):
            whole = (float(np.exp(sd * own - sd**2 / 2).sum()) for own in drawn)
            self.busy_s[i] += max(one_s * steps for one_s, steps in zip(each.tolist(), whole, strict=True))

    def scored(self, track: Track, samples: int, loss: float, bent: list[float]) -> None:
        """A score was taken."""
        track.samples.append(samples)
        track.loss.append(round(loss, 5) if math.isfinite(loss) else math.inf)
        track.meetings.append(self.meetings)
        track.busy_s.append([round(s, 4) for s in self.busy_s])
        track.bent.append([round(part, 6) for part in bent])
