"""How a model and its optimizer come under a controller, and what is found out about them before training."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynamix.errors import DynamixError, UsageError
from dynamix.projection import project
from dynamix.runtime import random_state
from dynamix.runtime.apart import attach_apart
from dynamix.runtime.coordinator import Coordinator
from dynamix.runtime.loop import WRAP_ONCE
from dynamix.runtime.memory import Memory, within
from dynamix.runtime.observation import Recorder, Unmeasured
from dynamix.runtime.weighting import Attached, attach, is_sharded
from dynamix.window import Bounds


def connect(
    coordinator: Coordinator, group: dist.ProcessGroup | None, model: nn.Module, optimizer: Optimizer, **options: Any
) -> bool:
    """`Controller.wrap`, its options being those of `attach`. Whether `model` is the first that is connected."""
    require_pair(model, optimizer, group)
    if options["averaging"] is not None and not coordinator.apart:
        fix = "write Controller(meet='parameters'), or leave averaging= out"
        raise UsageError(f"wrap(averaging=...) says how models are averaged, but workers meet over gradients: {fix}")
    if coordinator.micro_batch is not None or coordinator.apart:
        require_own_passes(model, group)
    if coordinator.loop.add_optimizer(model, optimizer):
        coordinator.add_optimizer(optimizer, model)
        return False
    if coordinator.attached is not None:
        _connect_another(coordinator, group, model, optimizer, options)
        return False
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    attached = _attach(coordinator, model, group, Recorder(device), options)
    loss_weight = coordinator.loss_weight
    loss_weight.bind(model, required=options["weighting"] == "loss")
    coordinator.connect(model, optimizer, attached, Memory(attached, optimizer, loss_weight, group=group))
    return True


def _connect_another(
    coordinator: Coordinator,
    group: dist.ProcessGroup | None,
    model: nn.Module,
    optimizer: Optimizer,
    options: dict[str, Any],
) -> None:
    """One more model in the same loop: weighted and timed, its norms not measured."""
    if coordinator.loss_weight.required or options["weighting"] == "loss":
        why = "the weight of a loss is given once for each batch"
        raise UsageError(f"wrap(weighting='loss') serves one model, because {why}: use weighting='hook' for several")
    attached = _attach(coordinator, model, group, coordinator.recorder, options)
    if attached.hook is not None:
        attached.hook.meter = Unmeasured(coordinator.recorder)
    coordinator.connect_another(model, optimizer, attached)


def _attach(
    coordinator: Coordinator,
    model: nn.Module,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
    options: dict[str, Any],
) -> Attached:
    if coordinator.apart:
        ending = None if coordinator.ranks is None else coordinator.ranks.ending
        return attach_apart(model, group, recorder, ending, **options)
    return attach(
        model, group, coordinator.share, recorder, **{name: v for name, v in options.items() if name != "averaging"}
    )


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
    if strange and not alone and not is_sharded(model):
        rest = "which this model's gradient exchange does not reach"
        one = "put what trains together into one module under one DDP"
        raise UsageError(f"{strange} of the optimizer's parameters are not this model's, {rest}: {one}, or {WRAP_ONCE}")
    if isinstance(model, DistributedDataParallel) and group is not None:
        theirs, ours = (dist.get_process_group_ranks(g) for g in (model.process_group, group))
        if theirs != ours:
            fix = "write DDP(net, process_group=group) and Controller(process_group=group) with one group"
            raise UsageError(f"DDP reduces over ranks {theirs}, the controller weights for ranks {ours}: {fix}")


def require_own_passes(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise `UsageError` where a forward pass crosses ranks: with pieces they have unlike numbers of passes."""
    if group is None or dist.get_world_size(group) == 1:
        return
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) or is_sharded(module):
            why = f"{type(module).__name__} exchanges in its forward pass, and ranks have unlike numbers of pieces"
            raise UsageError(
                f"micro_batch= and meet='parameters' do not fit this model: {why}. Use accumulate= instead"
            )


@contextmanager
def piece(coordinator: Coordinator) -> Iterator[None]:
    """`Controller.piece`."""
    with ExitStack() as stack:
        if coordinator.apart or not coordinator.need_source().piece().last:
            for model in (attached.model for attached in coordinator.connected):
                if callable(requires := getattr(model, "set_requires_gradient_sync", None)):  # FSDP2
                    requires(False)
                    stack.callback(requires, True)
                elif callable(no_sync := getattr(model, "no_sync", None)):
                    stack.enter_context(no_sync())
        for attached in coordinator.connected:
            coordinator.finish_gradients(attached, more=True)
        yield
        for attached in coordinator.connected:
            coordinator.finish_gradients(attached)


def backward(coordinator: Coordinator, loss_fn: Callable[[Any], Tensor], batch: Any) -> Tensor:
    """`Controller.backward`."""
    if coordinator.micro_batch is not None:
        cut = f"backward() cuts batches where memory runs out, micro_batch={coordinator.micro_batch} before that"
        raise UsageError(f"{cut}: leave one of them out; find_limits() finds what fits a piece")
    memory, piece = coordinator.need_memory(), coordinator.need_source().piece()
    loss_weight = coordinator.loss_weight
    weight = 1.0
    if loss_weight.required:
        try:
            weight = loss_weight.apply(torch.ones((), dtype=torch.float64), piece, None).item()
        except DynamixError as error:
            coordinator.fail(error)
            raise
    coordinator.agree_once()  # before a rank can run out of memory alone
    coordinator.loop.forwards += 1  # its passes need not go through the model's own call
    return memory.backward(loss_fn, batch, weight=weight, last=piece.last)


def find_limits(coordinator: Coordinator, step_fn: Callable[[Any], Any], example: Any, *, margin: float) -> list[int]:
    """`Controller.find_limits`."""
    source, job = coordinator.source, coordinator.job
    memory = coordinator.need_memory()
    if source is not None and source.issued:
        raise UsageError("find_limits() comes before training: call it before the first batch is asked for")
    if coordinator.micro_batch is not None:
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
    if (now > job.bounds.high).any():
        coordinator.put_in_force(project(now, job.bounds, total=now.sum()))
    return [int(cap) for cap in caps]


def warm_up(coordinator: Coordinator, forward_backward: Callable[[], Any]) -> None:
    """`Controller.warm_up`."""
    if coordinator.attached is None:
        raise UsageError("call controller.wrap(model, optimizer) before warm_up()")
    saved = random_state.capture()
    with ExitStack() as stack:
        stack.enter_context(coordinator.loss_weight.paused())
        for attached in coordinator.connected:
            stack.enter_context(attached.discarded())
        for _ in range(2):
            forward_backward()
    random_state.restore(saved)
