"""How a model and its optimizer come under a controller, and what is found out about them before training."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynamix.errors import ConfigError, UsageError, spelling
from dynamix.projection import project
from dynamix.runtime.check.advice import WRAP_ONCE
from dynamix.runtime.check.unreached import replaced
from dynamix.runtime.job import TrainingJob
from dynamix.runtime.measure.recorder import Recorder, Unmeasured
from dynamix.runtime.memory import Memory, within
from dynamix.runtime.state import random_state
from dynamix.runtime.sync.collectives import require_sums
from dynamix.runtime.sync.connected_model import ConnectedModel, attach
from dynamix.runtime.sync.local_sgd import attach_apart, attach_both
from dynamix.runtime.sync.other_reductions import require_own_reduction
from dynamix.runtime.sync.sharded import attach_sharded
from dynamix.runtime.sync.shards import Shards, is_fully_sharded, refuse_fsdp1
from dynamix.window import Bounds


def connect(
    coordinator: TrainingJob, group: dist.ProcessGroup | None, model: nn.Module, optimizer: Optimizer, **options: Any
) -> bool:
    """`Controller.wrap`, its options being those of `attach`. Whether `model` is the first that is connected."""
    refuse_fsdp1(model)
    require_pair(model, optimizer, group)
    apart = coordinator.steps_apart
    if isinstance(model, DistributedDataParallel):
        require_own_reduction(model, options, apart=apart)
    if options["averaging"] is not None and not apart:
        fix = "write Controller(meet='parameters'), or leave averaging= out"
        raise UsageError(f"wrap(averaging=...) says how models are averaged, but workers meet over gradients: {fix}")
    for name, allowed in (("weighting", ("hook", "loss", "given")), ("batchnorm", ("rank0", "weighted"))):
        if options[name] not in allowed:
            raise ConfigError(name, options[name], " or ".join(allowed), spelling(options[name], allowed))
    if apart or options["batchnorm"] == "weighted":
        require_sums(model.named_buffers())
    if coordinator.micro_batch is not None or apart:
        require_own_passes(model, group, apart=apart)
    if coordinator.loop.add_optimizer(model, optimizer):
        coordinator.add_optimizer(optimizer, model)
        return False
    if coordinator.attached is not None:
        _connect_another(coordinator, group, model, optimizer, options)
        return False
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    attached = _attach(coordinator, model, group, Recorder(device), options)
    if attached.shards is not None and group is not None:
        _require_held_shares(coordinator.job.bounds, attached.shards, group)
    loss_weight = coordinator.loss_weight
    loss_weight.bind(model, options["weighting"])
    memory = Memory(attached, optimizer, loss_weight, group=group, ranks=coordinator.ranks)
    coordinator.connect(model, optimizer, attached, memory)
    return True


def _require_held_shares(bounds: Bounds, shards: Shards, group: dist.ProcessGroup) -> None:
    """Raise `UsageError` where shares may move in one controller of several that must move alike."""
    if shards.spread() > group.size() and (bounds.low != bounds.high).any():
        why = "each worker is several ranks (tensor parallelism), whose controllers decide without each other"
        fix = "hold the shares: Controller(min_batch_size=sizes, max_batch_size=sizes), the same list on every rank"
        raise UsageError(f"{why}, and would deal them unlike batches: {fix}")


def _connect_another(
    coordinator: TrainingJob,
    group: dist.ProcessGroup | None,
    model: nn.Module,
    optimizer: Optimizer,
    options: dict[str, Any],
) -> None:
    """One more model in the same loop: weighted and timed, its norms not measured."""
    for weighting in (coordinator.loss_weight.weighting, options["weighting"]):
        if weighting != "hook":
            why = "the weight of a loss is given once for each batch"
            one = f"wrap(weighting='{weighting}') serves one model, because {why}"
            raise UsageError(f"{one}: use weighting='hook' for several")
    attached = _attach(coordinator, model, group, coordinator.recorder, options)
    if attached.hook is not None:
        attached.hook.meter = Unmeasured(coordinator.recorder)
    coordinator.connect_another(model, optimizer, attached)


def _attach(
    coordinator: TrainingJob,
    model: nn.Module,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
    options: dict[str, Any],
) -> ConnectedModel:
    ranks = coordinator.ranks
    if coordinator.ways is not None:
        require_sums(model.named_buffers())
        return attach_both(model, group, coordinator.share, recorder, ranks, **options)
    if coordinator.steps_apart:
        return attach_apart(model, group, recorder, ranks, **options)
    if is_fully_sharded(model):
        of_fsdp = {name: options[name] for name in ("hook", "scaler", "weighting")}
        return attach_sharded(model, group, coordinator.share, recorder, ranks=ranks, **of_fsdp)
    over_gradients = {name: value for name, value in options.items() if name != "averaging"}
    return attach(model, group, coordinator.share, recorder, ranks=ranks, **over_gradients)


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
    alone = group is None or dist.get_world_size(group) == 1
    if given and own and strange == len(given):
        made = "make the optimizer from model.parameters(), after the model was moved, sharded or replaced"
        raise UsageError(f"the optimizer has no parameter of this model: {made}; {WRAP_ONCE}")
    if strange and not alone:
        rest = "which this model's gradient exchange does not reach"
        one = "put what trains together into one module under one DDP"
        if (why := replaced(model)) is not None:
            raise UsageError(f"{strange} of the optimizer's parameters are not this model's: {why}")
        raise UsageError(f"{strange} of the optimizer's parameters are not this model's, {rest}: {one}, or {WRAP_ONCE}")
    if isinstance(model, DistributedDataParallel) and group is not None:
        theirs, ours = (dist.get_process_group_ranks(g) for g in (model.process_group, group))
        if theirs != ours:
            fix = "write DDP(net, process_group=group) and Controller(process_group=group) with one group"
            raise UsageError(f"DDP reduces over ranks {theirs}, the controller weights for ranks {ours}: {fix}")


def require_own_passes(model: nn.Module, group: dist.ProcessGroup | None, *, apart: bool) -> None:
    """Raise `UsageError` where a forward pass crosses ranks: with pieces they have unlike numbers of passes."""
    if group is None or dist.get_world_size(group) == 1:
        return
    for module in model.modules():
        if apart and is_fully_sharded(module):
            why = "FSDP spreads the parameters over ranks, so no worker has a model of its own to train"
            raise UsageError(f"meet='parameters' does not fit this model: {why}. Use DDP, or meet='gradients'")
        # FSDP2 keeps parameters gathered from a round's first piece to its last.
        crosses = is_fully_sharded(module) and Shards.of(module) is None
        if crosses or isinstance(module, nn.SyncBatchNorm):
            why = f"{type(module).__name__} exchanges in its forward pass, and ranks have unlike numbers of pieces"
            raise UsageError(
                f"micro_batch= and meet='parameters' do not fit this model: {why}. Use accumulate= instead"
            )


@contextmanager
def piece(coordinator: TrainingJob) -> Iterator[None]:
    """`Controller.piece`."""
    with ExitStack() as stack:
        now = coordinator.need_source().piece()
        if now.plan.apart or not now.last:
            for attached in coordinator.connected:
                stack.enter_context(attached.local_passes(by_size=now.by_size))
        for attached in coordinator.connected:
            coordinator.own_gradients.finish(attached, more=True)
        coordinator.loop.in_piece = True
        stack.callback(setattr, coordinator.loop, "in_piece", False)
        yield
        for attached in coordinator.connected:
            coordinator.own_gradients.finish(attached)


def find_limits(coordinator: TrainingJob, step_fn: Callable[[Any], Any], example: Any, *, margin: float) -> list[int]:
    """`Controller.find_limits`."""
    source, job = coordinator.source, coordinator.job
    memory = coordinator.need_memory()
    if source is not None and source.issued:
        raise UsageError("find_limits() comes before training: call it before the first batch is asked for")
    memory.check(margin)
    coordinator.wait_for_all("controller.find_limits()")
    if coordinator.micro_batch is not None and coordinator.ways is None:
        searched = Bounds.of(coordinator.allocations.workers, 1, coordinator.micro_batch)
        caps = memory.find(step_fn, example, searched, margin=margin)
        coordinator.micro_batch = int(caps[coordinator.rank])
        if source is not None:
            source.micro_batch = coordinator.micro_batch
        return [int(cap) for cap in caps]
    caps = memory.find(step_fn, example, job.in_pieces(), margin=margin)
    job.bounds = within(job.bounds, job.accumulate * caps)
    if source is not None:
        source.high = job.in_pieces().high
    now = coordinator.batch_sizes
    piece = coordinator.piece_apart
    if (now > job.bounds_of(piece).high).any():
        coordinator.put_in_force(project(now, job.bounds_of(piece), total=now.sum()))
    coordinator.cap_pieces(int(caps[coordinator.rank]))
    return [int(cap) for cap in caps]


def warm_up(coordinator: TrainingJob, forward_backward: Callable[[], Any]) -> None:
    """`Controller.warm_up`."""
    if coordinator.attached is None:
        raise UsageError("call controller.wrap(model, optimizer) before warm_up()")
    coordinator.wait_for_all("controller.warm_up()")
    with ExitStack() as stack:
        stack.callback(random_state.restore, random_state.capture())
        stack.enter_context(coordinator.loss_weight.paused())
        for attached in coordinator.connected:
            stack.enter_context(attached.discarded())
        for _ in range(2):
            forward_backward()
