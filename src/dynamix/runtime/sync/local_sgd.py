"""How a model is connected whose workers step apart and meet over parameters: nothing crosses ranks in its passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from dynamix.errors import UsageError
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.ranks.process_groups import new_gloo_group
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.sync.collectives import Workers, broadcast_
from dynamix.runtime.sync.compare import require_alike
from dynamix.runtime.sync.connected_model import ConnectedModel, attach
from dynamix.runtime.sync.gradients import GradientWeight
from dynamix.runtime.sync.parameter_averaging import Averaging, ParameterAveraging

_PIECE = (
    "put the forward and backward passes under `with controller.piece():`, and other passes of the DDP model, such as "
    "evaluation, under torch.no_grad()"
)


def attach_apart(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
    ranks: Ranks,
    *,
    averaging: Averaging | None,
    scaler: Any,
    **options: Any,
) -> ConnectedModel:
    """Connect a model whose workers step apart, plain or under DDP; all begin as the first rank's. A collective call.

    `options` are the others of `Controller.wrap`, of which none fits. Raises `UsageError` naming what the model needs.
    """
    for name, usual in (("hook", None), ("weighting", "hook"), ("batchnorm", "rank0")):
        if options.get(name, usual) != usual:
            given = f"wrap({name}={options[name]!r}) is about meeting over gradients"
            fix = "leave it out: with meet='parameters' moves and buffers are averaged by samples; see averaging="
            raise UsageError(f"{given}: {fix}")
    return _meeting(_silent(model, recorder, ranks), group, recorder, ranks, averaging or Averaging(), scaler)


def attach_both(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    share: Callable[[], GradientWeight],
    recorder: Recorder,
    ranks: Ranks,
    *,
    averaging: Averaging | None,
    scaler: Any,
    weighting: str,
    **options: Any,
) -> ConnectedModel:
    """Connect a model whose workers meet over gradients or over parameters, as each round's plan says.

    The arguments are `Controller.wrap`'s. A collective call. Raises `UsageError` naming what the model needs.
    """
    how = averaging or Averaging()
    if weighting != "hook":
        fix = "leave it out, or say meet='gradients'"
        raise UsageError(f"wrap(weighting={weighting!r}) weighs losses, which workers that step apart do not do: {fix}")
    alone = group is None or group.size() == 1
    if not alone and not isinstance(model, DistributedDataParallel):
        fix = "controller.wrap(DistributedDataParallel(net), optimizer)"
        raise UsageError(f"meet='auto' needs DDP, because gradients meet in some rounds: write {fix}")
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        fix = "leave static_graph out, or say meet='gradients'"
        raise UsageError(f"DDP(static_graph=True) expects the same in every pass, but rounds differ: {fix}")
    attached = attach(model, group, share, recorder, scaler=scaler, weighting="hook", ranks=ranks, **options)
    return _meeting(attached, group, recorder, ranks, how, scaler, at_times=True)


def _silent(model: nn.Module, recorder: Recorder, ranks: Ranks) -> ConnectedModel:
    """A model, perhaps under DDP, in whose passes nothing crosses ranks."""
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        first = "pass a batch through it before controller.wrap(model, optimizer)"
        raise UsageError(f"the model has parameters whose shapes are not known yet: {first}")
    attached = ConnectedModel(model, recorder, None, ranks)
    if isinstance(model, DistributedDataParallel):
        _keep_silent(model, attached)
    attached.exchanges = "parameters"
    return attached


def _meeting(
    attached: ConnectedModel,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
    ranks: Ranks,
    how: Averaging,
    scaler: Any,
    *,
    at_times: bool = False,
) -> ConnectedModel:
    """Let the model of `attached` be averaged; it begins as the first rank's."""
    model = attached.model
    own: list[dist.ProcessGroup] = []
    on_cpu = group is None or recorder.device.type == "cpu"
    workers = beside = Workers(group, ranks)
    if not on_cpu:
        own.append(new_gloo_group(dist.get_process_group_ranks(group)))
        beside = Workers(own[-1], ranks)
    if group is not None and group.size() > 1:
        tensors = (*model.named_parameters(), *model.named_buffers())
        kinds = (f"{t.dtype}{'' if t.requires_grad else ', not trained'}" for _, t in tensors)
        words = [f"{name} {list(t.shape)} {kind}" for (name, t), kind in zip(tensors, kinds, strict=True)]
        require_alike(words, beside)
        broadcast_([p.detach() for p in model.parameters()] + [b.detach() for b in model.buffers()], group, ranks)
    attached.meeting = ParameterAveraging(model, how, workers, beside, scaler=scaler, at_times=at_times)
    attached.meeting.groups = own
    return attached


def _keep_silent(model: DistributedDataParallel, attached: ConnectedModel) -> None:
    """Nothing crosses ranks in the model's own passes, of which ranks have unlike numbers."""
    if model.static_graph:
        fix = "leave static_graph out, or pass the module without DDP: workers that meet over parameters need none"
        raise UsageError(f"DDP(static_graph=True) needs a first backward that synchronises: {fix}")
    model.broadcast_buffers = False

    def refuse(state: Any, bucket: Any) -> Any:
        if attached.recorder.muted:  # passes that are discarded
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        crossed = "backward() crossed ranks, but with meet='parameters' every worker steps apart"
        raise UsageError(f"{crossed}: {_PIECE}")

    refuse.__annotations__.clear()  # DDP checks them
    model.register_comm_hook(None, refuse)
