"""`Controller`: what a training loop holds."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from dynamix import random_state
from dynamix.agreement import Kind
from dynamix.arguments import check_counts, open_control_group, per_rank, policy_of, starting_sizes, watched
from dynamix.data import Allocations, BatchSampler, StepPlan, Stream
from dynamix.decentral import PeerChannel, open_channel
from dynamix.decision import Closing, Decider, recorded
from dynamix.errors import StateError, UsageError
from dynamix.gradients import ConsecutiveNoise, Share
from dynamix.memory import ExitNote, Memory, within
from dynamix.observation import Recorder
from dynamix.policies import Policy
from dynamix.policies.base import boundary
from dynamix.policies.deviations import LiveConfig
from dynamix.policies.guard import Guard, unguarded
from dynamix.policies.online import LearningPolicy
from dynamix.progress import Progress, Waiting, resume_allocations
from dynamix.scaling import LearningRate, SampleSchedule, rule
from dynamix.telemetry.events import EventLog
from dynamix.weighting import Attached, LossWeight, attach
from dynamix.window import Bounds, Ints, project

Model = TypeVar("Model", bound=nn.Module)
Source = TypeVar("Source", BatchSampler, Stream)
STATE_SCHEMA = 1


class Controller:
    """Gives every worker its own batch size while a job trains.

    A collective call: every rank of `process_group` constructs it with the same arguments (checked). Without an
    initialised process group it serves one process and adapts the batch size alone.

        controller = dynamix.Controller(policy="dynamix", batch_size=128)
        sampler = controller.batch_sampler(dataset, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        model = controller.wrap(DDP(net), optimizer)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for x, y in loader:
                logits = model(x); loss = F.cross_entropy(logits, y)
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                controller.step(loss=loss, logits=logits, target=y)

    policy            a name (`dynamix.policies.policy_names()`), a `.safetensors` policy file, or any `Policy`
    batch_size        samples per worker and micro-batch at the start
    min_batch_size, max_batch_size   one number, or one per rank; None: 1 and 8 * batch_size
    min_global_batch, max_global_batch   of the sum over workers; None: what the workers' bounds allow
    interval          optimizer steps per window (policies that decide per epoch ignore it)
    quantum           batch sizes are multiples of this (torch.compile and cudnn then see few shapes)
    max_change        a batch size changes by at most this factor per decision
    accumulate        micro-batches per optimizer step; call `step()` after each of them
    lr_rule           how the learning rate follows the global batch: none, linear, sqrt, adascale
    process_group     the data-parallel group; None: the default group
    events            file that rank 0 appends one JSON line per window to
    replay            events file of an earlier run whose allocations are applied instead of deciding
    learn             True: a policy with a network goes on learning on this job (docs/design/live-learning.md); or a
                      `LiveConfig`
    guard             watch the policy: where it does worse than the goodput rule, that takes over for a while (see `Guard`).
                      None: learned policies are watched, others are not

    Raises `ConfigError` for impossible values, `UsageError` when ranks pass different arguments.
    """

    def __init__(
        self,
        policy: str | Policy = "dynamix",
        batch_size: int = 128,
        *,
        min_batch_size: int | Sequence[int] | None = None,
        max_batch_size: int | Sequence[int] | None = None,
        min_global_batch: int | None = None,
        max_global_batch: int | None = None,
        interval: int = 10,
        quantum: int = 1,
        max_change: float = float("inf"),
        accumulate: int = 1,
        lr_rule: str = "none",
        process_group: dist.ProcessGroup | None = None,
        events: str | os.PathLike[str] | None = None,
        replay: str | os.PathLike[str] | None = None,
        learn: bool | LiveConfig = False,
        guard: bool | None = None,
    ) -> None:
        check_counts(batch_size=batch_size, interval=interval, accumulate=accumulate, quantum=quantum)
        together = dist.is_available() and dist.is_initialized()
        self.group = (process_group or dist.group.WORLD) if together else None
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.world_size = dist.get_world_size(self.group) if self.group else 1
        self.bounds = Bounds.of(
            self.world_size,
            per_rank("min_batch_size", 1 if min_batch_size is None else min_batch_size, self.world_size),
            per_rank("max_batch_size", 8 * batch_size if max_batch_size is None else max_batch_size, self.world_size),
            total_low=min_global_batch,
            total_high=max_global_batch,
            quantum=quantum,
            max_change=max_change,
        )
        self.policy = policy_of(policy, learn=learn)
        self._asked = watched(self.policy, guard)
        start = starting_sizes(batch_size, self.bounds)
        self.interval, self.accumulate, self.lr_rule = interval, accumulate, lr_rule
        self.base_batch = int(start.sum()) * accumulate
        self._rule = rule(lr_rule)
        self._per_epoch = boundary(self.policy) == "epoch"
        self._allocations = Allocations(start)
        self._source: BatchSampler | Stream | None = None
        replayed = None if replay is None else recorded(replay)
        control = None
        if self.group is not None:
            name = policy if isinstance(policy, str) else type(policy).__name__
            same = [name, self.base_batch, interval, accumulate, lr_rule, quantum, sorted(replayed or {}), learn, guard]
            control = open_control_group(self.group, [*same, self.bounds.low.tolist(), self.bounds.high.tolist()])
        decider = self._decider = Decider(
            self._asked,
            self.bounds,
            base_batch=self.base_batch,
            accumulate=accumulate,
            slack=0 if self._per_epoch else accumulate,
            replay=replayed,
            events=EventLog(events) if events is not None and self.rank == 0 else None,
        )
        self._channel = open_channel(control, self.world_size, decider, lr_rule=lr_rule)
        self._progress = Progress()
        self._recorder = Recorder(torch.device("cpu"))
        self._loss_weight = LossWeight(self.group, accumulate)
        self._attached: Attached | None = None
        self._memory: Memory | None = None
        self._learning_rate: LearningRate | None = None
        self._pairs: ConsecutiveNoise | None = None
        self._schedules: list[SampleSchedule] = []
        self._waiting = Waiting()
        self.overhead_s = 0.0

    # ------------------------------------------------------------ setting up

    def batch_sampler(
        self,
        dataset: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        partition: Literal["stream", "contiguous"] = "stream",
    ) -> BatchSampler:
        """A sampler for `DataLoader(dataset, batch_sampler=...)`: unequal shares, every sample once per epoch.

        partition   "stream": all ranks read one shared order. "contiguous": each rank reads a region of its own, cut by
                    share at every epoch (DBS's data partition, local disks); any policy then decides once per epoch.

        Give the loader a `generator=` of its own if resumed runs must repeat random numbers exactly. Raises
        `ConfigError` when the data set is smaller than one global step.
        """
        if partition == "contiguous" and not self._per_epoch:
            self._per_epoch, self._decider.slack = True, 0  # regions are cut once per epoch, so decisions are too
        self._bound_by(len(dataset))
        sampler = BatchSampler(
            len(dataset),
            self._allocations,
            rank=self.rank,
            world_size=self.world_size,
            seed=seed,
            shuffle=shuffle,
            accumulate=self.accumulate,
            partition=partition,
            low=self.bounds.low,
            high=self.bounds.high,
            before_issue=self._before_issue,
        )
        return self._adopt(sampler)

    def stream(
        self,
        iterable: Iterable[Any],
        *,
        sharded: bool = False,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> Stream:
        """Batches cut from an iterable data set in the main process; see `dynamix.data.Stream` for the guarantees.

        sharded   False: every rank iterates the same global stream. True: each rank iterates its own.
        """
        stream = Stream(
            iterable,
            self._allocations,
            rank=self.rank,
            world_size=self.world_size,
            sharded=sharded,
            collate_fn=collate_fn,
            accumulate=self.accumulate,
            low=self.bounds.low,
            high=self.bounds.high,
            before_issue=self._before_issue,
            agree=self._loss_weight.sum_async if self.group else None,
        )
        return self._adopt(stream)

    def wrap(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        hook: Callable[[Any, Any], Any] | None = None,
        hook_state: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        weighting: Literal["hook", "loss"] = "hook",
        batchnorm: Literal["rank0", "weighted"] = "rank0",
    ) -> Model:
        """Connect a model and its optimizer; returns the same model. Call it once, after DDP or `fully_shard`.

        hook, hook_state   DDP communication hook to run after weighting (fp16, bf16, PowerSGD, your own)
        scaler             AMP's GradScaler, so that norms are measured without the loss scale
        weighting          "hook": gradients are weighted in DDP's hook, the loop stays as it is. "loss": the loop calls
                           `controller.weight(loss).backward()`; required for SyncBatchNorm and FSDP
        batchnorm          DDP's buffers before each forward: "rank0" broadcasts, "weighted" averages by samples

        Raises `UsageError` naming the reason when the model needs the loss side or already has a hook.
        """
        if self._attached is not None:
            raise UsageError("wrap() was already called; make one Controller per model")
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._recorder = Recorder(device)
        self._attached = attach(
            model,
            self.group,
            share=self._share,
            recorder=self._recorder,
            hook=hook,
            hook_state=hook_state,
            scaler=scaler,
            weighting=weighting,
            batchnorm=batchnorm,
        )
        self._loss_weight.bind(model, required=weighting == "loss")
        self._memory = Memory(self._attached, optimizer, self._loss_weight, group=self.group)
        note = weakref.WeakMethod(self._samples_now)
        self._exit_note = ExitNote(self.rank, lambda: ask() if (ask := note()) is not None else None)
        self._learning_rate = LearningRate(optimizer, self.lr_rule)
        if self.world_size == 1:
            self._pairs = ConsecutiveNoise()
            optimizer.register_step_pre_hook(self._observe_pair)
        # Not traced: torch.compile(wrap(DDP(...))) would fail in what it does.
        model.register_forward_pre_hook(torch.compiler.disable(self._before_forward))
        self._waiting.give("hook", self._attached)
        self._waiting.give("recorder", self._recorder)
        return model

    def scheduler(self, scheduler: Any, *, nominal_batch_size: int | None = None) -> SampleSchedule:
        """Drive a torch learning-rate scheduler by samples: one `scheduler.step()` per nominal_batch_size of them.

        nominal_batch_size   global samples per scheduler step (None: the global batch at the start)
        """
        schedule = SampleSchedule(scheduler, nominal_batch_size=nominal_batch_size or self.base_batch)
        self._waiting.give(f"schedule {len(self._schedules)}", schedule)
        self._schedules.append(schedule)
        return schedule

    def find_limits(self, step_fn: Callable[[Any], Any], example: Any, *, margin: float = 0.1) -> list[int]:
        """Find the largest micro-batch that fits each rank's memory; from then on no batch is larger. Before training.

        Collective. `step_fn(batch)` must run the forward and backward passes of a step, without the optimizer's, on a
        batch of any size in the structure of `example`: some samples, repeated as needed. It runs on no rank together with
        another and leaves no trace. CUDA's and the CPU allocator's errors are caught; where a control group or a full
        machine would kill, what larger batches take is foreseen from smaller ones.

        margin   part of the largest that is left free, for what training does besides

        Returns the caps (W,), which are in `bounds` now; ranks that can hold less begin with less, the others take over.
        Raises `ConfigError` on every rank when the smallest batch does not fit one, and what `step_fn` raises.
        """
        memory = self._need_memory()
        if self._source is not None and self._source.issued:
            raise UsageError("find_limits() comes before training: call it before the first batch is asked for")
        caps = memory.find(step_fn, example, self.bounds, margin=margin)
        self.bounds = self._decider.bounds = within(self.bounds, caps)
        step = 0
        if self._source is not None:
            self._source.high, step = self.bounds.high, self._source.consumed
        now = self._allocations.at(step)
        if (now > caps).any():
            self._allocations.reset(step, project(now, self.bounds, total=now.sum()))
        return [int(cap) for cap in caps]

    # ------------------------------------------------------------ in the loop

    def backward(self, loss_fn: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """`loss_fn(batch).backward()`, in smaller pieces where memory runs out; returns the loss, detached.

        Collective, once per micro-batch, in place of the loop's own forward and backward passes; not under `no_sync`.
        `loss_fn` takes a part of `batch` in the same structure and returns its mean loss over samples. A rank that runs out
        halves its pieces and tries again; when all ranks have their gradient it crosses them once, through the hook.

        The gradient is that of the whole batch, but for layers that mix samples (batch normalisation sees pieces) and for
        random ones (dropout draws anew). Not for token counts, SyncBatchNorm and FSDP. Raises what `loss_fn` raises (other
        ranks: `DynamixError`), and `MemoryLimitError` where nothing can be tried again.
        """
        memory, plan = self._need_memory(), self._need_source().plan()
        weight = self.weight(torch.ones((), dtype=torch.float64)).item() if self._loss_weight.required else 1.0
        return memory.backward(loss_fn, batch, weight=weight, last=plan.micro == self.accumulate - 1)

    def weight(self, loss: Tensor, *, count: float | Tensor | None = None) -> Tensor:
        """The loss times n_i*W/N, to call `.backward()` on: weighting on the loss side.

        count   divisor of this mean loss if it is not the number of samples (tokens; the sum of class weights). It is
                summed over workers by one small asynchronous all-reduce.
        """
        return self._loss_weight.apply(loss, self._need_source().plan(), self.rank, count)

    def step(
        self,
        *,
        loss: Tensor | None = None,
        logits: Tensor | None = None,
        target: Tensor | None = None,
        count: int | None = None,
    ) -> None:
        """Once per micro-batch, after the optimizer's step (if any): observe; every k steps decide.

        loss, logits, target   of this micro-batch, as observations; may be None. The loss unweighted.
        count                  samples really in this micro-batch, if your collate can drop some: checked
        Never synchronises a device. Raises `WorkerLostError` when another rank is gone.
        """
        began = time.perf_counter()
        source = self._need_source()
        plan = source.plan()
        mine = int(plan.counts[self.rank])
        if count is not None and mine and count != mine:
            raise UsageError(
                f"count={count}, but this rank was given {mine} samples: gradients would be weighted wrongly. Use "
                "controller.weight(loss, count=...).backward() when batches can shrink after sampling"
            )
        if self.world_size > 1 and self._attached is None:
            raise UsageError("call controller.wrap(model, optimizer) before training, or gradients stay unweighted")
        applied = self._loss_weight.take()
        source.consume()
        if mine:
            self._recorder.observe(loss, logits, target)
        if plan.micro < self.accumulate - 1:
            self._recorder.micro_done()
            if self._attached is not None:
                self._attached.micro_done(plan, self.rank, applied)
        else:
            self._step_done(source, plan)
        self.overhead_s += time.perf_counter() - began

    @property
    def batch_sizes(self) -> Ints:
        """Samples per micro-batch of every worker in the coming step, int64 (W,)."""
        step = self._source.consumed if self._source is not None else 0
        return self._allocations.at(step).copy()

    @property
    def samples_seen(self) -> int:
        """Samples trained on so far, by all workers."""
        return self._progress.samples

    def warm_up(self, forward_backward: Callable[[], Any]) -> None:
        """Two discarded forward and backward passes, so that a resumed run sums gradients in the saved run's order.

        DDP rebuilds its buckets after the first step; without this a restarted job at W > 2 differs in the last bits.
        Collective. `forward_backward()` must run the model and `.backward()` on any batch. Buffers, gradients and random
        state are put back.
        """
        if self._attached is None:
            raise UsageError("call controller.wrap(model, optimizer) before warm_up()")
        saved = random_state.capture()
        with self._attached.discarded(), self._loss_weight.paused():
            for _ in range(2):
                forward_backward()
        random_state.restore(saved)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from here: call it between optimizer steps. Includes the sampler and this rank's RNG."""
        self._settle()
        return {
            "schema": STATE_SCHEMA,
            "world_size": self.world_size,
            "rank": self.rank,
            "allocations": self._allocations.state_dict(),
            "source": None if self._source is None else self._source.state_dict(),
            "policy": self._asked.state_dict(),
            "noise_scale": self._decider.noise_scale.state_dict(),
            **self._progress.state_dict(),
            "base_batch": self.base_batch,
            "accumulate": self.accumulate,
            "recorder": self._recorder.state_dict(),
            "schedules": [schedule.state_dict() for schedule in self._schedules],
            "hook": None if self._attached is None else self._attached.state_dict(),
            "rng": random_state.capture(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state saved by this or another world size, before or after `batch_sampler` and `wrap`.

        At another world size the global batch is kept and split evenly; no sample is lost or repeated. Random state is
        restored where rank and world size are the same, once the loader's iterator exists.
        """
        if state.get("schema") != STATE_SCHEMA:
            raise StateError(f"controller state has schema {state.get('schema')!r}, this version reads {STATE_SCHEMA}")
        self._progress.load_state_dict(state)
        self.base_batch = self._decider.base_batch = state["base_batch"]
        self._decider.noise_scale.load_state_dict(state["noise_scale"])
        anew = resume_allocations(self._allocations, state, self.bounds, self.accumulate)
        if anew is not None:
            self._progress.opens = anew
        parts = {"source": state["source"], "hook": state["hook"]}
        parts |= {f"schedule {i}": saved for i, saved in enumerate(state["schedules"])}
        if state["world_size"] == self.world_size:
            self._asked.load_state_dict(
                state["policy"] if isinstance(self._asked, Guard) else unguarded(state["policy"])
            )
            self._recorder.load_state_dict(state["recorder"])
            parts["recorder"] = state["recorder"] if self._attached is None else None
            parts["rng"] = state["rng"] if state["rank"] == self.rank else None
        elif isinstance(self.policy, LearningPolicy):
            self.policy.carry_over(unguarded(state["policy"]))
        self._waiting = Waiting(parts)
        self._waiting.give("source", self._source)
        self._waiting.give("hook", self._attached)
        for i, schedule in enumerate(self._schedules):
            self._waiting.give(f"schedule {i}", schedule)

    def close(self) -> None:
        """Finish a pending decision and close the events file. Optional; safe to call twice."""
        try:
            self._settle()
        finally:
            self._channel.drain()
            time.sleep(0.005)  # lets backend threads drop our callbacks: they need the GIL a group's destructor holds
            if self._decider.events is not None:
                self._decider.events.close()

    # ------------------------------------------------------------ the agreement

    def _step_done(self, source: BatchSampler | Stream, plan: StepPlan) -> None:
        """An optimizer step is over: take what was decided, and close the window if it is full."""
        progress, step_samples = self._progress, int(plan.group.sum())
        progress.steps += 1
        progress.samples += step_samples
        if self._attached is not None:
            self._attached.step_done()
        first = plan.index + 1 - self.accumulate
        self._recorder.step_done(
            keep=plan.regular and first >= progress.opens,
            first_of_epoch=plan.start == int(plan.group[: plan.micro].sum()),
        )
        for schedule in self._schedules:
            schedule.advance(step_samples)
        self._settle()
        full = plan.last if self._per_epoch else self._recorder.steps >= self.interval
        if full and self._recorder.steps:
            self._close_window(plan, source.issued)

    def _close_window(self, plan: StepPlan, issued: int) -> None:
        sizes, progress = self._allocations.at(plan.index), self._progress
        age = (plan.index + 1 - self._allocations.since(plan.index)) / self.accumulate
        closing = self._decider.closing = Closing(
            progress.window, sizes, plan.index + 1, issued, age, step=progress.steps, samples=progress.samples
        )
        mine = float(sizes[self.rank])
        row = self._recorder.row(issued=issued, count=mine * self.accumulate, weight=mine / float(sizes.sum()))
        if isinstance(self._channel, PeerChannel) and self._memory is not None:
            self._channel.fits = self._memory.fits
        self._channel.send(row, closing)

    def _settle(self) -> None:
        """Take the pending message, if there is one: the agreed wait."""
        if not self._channel.pending:
            return
        message = self._channel.receive()
        self._progress.told(self._decider.closing.consumed + self.accumulate, message.noise, message.signal)
        if message.kind is Kind.NEW:
            if self._source is not None and message.from_step < self._source.issued:
                raise StateError(
                    f"the replayed allocation starts at step {message.from_step}, but {self._source.issued} batches are "
                    "already issued: replay with the same loader settings (num_workers, prefetch_factor) or fewer"
                )
            self._allocations.schedule(message.from_step, message.sizes)
            self._progress.opens = message.from_step
            self._recorder.reset()
        if self._source is not None:
            self._allocations.forget(self._source.consumed)

    def _before_issue(self, step: int) -> None:
        """The sampler is about to plan micro-step `step`: a pending message may concern it."""
        if self._channel.pending and step >= self._decider.closing.issued + self._decider.slack:
            self._settle()

    # ------------------------------------------------------------ helpers

    def _share(self) -> Share:
        """How the gradient now being reduced is weighted."""
        plan = self._need_source().plan()
        total = float(plan.group.sum()) / self.accumulate
        # Agreed values only: what is pending here may be settled on another rank, and all must reduce alike.
        open_from = max(self._progress.opens, self._decider.closing.consumed + self.accumulate)
        kept = plan.regular and plan.index - plan.micro >= open_from
        return Share(float(plan.counts[self.rank]), total, kept, self._loss_weight.applied)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        source = self._source
        if not (module.training and torch.is_grad_enabled()) or source is None or source.issued == source.consumed:
            self._recorder.timer.interrupted()
            return
        if self._recorder.muted:
            return
        if self._attached is not None:
            self._attached.before_forward()
        self._recorder.timer.forward_started()
        if self._learning_rate is not None:
            plan = self._need_source().plan()
            noise, signal = self._progress.noise_at(plan.index)
            self._learning_rate.factor = self._rule(
                float(plan.group.sum()) / self.base_batch, noise, signal, base_batch=self.base_batch
            )

    def _observe_pair(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._pairs is None or self._attached is None or self._source is None:
            return
        plan = self._source.plan()
        self._recorder.gradients_ready()
        self._recorder.reduced()
        self._attached.before_optimizer(plan, self.rank, self._loss_weight.applied)
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        pair = self._pairs.observe([g for g in gradients if not g.is_sparse], float(plan.group.sum()))
        if pair is not None:
            self._recorder.add("pair_noise", pair[0])
            self._recorder.add("pair_signal", pair[1])

    def _bound_by(self, samples: int) -> None:
        """No global step may outgrow the data set: every step would be a tail, and no window would ever close."""
        quantum = self.bounds.quantum
        most = max(samples // self.accumulate // quantum * quantum, int(np.max(self.bounds.total_low)))
        total_high = np.minimum(self.bounds.total_high, most)
        self.bounds = self._decider.bounds = dataclasses.replace(self.bounds, total_high=total_high)

    def _adopt(self, source: Source) -> Source:
        if self._source is not None:
            raise UsageError("this controller already has a batch sampler or stream; make one Controller per loop")
        source.on_first_issue = self._restore_rng
        self._waiting.give("source", source)
        self._source = source
        return source

    def _restore_rng(self) -> None:
        """Iterators draw seeds when they are made; the saved random state goes back once that has happened."""
        if (saved := self._waiting.take("rng")) is not None:
            random_state.restore(saved)

    def _need_memory(self) -> Memory:
        if self._memory is None:
            raise UsageError("call controller.wrap(model, optimizer) before find_limits() and backward()")
        return self._memory

    def _samples_now(self) -> int | None:
        """What this rank is working on, for the note on an out-of-memory error."""
        source = self._source
        return int(source.plan().counts[self.rank]) if source is not None and source.issued > source.consumed else None

    def _need_source(self) -> BatchSampler | Stream:
        if self._source is None:
            raise UsageError(
                "make a sampler or a stream first: controller.batch_sampler(dataset) or controller.stream(...)"
            )
        return self._source
