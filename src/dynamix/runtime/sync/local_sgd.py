"""How a model is connected whose workers step apart and meet over parameters: nothing crosses ranks in its passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from dynamix.errors import UsageError
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.ranks.process_groups import new_gloo_group
from dynamix.runtime.sync.collectives import Workers, broadcast_
from dynamix.runtime.sync.connected_model import ConnectedModel, Options, attach
from dynamix.runtime.sync.gradients import Around
from dynamix.runtime.sync.parameter_averaging import Averaging, ParameterAveraging

_PIECE = (
    "put the forward and backward passes under `with controller.piece():`, and other passes of the DDP model, such as "
    "evaluation, under torch.no_grad()"
)


def attach_apart(model: nn.Module, options: Options, around: Around) -> ConnectedModel:
    """Connect a model whose workers step apart, plain or under DDP; all begin as the first rank's. A collective call.

    Raises `UsageError` naming what the model needs, and for options that are about gradients.
    """
    for name, usual in (("hook", None), ("weighting", "hook"), ("batchnorm", "rank0")):
        if (value := getattr(options, name)) != usual:
            given = f"wrap({name}={value!r}) is about meeting over gradients"
            fix = "leave it out: with meet='parameters' moves and buffers are averaged by samples; see averaging="
            raise UsageError(f"{given}: {fix}")
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        first = "pass a batch through it before controller.wrap(model, optimizer)"
        raise UsageError(f"the model has parameters whose shapes are not known yet: {first}")
    if isinstance(model, DistributedDataParallel):
        _keep_silent(model, around.recorder)
    averaging = _averaging(model, options, around)
    around.watch(reduces=False, hooked=False)
    return ConnectedModel(model, around.recorder, averaging=averaging, exchanges="parameters")


def attach_both(model: nn.Module, options: Options, around: Around) -> ConnectedModel:
    """Connect a model whose workers meet over gradients or over parameters, as each round's plan says.

    A collective call. Raises `UsageError` naming what the model needs.
    """
    if options.weighting != "hook":
        fix = "leave it out, or say meet='gradients'"
        weighs = f"wrap(weighting={options.weighting!r}) weighs losses, which workers that step apart do not do"
        raise UsageError(f"{weighs}: {fix}")
    if around.ranks.workers > 1 and not isinstance(model, DistributedDataParallel):
        fix = "controller.wrap(DistributedDataParallel(net), optimizer)"
        raise UsageError(f"meet='auto' needs DDP, because gradients meet in some rounds: write {fix}")
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        fix = "leave static_graph out, or say meet='gradients'"
        raise UsageError(f"DDP(static_graph=True) expects the same in every pass, but rounds differ: {fix}")
    return attach(model, options, around, averaging=lambda: _averaging(model, options, around, at_times=True))


def _averaging(model: nn.Module, options: Options, around: Around, *, at_times: bool = False) -> ParameterAveraging:
    """What makes the workers' models one; they begin as the first rank's. A collective call."""
    group, ranks = around.group, around.ranks
    on_cpus = None
    if group is not None and around.recorder.device.type != "cpu":
        on_cpus = new_gloo_group(dist.get_process_group_ranks(group))
    workers = Workers(group, ranks, on_cpus)
    if group is not None and ranks.workers > 1:
        tensors = (*model.named_parameters(), *model.named_buffers())
        words = [f"{name} {list(t.shape)} {t.dtype}{'' if t.requires_grad else ', not trained'}" for name, t in tensors]
        workers.require_alike(words)
        broadcast_([t.detach() for _, t in tensors], group, ranks)
    how = options.averaging or Averaging()
    return ParameterAveraging(model, how, workers, scaler=options.scaler, at_times=at_times)


def _keep_silent(model: DistributedDataParallel, recorder: Recorder) -> None:
    """Nothing crosses ranks in the model's own passes, of which ranks have unlike numbers."""
    if model.static_graph:
        fix = "leave static_graph out, or pass the module without DDP: workers that meet over parameters need none"
        raise UsageError(f"DDP(static_graph=True) needs a first backward that synchronises: {fix}")
    model.broadcast_buffers = False

    def refuse(state: Any, bucket: Any) -> Any:
        if recorder.muted:  # passes that are discarded
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        crossed = "backward() crossed ranks, but with meet='parameters' every worker steps apart"
        raise UsageError(f"{crossed}: {_PIECE}")

    refuse.__annotations__.clear()  # DDP checks them
    model.register_comm_hook(None, refuse)
