"""The job behind a `Controller`: parts that measure, decide, weight and average, and the events that they receive."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynamix.data import Allocations, BatchSampler, Piece, Stream
from dynamix.data.cutting import NO_LIMIT
from dynamix.errors import MemoryLimitError, UsageError
from dynamix.events.background import BackgroundLog
from dynamix.policies.wrappers import window_length_of
from dynamix.runtime.check.loop import LoopCheck
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.channel import DRAIN_S, DecisionChannel
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.decide.peer_channel import open_channel
from dynamix.runtime.decide.window_closer import WindowCloser
from dynamix.runtime.facts.job_facts import JobFacts
from dynamix.runtime.facts.losses import WeightTest
from dynamix.runtime.facts.progress import Progress
from dynamix.runtime.measure.pairs import PairNoise
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.memory.exit_advice import ExitNote
from dynamix.runtime.memory.limits import Memory
from dynamix.runtime.part import Observation, Part, heard
from dynamix.runtime.ranks.compare import sketches_of
from dynamix.runtime.ranks.errors import UNTRAINED
from dynamix.runtime.ranks.hosts import own_host
from dynamix.runtime.ranks.process_groups import destroy_groups
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.ranks.watch import CLOSED
from dynamix.runtime.rate.rates import Rates
from dynamix.runtime.rate.scaling import SampleSchedule
from dynamix.runtime.state.resume import Division
from dynamix.runtime.state.saving import JobState, asked_by_distributed_checkpoint
from dynamix.runtime.sync.loss_weight import LossWeight
from dynamix.runtime.sync.parameter_averaging import ParameterAveraging
from dynamix.runtime.sync.round_boundary import RoundBoundary
from dynamix.runtime.sync.stray import StrayCollectives
from dynamix.runtime.sync.sync import Sync

LEFT = f"{CLOSED}; workers that step apart leave the loop together: `if controller.checkpoint_due(every=N): break`"


class TrainingJob:
    """One rank's part of a job whose batch sizes change. Every rank has one, and all take the same steps.

    It gets the sampler, models and schedules once they exist; a checkpoint loaded earlier is kept for them. (A virtual
    cluster has one for all its workers; its recorder's row holds for each of them.)

    config    the job's arguments
    facts     state that is equal on all ranks
    recorder  None: a recorder of this rank
    payload   bytes sent to average parameters, relative to a gradient's; None: as connected models say
    decider   on the rank that decides: gets the start of this process's first step, and the end
    """

    def __init__(
        self,
        config: JobConfig,
        facts: JobFacts,
        channel: DecisionChannel,
        loss_weight: LossWeight,
        ranks: Ranks,
        *,
        recorder: Recorder | None = None,
        payload: Callable[[], float] | None = None,
        decider: Decider | None = None,
    ) -> None:
        self.facts, self.ranks, self.loss_weight = facts, ranks, loss_weight
        self.recorder, self._decider = recorder or Recorder(torch.device("cpu")), decider
        self.allocations, self.progress = Allocations(config.start), Progress()
        self.most_of_piece = NO_LIMIT if facts.sync_schedule.mixed else facts.piece  # this rank's
        self.rates = Rates(facts, config.lr_rule, config.rate_for, self.allocations, self.progress)
        self.models: list[Sync] = []
        self.memory: Memory | None = None  # of the first model
        self.source: BatchSampler | Stream | None = None
        division = Division(ranks.rank, facts, self.allocations)
        self.state = JobState(division, config.served, self.progress, self.recorder, peers=channel.each_decides)
        length = window_length_of(config.served)
        self.windows = WindowCloser(
            facts,
            channel,
            ranks,
            self.allocations,
            self.progress,
            self.recorder,
            interval=config.interval if isinstance(config.interval, int) else length or 1,
            paced=length is not None,
            told=functools.partial(self._exchanged, payload),
            begins=self._iteration_begins,
            resumed=self.state.random.go_on,
        )
        fail = self.windows.fail
        self.loop = LoopCheck(
            facts.accumulate, self.recorder, fail, self.gather, facts.tell_beside, ranks.workers, models=self.models
        )
        apart = facts.sync_schedule.steps_apart
        strays = StrayCollectives(loss_weight.group if apart else None)
        ranks.also_look(strays.look_beside)
        self.averagings: list[ParameterAveraging] = []
        self.boundary = RoundBoundary(self.averagings, self.recorder, strays, fail, steps_apart=apart)
        # For workers whose gradients are not reduced with others'.
        self.pairs = PairNoise(self.recorder, 64 if apart else 2)
        self.stopping = False
        self._listen()

    def _listen(self) -> None:
        """Find out once which parts receive which event, and in which order."""
        parts: list[Part] = [self.boundary] if self.facts.sync_schedule.steps_apart else []
        parts += [part for model in self.models for part in (*model.owners, model)]
        parts += [self.rates, self.windows] if self.rates.move else [self.windows]
        self._heard = {event: heard(parts, event) for event in ("pass_begins", "piece_done", "round_done")}

    # ------------------------------------------------------------ what it is given

    def of_source(self) -> dict[str, Any]:
        """The arguments from which this job's sampler or stream is made."""
        if self.source is not None:
            raise UsageError("this controller already has a batch sampler or stream; make one Controller per loop")
        facts, bounds = self.facts, self.facts.in_pieces()
        own = {"rank": self.ranks.rank, "world_size": self.allocations.workers, "accumulate": facts.accumulate}
        return own | {"low": bounds.low, "high": bounds.high, "owner": self.windows, "micro_batch": self.most_of_piece}

    def feed(self, source: BatchSampler | Stream) -> None:
        """Take the loop's batches from `source`, which was made with `of_source`."""
        self.source = source
        for part in (self.loop, self.windows, self.state.place):
            part.feed(source)

    def limit_pieces(self, samples: int) -> None:
        """Limit this rank's pieces to so many samples."""
        self.most_of_piece = samples
        if self.source is not None:
            self.source.limit_pieces(samples)

    def connect(self, model: Sync, optimizer: Optimizer) -> None:
        """Weight this model's gradients, observe those of the first model, and scale learning rates with the batch."""
        first = not self.models
        if self.memory is None:
            note = ExitNote(self.ranks.rank, self.loop.samples_in_hand, self.memory_ran_out)
            self.memory = Memory(model, self.ranks, note)
            if self.ranks.rank == 0:
                self.rates.watch(optimizer)
            if self.ranks.workers > 1 and not self.loss_weight.required:
                self.facts.test_weights(WeightTest(given=self.loss_weight.given))
        self.memory.add(model, optimizer)
        self.models.append(model)
        self.averagings += model.averagings
        if model.alike:
            self.facts.parting.connect(model.model)
        self.add_optimizer(optimizer, model, first=first)
        self._hear_passes(model)
        self.state.hooks.add(model)

    def add_optimizer(self, optimizer: Optimizer, model: Sync, *, first: bool = False) -> None:
        """Scale the learning rate of `optimizer` with the batch, and finish its gradients before it applies them."""
        if self.ranks.workers == 1 or self.facts.sync_schedule.steps_apart:  # else the model's hook sees gradients
            optimizer.register_step_pre_hook(lambda *of: self._before_optimizer(model, optimizer, first=first))
        model.add_optimizer(optimizer)
        self.rates.add(optimizer)
        # After local steps, step counters in optimizers differ by rank.
        if not self.facts.sync_schedule.steps_apart:
            self.facts.parting.watch(optimizer)
        self._listen()

    def _hear_passes(self, model: Sync) -> None:
        hears = functools.partial(self.pass_begins, model)
        entry = _Entry(hears, torch.compiler.disable(hears))
        model.model.register_forward_pre_hook(entry, with_kwargs=True, prepend=model.comes_first)

    def schedule(self, scheduler: Any, nominal_batch_size: int | None) -> SampleSchedule:
        """`Controller.scheduler`: advanced with every round."""
        schedule = self.rates.schedule(scheduler, nominal_batch_size)
        self._listen()
        self.state.schedules.add(schedule)
        return schedule

    # ------------------------------------------------------------ in the order of a step

    def _iteration_begins(self) -> None:
        self.ranks.begin()
        self.loop.iteration_begins()
        if self._decider is not None and not self.recorder.timer.step:
            self._decider.begin(self.progress.samples)
        if self.source is not None and self.source.left_early:
            self.ranks.forget_agreement()  # ranks may have left it after different rounds
        if getattr(self.source, "sharded", False) and not self.ranks.agreed:
            self.agree()  # iterating is a collective call then

    def pass_begins(self, model: Sync, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pass of a connected model begins: find its batch, and pass it to the parts."""
        recorder, source, training = self.recorder, self.source, module.training
        piece = source.current if source is not None and torch.is_grad_enabled() else None
        if recorder.muted or piece is None or source is None:
            if piece is None or not training:
                recorder.timer.interrupted()
            return
        if not self.ranks.agreed:
            self.agree()
        # A loss weighted by its own count may have fewer samples than were dealt.
        self.loop.look_at(piece, () if self.loss_weight.required else (*args, *kwargs.values()))
        if (self.loss_weight.given or kwargs) and self.ranks.workers > 1:
            self.loss_weight.require_fit(piece, source.placeholder, kwargs, self.loop.fail)
        kept = source.draws_alike and self.windows.measures(piece)
        for hears in self._heard["pass_begins"]:
            hears(piece, kept)
        if not training:
            recorder.timer.interrupted()
            return
        if not model.settled:
            model.before_forward(piece)
        recorder.timer.forward_started()

    def _before_optimizer(self, model: Sync, optimizer: Optimizer, *, first: bool) -> None:
        """An optimizer of `model` is about to step. `first`: measure the gradients that it applies."""
        piece = None if self.source is None else self.source.current
        model.before_optimizer(piece)
        if piece is not None and piece.round.apart:
            self.boundary.strays.begin()
        if not first or piece is None or (self.ranks.workers > 1 and not piece.round.apart):
            return  # without gradients, or the hook has reduced and measured them
        if not self.recorder.muted:
            self.recorder.timer.gradients_ready()
            self.recorder.timer.reduced()
        if own := piece.samples if piece.round.apart else piece.round.samples:
            self.pairs.observe([p for g in optimizer.param_groups for p in g["params"]], own, piece)

    def step(self, loss: Any, logits: Any, target: Any, count: int | None) -> None:
        """`Controller.step`: the current batch is done."""
        source, weight = self.need_source() if self.source is None else self.source, self.loss_weight
        piece = source.current or source.piece()
        mine = piece.samples
        if count is not None and mine and count != mine:
            fix = "Use controller.weight(loss, count=...) with weighting='loss', and step() without count"
            wrong = f"count={count}, but this rank was given {mine} samples: gradients would be weighted wrongly"
            raise UsageError(f"{wrong}. {fix}")
        if self.ranks.workers > 1 and not self.models:
            raise UsageError("call controller.wrap(model, optimizer) before training, or gradients stay unweighted")
        in_loss = weight.required or weight.given or weight.applied is not None
        seen = Observation(loss, logits, target, count, weight.take() if in_loss else None, weight.given)
        if not self.ranks.agreed:
            self.agree()
        if self.facts.accumulate > 1 and not self.loop.forwards and piece.plan.counts.all():
            self.progress.pass_over()  # on one rank alone it would leave its samples out of the gradient
            self.ranks.must_all_call(UNTRAINED)  # under FSDP2 others then wait in another collective than this rank
        self.loop.piece_done(piece, seen)
        source.consume()
        if mine:
            over = weight.in_loss(piece) if weight.given else 1.0
            self.recorder.observe(loss, logits, target, samples=mine, over=over)
            if (test := self.facts.weight_test) is not None and test.suspects:
                test.judge(loss, mine, piece.plan.counts)
        if not piece.last:
            self.recorder.timer.micro_done()
            for model in [] if piece.round.apart else self.models:
                model.make_ready(piece, seen.applied)
        for hears in self._heard["piece_done"]:
            hears(piece, seen)
        if piece.last:
            self.round_done(piece)

    def round_done(self, piece: Piece) -> None:
        """A round is done; `piece` was its last."""
        rates = self.rates
        self.progress.count(piece.round, 1.0 if self.facts.fixed else rates.efficiency(piece.round))
        for hears in self._heard["round_done"]:
            hears(piece.round)
        self.stopping = self.ranks.stop_after(self.progress.steps) or (rates.budget is not None and rates.budget.done)

    def _exchanged(self, payload: Callable[[], float] | None) -> tuple[int, float]:
        """What a window's row says about the exchange: see `WindowCloser`."""
        return sum(model.crossed for model in self.models), payload() if payload else self.boundary.payload

    # ------------------------------------------------------------ of all ranks

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks are in the collective call `what`. Raises `UsageError` on all if some never arrive."""
        self.windows.settle()  # a pending decision uses the same group
        self.ranks.wait_for_all(what)

    def gather(self, told: Any, what: str) -> list[Any]:
        """Every rank's object, in the order of ranks; plain objects. A collective call, named `what`."""
        self.windows.settle()
        return self.ranks.gather(told, what)

    def agree(self) -> None:
        """Check that all ranks are about to train the same.

        A collective call. Raises `UsageError` on every rank, with what differs and on which ranks.
        """
        self.windows.settle()
        source, settings = self.need_source(), [model.settings for model in self.models]
        known: dict[str, Any] = {"samples": type(source).__name__, **source.identity(), **self.facts.facts_alike()}
        known |= {"models": len(self.models), **self.rates.alike()}
        known |= {"exchange of gradients and buffers": [model.exchanges for model in self.models]}
        names = dict.fromkeys(name for of_model in settings for name in of_model)
        known |= {f"exchange: {name}": [of_model.get(name) for of_model in settings] for name in names}
        known |= {**self.boundary.alike(), "weighting": self.loss_weight.weighting}
        for number, model in enumerate(self.models):
            if isinstance(model.model, DistributedDataParallel) and not self.facts.sync_schedule.steps_apart:
                known |= sketches_of(model.model, number)
        known |= self.windows.alike()
        known |= {f"progress: {name}": value for name, value in self.progress.state_dict().items()}
        self.ranks.agree(known | {"progress: steps measured in the open window": self.recorder.steps})

    def memory_ran_out(self, error: MemoryLimitError) -> None:
        """This process is about to end because it ran out of memory: end the other ranks with the same message.

        Ranks that wait in a collective of their own (DDP's buffers, FSDP2) do not check for errors. They find this
        rank's message when that collective fails.
        """
        self.windows.fail(error)
        self.ranks.leave(str(error))

    # ------------------------------------------------------------ what others ask

    def need_source(self) -> BatchSampler | Stream:
        if self.source is None:
            ways = "controller.batch_sampler(dataset) or controller.stream(...)"
            raise UsageError(f"make a sampler or a stream first: {ways}")
        return self.source

    # ------------------------------------------------------------ state and end

    def close(self) -> None:
        """`Controller.close`. After an error, or the loss of a rank, it does not wait."""
        ranks, error = self.ranks, sys.exception()
        failing = error or ranks.lost
        if error is not None:
            if self.memory is not None:
                self.memory.note.uncaught(error)  # the loop closes its controller while the error propagates
            ranks.leave_with(error)
        try:
            if not failing:
                self.windows.settle()
        finally:
            patience_s = 0.0 if failing else DRAIN_S
            self.windows.channel.close(patience_s)
            for part in (self.loop, self.rates, self.boundary):
                part.job_ends()
            owners: list[Any] = [*self.models, self.loss_weight]
            groups = [group for owner in owners for group in owner.close()]
            self.end_events()
            groups += ranks.release()
            destroy_groups(groups, patience_s=patience_s)  # no other reference may exist, not even in this frame
            ranks.leave(LEFT if self.facts.sync_schedule.steps_apart else CLOSED)

    def end_events(self) -> None:
        """Write the steps after the last window, and close the events file. No communication. Idempotent.

        Also called for loops that never close their controller.
        """
        decider, self._decider = self._decider, None
        if decider is not None:
            decider.end(self.windows.rest(), self.windows.ended_s)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """`Controller.state_dict`."""
        self.boundary.require("state_dict() saves one state for all ranks")
        self.windows.settle()
        ranks, state = self.ranks, self.state
        alike = not gather and ranks.group is not None and asked_by_distributed_checkpoint()
        if not (gather or alike):
            return state.save()
        if ranks.group is None and self.allocations.workers > 1:
            need = "state_dict(gather=True) needs the other ranks"
            raise UsageError(f"{need}: call it on every rank, before controller.close()")
        with ranks.setting_up():
            ranks.wait_for_all("controller.state_dict(gather=True)" if gather else "a distributed checkpoint")
            saved = state.save(ranks.of_all)
            # For a distributed checkpoint all ranks return the first rank's state.
            return saved if gather else ranks.of_all(saved if ranks.rank == 0 else None)[0]

    def load_state_dict(self, state: Any, *, policy: bool = True) -> None:
        """`Controller.load_state_dict`."""
        self.windows.drain()  # a pending decision is about the old state
        self.state.load(state, policy=policy)
        self.windows.loaded()
        self.ranks.forget_agreement()


def open_job(
    config: JobConfig, group: dist.ProcessGroup | None, ranks: Ranks, events: BackgroundLog | None
) -> TrainingJob:
    """Make this rank's part of the job of `config`. A collective call.

    group     the workers' process group; None: there is one worker
    ranks     the same ranks, for the controllers' own messages
    events    the log to which the deciding rank writes
    """
    facts = JobFacts(config, hosts=tuple(ranks.gather(own_host(), "the names of hosts")))
    decider = Decider(config.served, facts, replay=config.replayed, events=events) if ranks.rank == 0 else None
    channel = open_channel(ranks, config, facts, decider)
    return TrainingJob(config, facts, channel, LossWeight(group, config.accumulate, ranks), ranks, decider=decider)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Called when a forward pass of a connected model begins. A copied or loaded model calls nothing."""

    hears: Callable[[nn.Module, Any, dict[str, Any]], None]
    untraced: Callable[[nn.Module, Any, dict[str, Any]], None]  # torch.compile fails on what `hears` does

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        (self.untraced if torch.compiler.is_compiling() else self.hears)(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Entry, (_nobody_hears, _nobody_hears)


def _nobody_hears(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """The entry of a model that no job trains: does nothing."""
