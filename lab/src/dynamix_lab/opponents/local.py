"""Rounds of local steps: what one worker does in a round, and how all workers plan the next round alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.emulator.devices import batch_cost
from dynamix_lab.opponents.meetings import Baggage, Met
from dynamix_lab.opponents.periods import Moment, period_of
from dynamix_lab.opponents.shares import RoundPlan, StepShares
from dynamix_lab.opponents.trial import Trial, set_rate
from dynamix_lab.tasks import Arrays, Workload


class EndlessOrder:
    """The global stream of samples: epoch after epoch, each a seeded permutation, without a break.

    The permutations are those of `dynamix.data.BatchSampler`. Position p lies in epoch p // size, so every sample is
    used once in an epoch, however the stream is divided into rounds.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._drawn: dict[int, Tensor] = {}

    def take(self, start: int, count: int) -> Tensor:
        """Indices (count,) int64 from position `start` on.

        >>> EndlessOrder(4, seed=0).take(2, 6)[2:].sort().values     # the second epoch
        tensor([0, 1, 2, 3])
        """
        parts, end = list[Tensor](), start + count
        while start < end:
            epoch, at = divmod(start, self.size)
            parts.append(self._epoch(epoch)[at : at + end - start])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _epoch(self, epoch: int) -> Tensor:
        if epoch not in self._drawn:
            self._drawn = {kept: order for kept, order in self._drawn.items() if kept == epoch - 1}
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._drawn[epoch] = torch.randperm(self.size, generator=generator)
        return self._drawn[epoch]


class ScheduledRate:
    """Keeps an optimizer's rates at the trial's rate times its schedule."""

    def __init__(self, trial: Trial, optimizer: Optimizer) -> None:
        set_rate(optimizer, trial.learning_rate)
        self.trial, self._groups = trial, [(group, float(group["lr"])) for group in optimizer.param_groups]
        self._factor = 1.0

    def at(self, samples: float) -> None:
        """Set the rates for a step after `samples`."""
        factor = self.trial.rate_factor(samples)
        if factor != self._factor:
            self._factor = factor
            for group, rate in self._groups:
                group["lr"] = rate * factor


class RoundBook:
    """The record that every rank keeps alike: samples so far, the rule for the period, the shares.

    limit   samples after which the run ends; the last round is shortened to end there. None: no limit
    """

    def __init__(self, trial: Trial, workers: int, *, limit: int | None = None) -> None:
        local = trial.local
        if local is None:
            raise ConfigError("local", None, "settings of how workers meet over parameters", "pass LocalSettings()")
        self.trial, self.workers, self.limit, self.samples = trial, workers, limit, 0
        self.period = period_of(trial)
        self.shares = StepShares(
            workers,
            trial.batch_size,
            proportional=local.proportional,
            smaller_pieces=local.smaller_pieces,
            speeds=local.speeds,
        )

    def plan(self) -> RoundPlan:
        """The next round."""
        steps = self.period.steps
        if self.limit is not None:
            left = max(self.limit - self.samples, 1)
            steps = min(steps, math.ceil(left / (self.workers * self.trial.batch_size)))
        return self.shares.plan(self.samples, steps)

    def met(self, plan: RoundPlan, met: Met) -> None:
        """Record that a round is over."""
        self.samples += int(plan.samples.sum())
        self.shares.measured(plan, met.step_s)
        rate = self.trial.learning_rate * self.trial.rate_factor(self.samples)
        self.period = self.period.at(Moment(self.samples, rate, met.loss))


class LocalWorker:
    """One worker of a run with local steps: its model, optimizer and data."""

    def __init__(self, trial: Trial, workload: Workload, data: Arrays, seed: int, rank: int, workers: int) -> None:
        assert trial.local is not None
        self.trial, self.workload, self.data, self.rank = trial, workload, data, rank
        self.model = workload.make_model(seed)
        self.model.train()
        self.optimizer = workload.make_optimizer(self.model.parameters())
        self.rate = ScheduledRate(trial, self.optimizer)
        self.order = EndlessOrder(len(data), seed)
        self.baggage = Baggage(self.model, self.optimizer, trial.local, rank, workers)

    def indices(self, plan: RoundPlan) -> Tensor:
        """(steps, piece) indices on which this worker trains in the round."""
        steps, piece = int(plan.steps[self.rank]), int(plan.pieces[self.rank])
        return self.order.take(plan.begins(self.rank), steps * piece).view(steps, piece)

    def train(self, plan: RoundPlan) -> float:
        """Make this worker's steps of a round. Returns their mean loss."""
        indices, total = self.indices(plan), 0.0
        each = float(plan.samples.sum()) / len(indices)  # samples of all workers during one step of this one
        for step, chosen in enumerate(indices):
            self.rate.at(plan.start + step * each)
            total += train_step(self.workload, self.model, self.optimizer, self.data, chosen)
        return total / len(indices)


def train_step(workload: Workload, model: nn.Module, optimizer: Optimizer, data: Arrays, chosen: Tensor) -> float:
    """One optimizer step on the samples `chosen` (n,) int64. Returns their loss."""
    inputs, targets = data.__getitems__(chosen)  # type: ignore[arg-type]
    tell_cost(workload, inputs, targets)
    loss = workload.loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def tell_cost(workload: Workload, inputs: Tensor, targets: Tensor) -> None:
    """Tell an emulated device the cost of the next pass's samples. Does nothing elsewhere."""
    if workload.costs is not None:
        batch_cost(float(workload.costs(Arrays(inputs, targets)).sum()))
