"""The learning rates of a job: factors that follow the global batch, and schedules that count samples."""

from __future__ import annotations

from math import nan
from typing import Any

from torch.optim import Optimizer

from dynamix.data import Allocations, BatchSampler, Piece, Round, Stream
from dynamix.runtime.facts.job_facts import JobFacts
from dynamix.runtime.facts.progress import Progress
from dynamix.runtime.part import Part
from dynamix.runtime.ranks.compare import settings_of
from dynamix.runtime.rate.budget import Budget
from dynamix.runtime.rate.scaling import LearningRate, SampleSchedule, SchedulerWatch, rate_of
from dynamix.runtime.rules import AUTO, efficiency

ROOM_AFTER = 1000  # optimizer steps, if the user's rate does not fall before


class Rates(Part):
    """The learning rates of all optimizers of a controller.

    lr_rule, rate_for   as in `Controller`
    budget    how much the job is to learn; None: not set
    watched   detects a scheduler that counts steps; None: counting steps is correct, or a schedule was given
    """

    def __init__(
        self, job: JobFacts, lr_rule: str, rate_for: int | None, allocations: Allocations, progress: Progress
    ) -> None:
        self.job, self.allocations, self.progress, self._rate_for = job, allocations, progress, rate_for
        # A fixed global batch needs no other rate, unless local steps have pieces of several sizes.
        stays = job.fixed and not job.sync_schedule.steps_apart and rate_for is None
        self.lr_rule = "none" if lr_rule == AUTO and stays else lr_rule
        self.budget: Budget | None = None
        self.optimizers: list[Optimizer] = []
        self.learning_rates: list[LearningRate] = []  # of the optimizers, if a rule applies
        self.schedules: list[SampleSchedule] = []
        self.watched: SchedulerWatch | None = None
        self._whole: list[float] = []  # factors for a step of a whole piece, with local steps
        self._total = job.at_once
        self._within: float = 0  # samples of the current round for which schedules have advanced

    def add(self, optimizer: Optimizer) -> None:
        """Scale the learning rate of `optimizer` with the batch, if a rule applies."""
        self.optimizers.append(optimizer)
        if self.lr_rule != "none":
            self.learning_rates.append(LearningRate(optimizer, self.lr_rule))

    def watch(self, optimizer: Optimizer) -> None:
        """Warn if a scheduler of `optimizer` counts steps, but steps are not comparable: see `SchedulerWatch`."""
        if not self.schedules and ((apart := self.job.sync_schedule.steps_apart) or not self.job.fixed):
            self.watched = SchedulerWatch(optimizer, self.job.base_batch, apart=apart)

    def schedule(self, scheduler: Any, nominal_batch_size: int | None) -> SampleSchedule:
        """`Controller.scheduler`: advanced with every round."""
        self.watched = None  # this schedule says itself if the loop steps it, too
        self.schedules.append(SampleSchedule(scheduler, nominal_batch_size=nominal_batch_size or self.job.at_once))
        return self.schedules[-1]

    def spend(self, source: BatchSampler | Stream, samples: int | None, **how: Any) -> Budget:
        """`Controller.budget`, with epochs of `source`."""
        self.budget = Budget(self.progress, source, samples, **how)
        return self.budget

    def alike(self) -> dict[str, Any]:
        """State that must be equal on all ranks, by name."""
        budget = {"budget": None if self.budget is None else (self.budget.samples, self.budget.count)}
        return {**budget, "schedules": [of.nominal_batch_size for of in self.schedules], **settings_of(self.optimizers)}

    def efficiency(self, done: Round) -> float:
        """What a round's sample teaches, relative to the start; an epoch's tail counts like the steps before."""
        if done.piece or done.regular:
            self._total = done.at_once if done.piece else done.samples
        return efficiency(self._total, self.job.at_once, *self.progress.noise_at(done.index))

    @property
    def move(self) -> bool:
        """Whether passes or rounds change a learning rate, or a scheduler is watched."""
        return bool(self.learning_rates or self.schedules or self.watched)

    def pass_begins(self, piece: Piece, kept: bool) -> None:
        if self.schedules and piece.round.apart:
            self.part_done(piece.round, piece.number / piece.of)
        self.follow(piece.round, piece.samples)

    def follow(self, coming: Round, samples: int = 0) -> None:
        """Set the rates for a round's global batch; an epoch's tail uses that of the steps before.

        With local steps, rates follow the steps that workers take simultaneously, and this worker's `samples`: a part
        of a piece is a smaller step.
        """
        if self.watched is not None:
            self.watched.look()
        if coming.apart:
            if coming.piece:
                self._follow(coming.at_once, *self.progress.noise_at(coming.index))
                if samples:
                    self.follow_piece(samples / coming.piece)
        elif self.learning_rates:
            sizes = coming.samples if coming.regular else int(self.allocations.at(coming.index).sum())
            self._follow(sizes, *self.progress.noise_at(coming.index))

    def _follow(self, samples: int, noise: float, signal: float) -> None:
        """Set the rates for a round of `samples`; the noise scale is the one that all ranks agreed on."""
        base, steps = self._rate_for or self.job.at_once, self.progress.samples / self.job.at_once
        if samples == base or not self.learning_rates:
            self._whole = [1.0] * len(self.learning_rates)
        else:
            room = max(steps / ROOM_AFTER, 2 * self.progress.fallen(rate_of(self.optimizers[0].param_groups[0])))
            known = {"noise": noise, "signal": signal, "base_batch": base, "room": min(room, 1.0)}
            self._whole = [rate.rule(samples / base, **known) for rate in self.learning_rates]
        for learning_rate, factor in zip(self.learning_rates, self._whole, strict=True):
            learning_rate.set_factor(factor)

    def follow_piece(self, scale: float) -> None:
        """Set the rates for a local step whose piece is `scale` of a whole one."""
        for learning_rate, factor in zip(self.learning_rates, self._whole, strict=True):
            part = 1.0 if scale == 1.0 else learning_rate.rule(scale, nan, nan, base_batch=1)
            learning_rate.set_factor(factor * part)

    def part_done(self, coming: Round, part: float) -> None:
        """A worker has trained `part` (0 to 1) of its share of a round. Schedules advance between averagings, too."""
        self._advance(part * self._counted(coming))

    def round_done(self, done: Round) -> None:
        if self.learning_rates and self._total != (self._rate_for or self.job.at_once):
            self.progress.fallen(rate_of(self.optimizers[0].param_groups[0]), done=True)
        if self.schedules:
            self._advance(self._counted(done, spent=True))
            self._within = 0.0
        if self.watched is not None:
            self.watched.look()
            self.watched.round_done(done)

    def _counted(self, of: Round, *, spent: bool = False) -> float:
        """The samples of a round that schedules count; `spent`: the budget has counted the round already."""
        if self.budget is None:
            return of.samples
        in_progress = self.budget.count == "progress" and not self.job.fixed
        return self.budget.within(of.samples * (self.efficiency(of) if in_progress else 1.0), spent=spent)

    def _advance(self, to: float) -> None:
        """Advance schedules to `to` samples of the current round."""
        more, self._within = max(to - self._within, 0), to
        for schedule in self.schedules:
            schedule.advance(more)

    def job_ends(self) -> None:
        """Remove every hook from the optimizers."""
        for learning_rate in self.learning_rates:
            learning_rate.remove()
