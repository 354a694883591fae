"""The virtual clock: real training in one process, with times of simulated workers."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from dynamix.data import BatchSampler, Round
from dynamix.data.lengths import Lengths, costs_by_length
from dynamix.errors import ConfigError
from dynamix.events.records import EventLog
from dynamix.policies import Policy
from dynamix.runtime import random_state
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.channel import InPlace
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.facts.job_facts import ClosedWindow, JobFacts, Message
from dynamix.runtime.job import TrainingJob
from dynamix.runtime.limits import check_counts
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.ranks.ranks import Alone
from dynamix.runtime.rate.budget import Budget
from dynamix.runtime.rate.scaling import SampleSchedule
from dynamix.runtime.sync.loss_weight import LossWeight
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds, Floats, Ints
from dynamix_lab.simulator.clusters import Clusters
from dynamix_lab.simulator.env import ClusterEnv
from dynamix_lab.simulator.rounds import RoundApart
from dynamix_lab.virtual.arguments import (
    check_meeting,
    check_model,
    costs_of,
    limits_of,
    loader_of,
)
from dynamix_lab.virtual.replicas import Replicas
from dynamix_lab.virtual.run import Snapshot, Step, VirtualRun
from dynamix_lab.virtual.union_gradient import Indices, UnionGradient
from dynamix_lab.virtual.workers import Shares, VirtualWorkers, one_world


class VirtualCluster:
    """Real model, data, gradients and accuracy in this process; time from one simulated cluster of W workers.

    The applied gradient is the weighted all-reduce's (`UnionGradient`). With meet="parameters" there is none: replicas
    of model and optimizer take local steps and are averaged (`Replicas`). `model` and `optimizer` are the first
    worker's, and a "step" of this class is a round. With meet="auto" both occur. Sample order, windows, the moment at
    which a decision applies, learning-rate rules and events.jsonl come from a live job's code. The same allocations
    give the same losses within float error, or with dropout losses of the same kind, because all masks come from one
    stream instead of one per rank. Evaluation and data loading take no time on this clock, and decisions take none
    unless the world says so (`ClusterEnv.decided`).

    model, optimizer   as for one process (no DDP)
    loss               loss(model(inputs), target): mean over the batch
    dataset            items (inputs, target); indexable, with a length
    clusters           one simulated cluster (`Clusters` with C=1), or its `ClusterEnv`, which also sets the decision's
                       delay and continues from its present state
    batch_size         samples per worker at the start
    bounds             (W,) of the batch sizes; None: 1 to 8 * batch_size, limited by the simulated memory
    policy, interval, lr_rule, rate_for, collate_fn   as in `Controller` and DataLoader
    seed               of the sample order, of all random numbers of training, and of a world made from `Clusters`
    sample_costs       (n,) extra cost of each sample of `dataset`, e.g. its tokens; a world with such costs then
                       charges each worker for its own samples (`ClusterEnv.charge`)
    lengths, padded    as in `Controller.batch_sampler`: what the job knows of `sample_costs`, or of anything else
    meet               "gradients", "parameters" or "auto", as in `Controller`
    micro_batch        most samples that pass through the model at once. It only limits memory, so with BatchNorm shares
                       are never cut. With meet="parameters" it is the piece, as in `Controller`: the samples of an
                       optimizer step, fewer if the simulated memory holds fewer
    rounds             unless meet="gradients": "fixed", each round (with "auto" each step of all workers) has the first
                       one's samples, `batch_size` a worker; or "adaptive", measurements set their number, as with
                       global_batch="adaptive" live
    averaging          unless meet="gradients": how models are averaged, as in `Controller.wrap`
    events             file that gets one JSON line per window; `time_s` is the virtual clock's
    replay             events file of an earlier run, live or virtual, whose allocations are applied; policy and
                       interval must be that run's, so that windows close at the same steps

    Raises `ConfigError` for impossible values.

    >>> from dynamix_lab.simulator import sample_clusters
    >>> data = torch.utils.data.TensorDataset(torch.randn(640, 3), torch.zeros(640, 1))
    >>> net = nn.Linear(3, 1)
    >>> cluster = VirtualCluster(
    ...     net, torch.optim.SGD(net.parameters(), lr=0.1), nn.functional.mse_loss, data,
    ...     clusters=sample_clusters(1, 8, seed=0), policy="lb_bsp", batch_size=4, interval=5)
    >>> run = cluster.run(steps=40)
    >>> run.counts.sum(1).tolist() == [32] * 40, bool(run.loss[-1] < run.loss[0]), cluster.samples_seen
    (True, True, 1280)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor],
        dataset: Any,
        *,
        clusters: Clusters | ClusterEnv,
        policy: str | Policy = "dynamix",
        batch_size: int = 128,
        bounds: Bounds | None = None,
        interval: int | Literal["auto"] = 5,
        lr_rule: str = "auto",
        rate_for: int | None = None,
        seed: int = 0,
        sample_costs: ArrayLike | None = None,
        lengths: Lengths | None = None,
        padded: bool = False,
        meet: Literal["gradients", "parameters", "auto"] = "gradients",
        micro_batch: int = 1024,
        rounds: Literal["fixed", "adaptive"] = "fixed",
        averaging: Averaging | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        events: str | os.PathLike[str] | None = None,
        replay: str | os.PathLike[str] | None = None,
    ) -> None:
        check_counts(batch_size=batch_size, micro_batch=micro_batch)
        check_model(model, optimizer)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            fix = "read an iterable data set into a list first"
            raise ConfigError("dataset", type(dataset).__name__, "one with a length and indices", fix)
        check_meeting(meet, rounds, averaging)
        self.world, apart = one_world(clusters, seed), meet == "parameters"
        adaptive = meet == "gradients" or rounds == "adaptive"  # with gradients, bounds also limit the global batch
        config = JobConfig(
            self.world.clusters.shape[1],
            policy,
            batch_size,
            "adaptive" if adaptive else "fixed",
            limits_of(bounds, self.world.clusters, batch_size, apart=apart, adaptive=adaptive),
            interval,
            micro_batch=micro_batch if apart else None,
            meet=meet,
            lr_rule=lr_rule,
            rate_for=rate_for,
            replay=replay,
            guard=False,
            clock=lambda: 0.0,
        )
        self.policy = config.served
        self._sample_costs = None if sample_costs is None else costs_of(sample_costs, len(dataset))
        self._workers = VirtualWorkers(self.world)
        self.model, self.optimizer, self.interval = model, optimizer, interval
        load = loader_of(dataset, collate_fn)
        self._union = None if apart else UnionGradient(model, loss, load, micro_batch=micro_batch)
        self._replicas: Replicas | None = None
        if meet != "gradients":
            recorders, how = self._workers.recorders, averaging or Averaging()
            self._replicas = Replicas(
                model,
                optimizer,
                loss,
                load,
                recorders=recorders,
                averaging=how,
                at_times=meet == "auto",
            )
        # A delay above one step is what a loader's workers prefetch: steps issued with the old allocation.
        ahead = max(self.world.delay - 1, 0) if config.slack else 0
        facts = JobFacts(config, slack=min(config.slack, self.world.delay), ahead=ahead)
        facts.limit_to(len(dataset))
        self._events = None if events is None else EventLog(events)
        clock = self._workers.time.mark
        decider = _ForAll(self.policy, facts, replay=config.replayed, events=self._events, clock=clock)
        self._recorder, alone = _AllRecorders(self._workers, facts), Alone()
        self._job = TrainingJob(
            config,
            facts,
            InPlace(alone, decider),
            LossWeight(None, 1),
            alone,
            recorder=self._recorder,
            payload=lambda: 1.0 if self._replicas is None else self._replicas.payload,
        )
        for each in (optimizer,) if self._replicas is None else self._replicas.optimizers:
            self._job.rates.add(each)
        one_total = bool(config.bounds.total_low == config.bounds.total_high)
        costs = costs_by_length(lengths, padded, len(dataset), apart=meet != "gradients", fixed=one_total)
        whole = {**self._job.of_source(), "micro_batch": None}  # all workers' shares of a round together
        self._sampler = BatchSampler(len(dataset), self._job.allocations, seed=seed, costs=costs, **whole)
        self._job.feed(self._sampler)
        self._rng = random_state.capture()
        with self._own_random():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)

    @property
    def bounds(self) -> Bounds:
        """The bounds of batch sizes, samples per step or round."""
        return self._job.facts.bounds

    @property
    def base_batch(self) -> int:
        """Samples per optimizer step of all workers at the start."""
        return self._job.facts.base_batch

    @property
    def time_s(self) -> float:
        """The virtual clock, seconds since this cluster was made."""
        return self._workers.time.now_s

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._job.progress.steps

    @property
    def samples_seen(self) -> int:
        """Samples trained so far by all workers."""
        return self._job.progress.samples

    @property
    def batch_sizes(self) -> Ints:
        """Samples of every worker in the next step, int64 (W,)."""
        return self._job.windows.batch_sizes

    def scheduler(self, scheduler: Any, *, nominal_batch_size: int | None = None) -> SampleSchedule:
        """Drive a torch learning-rate scheduler by samples, as `Controller.scheduler` does."""
        return self._job.schedule(scheduler, nominal_batch_size)

    def budget(self, samples: int, *, count: str = "progress") -> Budget:
        """How much is to be trained, as in `Controller.budget`."""
        return self._job.rates.spend(self._sampler, samples, count=count)

    def run(
        self,
        steps: int | None = None,
        *,
        snapshot_samples: int | None = None,
        score: Callable[[nn.Module], float] | None = None,
        until: Callable[[Snapshot], bool] | None = None,
    ) -> VirtualRun:
        """Train until `steps` more optimizer steps are done or `until` is true for a snapshot.

        snapshot_samples   take a snapshot each time this many more samples are trained
        score              scores the model at a snapshot, in eval mode and without gradients; off the clock
        Raises `ConfigError` if nothing would end the run, and `DynamixError` as in a live run.
        """
        if steps is None and until is None:
            raise ConfigError("steps", None, "1 or more", "say how many steps, or give until=")
        if until is not None and snapshot_samples is None:
            raise ConfigError("snapshot_samples", None, "1 or more where until= is given", "until looks at snapshots")
        given = {"steps": steps, "snapshot_samples": snapshot_samples}
        check_counts(**{name: value for name, value in given.items() if value is not None})
        every = snapshot_samples or 0
        due = (self.samples_seen // every + 1) * every if every else 0
        done, snapshots = list[Step](), list[Snapshot]()
        for step in self._all_epochs():
            done.append(step)
            if every and self.samples_seen >= due:
                due = (self.samples_seen // every + 1) * every
                snapshots.append(self._snapshot(score))
                if until is not None and until(snapshots[-1]):
                    break
            if len(done) == steps:
                break
        return VirtualRun.of(done, snapshots)

    def close(self) -> None:
        """Close the events file and remove the hooks from the optimizer, as the end of `with` does. Safe to repeat."""
        self._job.windows.settle()
        if self._events is not None:
            self._events.close()
        self._job.rates.job_ends()

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _all_epochs(self) -> Iterator[Step]:
        """One optimizer step per iteration, epoch after epoch, for ever."""
        while True:
            yield from map(self._step, self._sampler)

    def _step(self, placeholder: Indices) -> Step:
        hand, job = self._sampler.piece(), self._job
        coming = hand.round
        job.rates.follow(coming)
        shares = self._sampler.shares()
        apart: RoundApart | None = None
        global_sq: float | None = None
        with self._own_random():
            if coming.apart and self._replicas is not None:
                most = self._workers.most(coming.piece)
                begins, follow = functools.partial(job.rates.part_done, coming), job.rates.follow_piece
                seen, apart = self._replicas(shares, most=most, whole=coming.piece, begins=begins, follow=follow)
            elif self._union is not None:
                norms = self._workers.norms_due()
                seen = self._union(shares, placeholder=placeholder, norms=norms)
                global_sq = self._union.norm_sq() if norms else None
                if self._workers.count == 1:
                    job.pairs.observe(self._union.parameters, coming.samples, coming)
                if self._replicas is not None:
                    self._replicas.together()
                self.optimizer.step()
                self.optimizer.zero_grad()
        costs = self._sample_costs
        charged = None if costs is None else np.array([costs[share].sum() for share in shares])
        busy_s, whole_s = self._workers.spend(coming, charged, apart)
        self._recorder.saw(coming, busy_s, whole_s, seen, global_sq)
        self._sampler.consume()
        job.round_done(hand)
        if job.windows.pending:  # this step closed a window
            self.world.decided()
        loss = sum(piece.loss * piece.samples for pieces in seen for piece in pieces) / float(coming.samples)
        return Step(self.time_s, whole_s, busy_s, coming.counts[0], loss, coming.piece)

    def _snapshot(self, score: Callable[[nn.Module], float] | None) -> Snapshot:
        value = float("nan")
        if score is not None:
            modes = {module: module.training for module in self.model.modules()}
            self.model.eval()
            try:
                with torch.no_grad():
                    value = float(score(self.model))
            finally:
                for module, training in modes.items():
                    module.training = training
        return Snapshot(self.steps, self.samples_seen, self.time_s, value)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Training uses its own generators, so that scoring or a second cluster does not change it."""
        outside = random_state.capture()
        random_state.restore(self._rng)
        try:
            yield
        finally:
            self._rng = random_state.capture()
            random_state.restore(outside)


class _AllRecorders(Recorder):
    """All workers' recorders as one; its row is all their rows (W, n)."""

    def __init__(self, workers: VirtualWorkers, facts: JobFacts) -> None:
        super().__init__(torch.device("meta"))
        self._workers, self._facts = workers, facts
        self._of_step: tuple[Round, Floats, float, Shares, float | None]  # the arguments of `VirtualWorkers.record`

    def saw(self, done: Round, busy_s: Floats, whole_s: float, seen: Shares, global_sq: float | None) -> None:
        """Set the observations of all workers for the step that is about to be recorded."""
        self._of_step = done, busy_s, whole_s, seen, global_sq

    def add(self, name: str, value: Tensor | float, *, part: int = 0, weight: float = 1.0) -> None:
        self._workers.recorders[0].add(name, float(value), part=part, weight=weight)

    def step_done(
        self, *, keep: bool, first_of_epoch: bool, scale: float = 1.0, dealt: tuple[float, float] | None = None
    ) -> None:
        self._workers.record(*self._of_step, keep=keep, first_of_epoch=first_of_epoch)
        self.steps = self._workers.recorders[0].steps

    def row(self, *, issued: int, **of_one_rank: Any) -> Floats:
        return self._workers.rows(self._facts.closing.sizes, issued=issued)

    def reset(self) -> None:
        self.steps = 0
        self._workers.reset()


class _ForAll(Decider):
    """Decides in place: the one row that `InPlace` stacks holds all workers' rows, (1, W, n)."""

    def decide(self, rows: Floats, closing: ClosedWindow | None = None) -> Message:
        return super().decide(rows[0], closing)
