"""What a rank does behind its `Controller`: measure, close windows, put decisions in force, save and resume."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from dynamix.data import Allocations, BatchSampler, Piece, StepPlan, Stream
from dynamix.data.cutting import NO_LIMIT
from dynamix.errors import DynamixError, MemoryLimitError, UsageError
from dynamix.model.ways import Ways
from dynamix.policies import Policy
from dynamix.policies.protocol import boundary
from dynamix.policies.wrappers import window_length_of
from dynamix.runtime.check.loop import LoopCheck
from dynamix.runtime.check.losses import WeightTest
from dynamix.runtime.decide.channel import DecisionChannel
from dynamix.runtime.decide.job_facts import JobFacts
from dynamix.runtime.decide.peer_channel import PeerChannel
from dynamix.runtime.decide.progress import Progress
from dynamix.runtime.decide.window_closer import WindowCloser
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.memory import Memory
from dynamix.runtime.ranks.compare import facts_of
from dynamix.runtime.ranks.liveness import Liveness
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.ranks.rendezvous import require_alone
from dynamix.runtime.rate.rates import Rates
from dynamix.runtime.rate.scaling import SampleSchedule
from dynamix.runtime.state.saving import JobState, asked_by_distributed_checkpoint
from dynamix.runtime.sync.connected_model import ConnectedModel
from dynamix.runtime.sync.gradients import GradientWeight
from dynamix.runtime.sync.loss_weight import LossWeight
from dynamix.runtime.sync.round_boundary import RoundBoundary
from dynamix.runtime.sync.single_worker import SingleWorkerSync
from dynamix.window import Ints

Source = TypeVar("Source", BatchSampler, Stream)


class TrainingJob:
    """One rank's part of a job whose batch sizes change; every rank has one, and all take the same steps.

    The sampler, the connected model and the schedules are given to it once they exist; a checkpoint loaded before that
    waits for them. (A virtual cluster has one for all its workers, whose recorder's row is everyone's.)

    policy    every rank has one, for its checkpoint; which of them are asked is the channel's affair
    start     samples per round of every worker at the start, int64 (W,)
    interval  optimizer steps per window; of the first one, if `policy` says how long later ones are
    ranks     None: there are no others
    micro_batch   most samples of a piece of this rank's share; None: a share is one, or one of `accumulate`
    begins        called with the samples trained on so far when the first step of this process is about to begin
    apart         every piece is an optimizer step of this rank's own, and workers meet over parameters. Where `job` has
              `Ways`, the allocation in force says whether, and how large the pieces are
    """

    def __init__(
        self,
        job: JobFacts,
        policy: Policy,
        channel: DecisionChannel | PeerChannel,
        start: Ints,
        loss_weight: LossWeight,
        *,
        rank: int = 0,
        interval: int,
        lr_rule: str,
        ranks: Ranks | None = None,
        micro_batch: int | None = None,
        apart: bool = False,
        begins: Callable[[int], None] | None = None,
    ) -> None:
        self.job, self.policy, self.channel, self.rank, self.interval = job, policy, channel, rank, interval
        self._begins = begins
        self.loss_weight, self.paced = loss_weight, window_length_of(policy) is not None
        self.micro_batch, self.apart = micro_batch if self.ways is None else NO_LIMIT, apart
        self.whole_piece = micro_batch  # what learning rates are for; a rank's memory may hold less
        self.steps_apart = apart = apart or self.ways is not None
        # Samples of all workers' optimizer steps that are taken at the same time, if that is not a round.
        at_once = start.size * micro_batch if apart and micro_batch else None
        self.rates = Rates(job, lr_rule, at_once=at_once if self.ways is None else job.base_batch)
        self.accumulate, self.per_epoch = job.accumulate, boundary(policy) == "epoch"
        # The sampler's ledger counts micro-steps and samples of each; all that ranks say to each other counts rounds.
        self.allocations, self.progress = Allocations(start // self.accumulate), Progress()
        self.recorder = Recorder(torch.device("cpu"))
        self.source: BatchSampler | Stream | None = None
        self.attached: ConnectedModel | None = None
        self.memory: Memory | None = None
        self.connected: list[ConnectedModel] = []  # `attached` is the first of them
        self.ranks = channel.ending = None
        self._made_alone = ranks is None
        if ranks is not None:
            self.ranks, channel.ending, loss_weight.ending = ranks, ranks.ending, ranks.ending
        workers = 1 if ranks is None else self.allocations.workers
        self.loop = LoopCheck(
            self.accumulate, self.fail, lambda: self.recorder.muted, self.gather, rank=rank, workers=workers
        )
        self.loop.needs_piece = self.ways is not None and workers > 1
        alone = self.allocations.workers == 1
        self.own_gradients = SingleWorkerSync(self, every=64 if apart else 2 if alone else 0)
        self.liveness: Liveness | None = None  # None: nobody else is there
        self.stop_wanted = self.stopping = False
        parts = job, policy, self.allocations, self.progress, self.recorder
        self.state = JobState(*parts, rank=rank, peers=isinstance(channel, PeerChannel))
        self.decisions, self.meetings = WindowCloser(self), RoundBoundary(self)
        self.payload: Callable[[], float] = lambda: 1.0 if self.ways is None else self.meetings.payload

    @property
    def crossed(self) -> int:
        """Backward passes that have crossed ranks, of all models."""
        return sum(attached.hook.crossed for attached in self.connected if attached.hook is not None)

    @property
    def ways(self) -> Ways | None:
        """Who chooses how workers meet; None where that does not change."""
        return self.job.rounds if isinstance(self.job.rounds, Ways) else None

    def sampler(self, dataset_size: int, **given: Any) -> BatchSampler:
        """`Controller.batch_sampler`, its arguments being `given`."""
        return self._adopt(BatchSampler(dataset_size, self.allocations, **given, **self._of_source()))

    def stream(self, iterable: Iterable[Any], **given: Any) -> Stream:
        """`Controller.stream`, its arguments being `given`."""
        agree = self.loss_weight.sum_async if self.loss_weight.group else None
        return self._adopt(Stream(iterable, self.allocations, agree=agree, **given, **self._of_source()))

    def _of_source(self) -> dict[str, Any]:
        own = {"rank": self.rank, "world_size": self.allocations.workers, "accumulate": self.accumulate}
        bounds = self.job.in_pieces()
        return own | {"low": bounds.low, "high": bounds.high, "before_issue": self.decisions.before_issue}

    def _adopt(self, source: Source) -> Source:
        if self.source is not None:
            raise UsageError("this controller already has a batch sampler or stream; make one Controller per loop")
        source.on_first_issue, source.on_begin, source.fail = self.state.random.go_on, self._begin, self.fail
        source.micro_batch, source.apart, source.either = self.micro_batch, self.apart, self.ways is not None
        self.state.place.begin(source)
        self.source = self.loop.source = source
        return source

    def _begin(self) -> None:
        if self._made_alone:
            require_alone()
        self.loop.begin()
        if self._begins is not None and not self.recorder.all_steps:
            self._begins(self.progress.samples)
        if self.ranks is not None and self.source is not None and self.source.left_early:
            self.ranks.agreed = False  # a rank may have left it after another round than the others
        if getattr(self.source, "sharded", False):
            self.agree_once()  # iterating is a collective there

    def connect(self, model: nn.Module, optimizer: Optimizer, attached: ConnectedModel, memory: Memory) -> None:
        """Observe this model and optimizer, weight its gradients, and let the learning rate follow the batch."""
        self.attached, self.memory, self.recorder = attached, memory, attached.recorder
        if self.rank == 0:
            self.rates.watch(optimizer, apart=self.steps_apart)
        if self.loop.workers > 1 and not self.loss_weight.required:
            self.job.weight_test = WeightTest(given=self.loss_weight.given)
        self.own_gradients.watch(optimizer)
        self.connect_another(model, optimizer, attached)
        self.state.parts.add(self.recorder)

    def connect_another(self, model: nn.Module, optimizer: Optimizer, attached: ConnectedModel) -> None:
        """Weight the gradients of this model, and let its learning rate follow the batch."""
        self.connected.append(attached)
        if self.memory is not None and attached is not self.attached:
            self.memory.models.append((attached, optimizer))
        if self.liveness is not None:
            attached.explain_with(self.liveness.explain)
        crosses = attached.hook is not None and self.ranks is not None and self.allocations.workers > 1
        hooked = attached.hook is not None and attached.hook.chained
        check = self.loop.connect(model, optimizer, reduces=crosses, hooked=hooked, shards=attached.shards)
        if self.ways is not None:
            attached.apart = lambda: self.loop.apart(self.loop.piece_of_pass())
        if attached.hook is not None:
            attached.hook.check = check
            attached.hook.arrivals.ending = self.ranks.ending if self.ranks is not None else None
        self.add_optimizer(optimizer, model, further=attached is not self.attached)

        def before_forward(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._before_forward(module, attached, args, kwargs)

        untraced = torch.compiler.disable(before_forward)  # torch.compile would fail in what it does

        def entry(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            (untraced if torch.compiler.is_compiling() else before_forward)(module, args, kwargs)

        # Before FSDP2's own hook, which gathers parameters: waiting for them is a part of the step.
        model.register_forward_pre_hook(entry, with_kwargs=True, prepend=attached.shards is not None)
        self.state.hooks.add(attached)

    def add_optimizer(self, optimizer: Optimizer, model: nn.Module, *, further: bool = True) -> None:
        """Let the learning rate of `optimizer` follow the batch, and what it applies to `model` be finished gradients.

        further   it is not the first one of the first model
        """
        self.rates.add(optimizer)
        attached = next(attached for attached in self.connected if attached.model is model)
        if attached.meeting is not None:
            attached.meeting.add_optimizer(optimizer)
            if self.ways is not None:
                attached.meeting.before_step = lambda: self.meetings.before_step(attached)
        elif further:
            optimizer.register_step_pre_hook(lambda *_: self.own_gradients.finish(attached))

    def setting_up(self) -> AbstractContextManager[None]:
        """In whose body an error ends other ranks too, where they then wait for this one and it does not go on."""
        if self.ranks is not None:
            return self.ranks.setting_up()
        if self._made_alone:
            require_alone()
        return nullcontext()

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks are in the collective call `what`. Raises `UsageError` on all where some never come."""
        if self.ranks is not None:
            self.decisions.settle()  # one under way talks on the same group
            self.ranks.wait_for_all(what)

    def gather(self, told: Any, what: str) -> list[Any]:
        """What every rank tells, in the order of ranks: plain objects. A collective call, named `what`."""
        self.wait_for_all(what)
        return [told] if self.ranks is None else self.ranks.group.all_gather_object(told)

    def fail(self, error: DynamixError) -> DynamixError:
        """An error that ends the job: the other ranks are told of it."""
        if self.ranks is None:
            return error
        self.decisions.keep_for_the_loop(error)
        return self.ranks.ending.report(error)

    def memory_ran_out(self, error: MemoryLimitError) -> None:
        """This process is about to end, having run out of memory: the other ranks end with the same words.

        Those that wait in a collective of their own (DDP's buffers, FSDP2) do not look for an error, and find this
        rank's last word once that fails.
        """
        if self.liveness is not None:
            self.liveness.leave(str(error))
        self.fail(error)

    def agree_once(self) -> None:
        """Compare with the other ranks what is about to be trained, if that was not done since the start or a load.

        A collective call. Raises `UsageError` on every rank, naming what differs, by rank.
        """
        if self.ranks is not None and not self.ranks.agreed:
            self.decisions.settle()
            self.ranks.agree(facts_of(self))

    def schedule(self, scheduler: Any, nominal_batch_size: int | None) -> SampleSchedule:
        """`Controller.scheduler`: advanced with every optimizer step."""
        schedule = self.rates.schedule(scheduler, nominal_batch_size)
        self.state.schedules.add(schedule)
        return schedule

    def need_source(self) -> BatchSampler | Stream:
        if self.source is None:
            ways = "controller.batch_sampler(dataset) or controller.stream(...)"
            raise UsageError(f"make a sampler or a stream first: {ways}")
        return self.source

    def need_memory(self) -> Memory:
        if self.memory is None:
            raise UsageError("call controller.wrap(model, optimizer) before find_limits()")
        return self.memory

    def piece_done(self, piece: Piece, applied: float | torch.Tensor | None) -> None:
        """A batch is over that is not the last of its round."""
        self.recorder.micro_done()
        for attached in self.connected:
            attached.piece_done(piece, applied)

    def before_step(self, piece: Piece) -> None:
        """The loop says that this batch is done."""
        self.agree_once()
        self.loop.before_step(piece)

    @property
    def met(self) -> bool:
        """Whether the batch stepped last was this rank's last of a round; also before the first."""
        stepped = self.loop.stepped
        return stepped is None or (not self.meetings.between if stepped.plan.apart else stepped.last)

    def step_done(self, plan: StepPlan, *, ahead: int = 0) -> None:
        """A round is over: take what was decided, and close the window if it is full.

        `ahead` more rounds than the source's own count as issued: a simulated loader's prefetching.
        """
        progress = self.progress
        progress.steps += 1
        progress.samples += plan.samples
        progress.here += plan.samples / (plan.at_once or self.rates.at_once or 1) if plan.apart else 1.0
        for attached in self.connected:
            attached.step_done()
        self.decisions.count(plan)
        self.rates.advance(plan, plan.samples)
        self.decisions.settle()
        if self.job.weight_test is not None:
            self.job.weight_test.require_right()
        if self.job.unlike is not None:
            raise UsageError(self.job.unlike)
        if self.decisions.differ:
            self.decisions.compare(plan)
        self.decisions.close_if_full(plan, ahead=ahead)
        self.stopping = self.stop_wanted if self.liveness is None else self.liveness.step_done(progress.steps)

    def request_stop(self) -> None:
        """`Controller.request_stop`."""
        self.stop_wanted = True
        if self.liveness is not None:
            self.liveness.stopping.wanted = True

    def close(self, *, patience_s: float) -> list[ProcessGroup]:
        """End threads, what is under way getting `patience_s`; returns the process groups, which nobody has then."""
        self.channel.close(patience_s)
        self.loop.close()
        self.rates.remove()
        if self.ranks is not None:
            self.ranks.ending.close()
            self.ranks = None  # it has the control group
        owners: list[Any] = [owner for attached in self.connected for owner in (attached.hook, attached.meeting)]
        owners += [self.memory, self.loss_weight]
        return [group for owner in owners if owner is not None for group in owner.close()]

    def share(self) -> GradientWeight:
        """How the gradient now being reduced is weighted."""
        source, weight = self.need_source(), self.loss_weight
        piece = source.piece()
        plan, total = piece.plan, piece.plan.samples / self.accumulate
        # Agreed values only: what is pending here may be settled on another rank, and all must reduce alike.
        open_from = max(self.progress.opens, self.job.closing.consumed + 1)
        # Norms of ranks whose samples are not alike would not tell the noise scale.
        kept = plan.regular and source.draws_alike and plan.index // self.accumulate >= open_from
        own = piece.share / piece.samples if piece.by_size and piece.samples else 1.0
        applied = weight.in_gradient(piece)
        return GradientWeight(float(piece.samples), total, kept, applied, own, piece.share / plan.samples)

    @property
    def batch_sizes(self) -> Ints:
        """Samples of every worker in the coming round, int64 (W,)."""
        return self.accumulate * self.allocations.at(self.next_step)

    @property
    def piece_apart(self) -> int:
        """Samples of a worker's own step in the coming round, where the allocation says that workers step apart."""
        return self.allocations.piece_at(self.next_step)

    def put_in_force(self, sizes: Ints) -> None:
        """Begin the ledger anew with `sizes` (W,), samples per round, from the coming round on, in the same way."""
        self.allocations.reset(self.next_step, sizes // self.accumulate, self.piece_apart)

    @property
    def next_step(self) -> int:
        """The coming micro-step; of a loaded checkpoint without its sampler yet, the first its ledger still knows."""
        return self.allocations.begin if self.source is None else self.source.consumed

    @property
    def rounds_done(self) -> int:
        return self.next_step // self.accumulate

    def samples_now(self) -> int | None:
        """What this rank is working on, for the note on an out-of-memory error."""
        source = self.source
        return source.piece().samples if source is not None and source.issued > source.consumed else None

    def _before_forward(self, module: nn.Module, attached: ConnectedModel, args: Any, kwargs: dict[str, Any]) -> None:
        source, timer = self.source, self.recorder.timer
        loops = torch.is_grad_enabled() and source is not None and source.issued > source.consumed
        if loops and not self.recorder.muted and source is not None:
            self.agree_once()
            # A loss that is weighted by its own count may be of fewer samples than were dealt.
            self.loop.forward(() if self.loss_weight.required else (*args, *kwargs.values()))
            if self.loop.workers > 1 and (why := self.loss_weight.misfit(source, kwargs)) is not None:
                self.loop.fail(why)
        if not (loops and module.training) or source is None:
            timer.interrupted()
            return
        if self.recorder.muted:
            return
        attached.before_forward(source.piece())
        if self.loop.models > 1:
            timer.next_pass()
        timer.forward_started()
        self.follow_batch(source.plan(), source.piece())

    def follow_batch(self, plan: StepPlan, piece: Piece | None = None) -> None:
        """Let the learning rate follow the global batch of `plan`; an epoch's tail has that of the steps before.

        Where workers step apart it follows the steps that they take at the same time, and the size of the `piece`: a
        part of one is a smaller step.
        """
        self.rates.look()
        if plan.apart:
            if plan.piece:
                self.rates.follow(plan.at_once, *self.progress.noise_at(plan.index))
            whole = plan.piece or self.whole_piece
            if piece is not None and piece.samples and whole:
                self.rates.follow_piece(piece.samples / whole)
        elif self.rates.follows:
            samples = plan.samples if plan.regular else self.accumulate * int(self.allocations.at(plan.index).sum())
            self.rates.follow(samples, *self.progress.noise_at(plan.index // self.accumulate))

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        self.meetings.require("state_dict() is of all ranks alike")
        self.decisions.settle()
        group = self.channel.group
        alike = not gather and group is not None and asked_by_distributed_checkpoint()
        if not (gather or alike):
            return self.state.save()
        with self.setting_up():
            self.wait_for_all("controller.state_dict(gather=True)" if gather else "a distributed checkpoint")
            return self.state.save_gathered(group) if gather or group is None else self.state.save_alike(group)

    def load_state_dict(self, state: Any, *, policy: bool = True) -> None:
        self.decisions.settle()  # a decision under way is about the job as it was
        self.channel.drain()
        self.state.load(state, policy=policy)
        if self.paced and self.progress.interval:
            self.interval = self.progress.interval
        if self.ways is not None:
            self.rates.at_once = self.job.base_batch
        if self.ranks is not None:
            self.ranks.agreed = False

    def cap_pieces(self, samples: int) -> None:
        """Where workers meet in both ways: no piece of this rank's may have more."""
        if self.ways is not None:
            self.micro_batch = samples
            if self.source is not None:
                self.source.micro_batch = samples
