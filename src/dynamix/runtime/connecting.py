"""Connects a model and its optimizer to a job, and checks and measures them before training."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynamix.errors import UsageError
from dynamix.projection import project
from dynamix.runtime import random_state
from dynamix.runtime.check.advice import WRAP_ONCE
from dynamix.runtime.check.unreached import replaced
from dynamix.runtime.job import TrainingJob
from dynamix.runtime.memory.limits import within
from dynamix.runtime.sync.collectives import require_sums
from dynamix.runtime.sync.ddp import attach, attach_both
from dynamix.runtime.sync.gradients import Around
from dynamix.runtime.sync.local_sgd import attach_apart
from dynamix.runtime.sync.other_reductions import require_own_reduction
from dynamix.runtime.sync.sharded import attach_sharded
from dynamix.runtime.sync.shards import Shards, is_fully_sharded, refuse_fsdp1
from dynamix.runtime.sync.sync import Options, Sync
from dynamix.window import Bounds


def connect(job: TrainingJob, model: nn.Module, optimizer: Optimizer, options: Options) -> None:
    """`Controller.wrap`."""
    group = job.loss_weight.group
    require_pair(model, optimizer, group)
    refuse_fsdp1(model)
    apart = job.facts.sync_schedule.steps_apart
    if isinstance(model, DistributedDataParallel):
        require_own_reduction(model, options.weighting, apart=apart)
    if options.averaging is not None and not apart:
        fix = "write Controller(meet='parameters'), or leave averaging= out"
        raise UsageError(f"wrap(averaging=...) averages models, but with meet='gradients' none are averaged: {fix}")
    if apart or options.batchnorm == "weighted":
        require_sums(model.named_buffers())
    if job.most_of_piece is not None or apart:
        require_own_passes(model, group, apart=apart)
    if job.loop.add_optimizer(model, optimizer):
        job.add_optimizer(optimizer, next(known for known in job.models if known.model is model))
        return
    first = not job.models
    for weighting in () if first else (job.loss_weight.weighting, options.weighting):
        if weighting != "hook":
            one = f"wrap(weighting='{weighting}') serves one model, because a batch's loss gets its weight once"
            raise UsageError(f"{one}: use weighting='hook' for several")
    with job.loop.connecting():
        connected = _attach(job, model, optimizer, options)
    if first:
        if group is not None and is_fully_sharded(model) and (shards := Shards.of(model)) is not None:
            _require_held_shares(job.facts.bounds, shards, group)
        job.loss_weight.bind(model, options.weighting)
    job.connect(connected, optimizer)


def _require_held_shares(bounds: Bounds, shards: Shards, group: dist.ProcessGroup) -> None:
    """Raise `UsageError` if shares may change, and a worker's ranks have controllers that decide separately."""
    if shards.spread() > group.size() and (bounds.low != bounds.high).any():
        why = "each worker has several ranks (tensor parallelism), and their controllers decide independently"
        fix = "fix all sizes: Controller(min_batch_size=sizes, max_batch_size=sizes), the same list on every rank"
        raise UsageError(f"{why}, so they could get different batches: {fix}")


def _attach(job: TrainingJob, model: nn.Module, optimizer: Optimizer, options: Options) -> Sync:
    first = not job.models
    if first:
        job.recorder.measure_on(next((p.device for p in model.parameters()), torch.device("cpu")))
    watch = functools.partial(job.loop.connect, model, optimizer)
    in_pieces = job.most_of_piece is not None
    around = Around(job.loss_weight.group, job.ranks, job.recorder, first, job.loss_weight, watch, in_pieces=in_pieces)
    if job.facts.sync_schedule.mixed:
        return attach_both(model, options, around)
    if job.facts.sync_schedule.steps_apart:
        return attach_apart(model, options, around)
    return (attach_sharded if is_fully_sharded(model) else attach)(model, options, around)


def require_pair(model: nn.Module, optimizer: Any, group: dist.ProcessGroup | None) -> None:
    """Raise `UsageError` unless `optimizer` is one optimizer of `model` alone, and `model` reduces over `group`."""
    if isinstance(optimizer, (list, tuple, dict)):
        several = f"wrap() got {len(optimizer)} optimizers in a {type(optimizer).__name__}"
        raise UsageError(f"{several}: {WRAP_ONCE}, and once for each optimizer where one model has several")
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise UsageError(f"wrap() got a {type(optimizer).__name__} where an optimizer belongs: {WRAP_ONCE}")
    own = {id(p) for p in model.parameters()}
    given = [p for of in optimizer.param_groups for p in of["params"]]
    strange = sum(id(p) not in own for p in given)
    if given and own and strange == len(given):
        made = "make the optimizer from model.parameters(), after the model was moved, sharded or replaced"
        raise UsageError(f"the optimizer has no parameter of this model: {made}; {WRAP_ONCE}")
    if strange and group is not None and dist.get_world_size(group) > 1:
        rest = "so this model does not average their gradients"
        one = "put all modules that train together into one module, under one DDP"
        if (why := replaced(model)) is not None:
            raise UsageError(f"{strange} of the optimizer's parameters are not this model's: {why}")
        raise UsageError(f"{strange} of the optimizer's parameters are not this model's, {rest}: {one}, or {WRAP_ONCE}")
    if isinstance(model, DistributedDataParallel) and group is not None:
        theirs, ours = (dist.get_process_group_ranks(g) for g in (model.process_group, group))
        if theirs != ours:
            fix = "write DDP(net, process_group=group) and Controller(process_group=group) with one group"
            raise UsageError(f"DDP averages over ranks {theirs}, but the controller has ranks {ours}: {fix}")


def require_own_passes(model: nn.Module, group: dist.ProcessGroup | None, *, apart: bool) -> None:
    """Raise `UsageError` if a forward pass communicates: with pieces ranks run different numbers of passes."""
    if group is None or dist.get_world_size(group) == 1:
        return
    for module in model.modules():
        if apart and is_fully_sharded(module):
            why = "FSDP spreads the parameters over ranks, so no worker has a model of its own to train"
            raise UsageError(f"local steps do not fit this model: {why}. Use DDP, or meet='gradients'")
        # FSDP2 keeps the gathered parameters from a round's first piece to its last.
        crosses = is_fully_sharded(module) and Shards.of(module) is None
        if crosses or isinstance(module, nn.SyncBatchNorm):
            why = f"{type(module).__name__} communicates in its forward pass, but ranks run unequal numbers of them"
            unfit = "micro_batch= and meet= do not fit this model"
            raise UsageError(f"{unfit}: {why}. Use accumulate= instead")


@contextmanager
def piece(job: TrainingJob) -> Iterator[None]:
    """`Controller.piece`."""
    now = job.need_source().piece()
    with ExitStack() as stack:
        for model in job.models:
            stack.enter_context(model.piece(now))
        yield


def find_limits(job: TrainingJob, step_fn: Callable[[Any], Any], example: Any, *, margin: float) -> list[int]:
    """`Controller.find_limits`."""
    source, facts, windows, memory, workers = job.source, job.facts, job.windows, job.memory, job.allocations.workers
    if memory is None:
        raise UsageError("call controller.wrap(model, optimizer) before find_limits()")
    if source is not None and source.issued:
        raise UsageError("find_limits() comes before training: call it before the first batch is asked for")
    memory.check(margin)
    job.wait_for_all("controller.find_limits()")
    searched = facts.in_pieces() if facts.piece is None else Bounds.of(workers, 1, facts.piece)
    caps = memory.find(step_fn, example, searched, margin=margin)
    if job.most_of_piece is not None:
        job.limit_pieces(int(caps[job.ranks.rank]))
    if facts.piece is None:
        facts.narrow(within(facts.bounds, facts.accumulate * caps, may_fall=facts.may_fall))
        if source is not None:
            source.limit(facts.in_pieces().high)
        now, bounds = windows.batch_sizes, facts.sync_schedule.bounds_of(windows.piece_apart, facts.bounds)
        if (now > bounds.high).any():
            windows.put_in_force(project(now, bounds, total=now.sum()))
    return [int(cap) for cap in caps]


def warm_up(job: TrainingJob, forward_backward: Callable[[], Any]) -> None:
    """`Controller.warm_up`."""
    if not job.models:
        raise UsageError("call controller.wrap(model, optimizer) before warm_up()")
    job.wait_for_all("controller.warm_up()")
    with ExitStack() as stack:
        stack.callback(random_state.restore, random_state.capture())
        for model in job.models:
            stack.enter_context(model.discarded())
        for _ in range(2):
            forward_backward()
