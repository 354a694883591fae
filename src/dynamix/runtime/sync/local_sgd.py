"""Connects a model for local SGD: its passes do not communicate; parameters are averaged at the end of a round."""

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
from dynamix.runtime.sync.gradients import Around
from dynamix.runtime.sync.holding import put
from dynamix.runtime.sync.parameter_averaging import Averaging, ParameterAveraging
from dynamix.runtime.sync.sync import Options, Sync


def attach_apart(model: nn.Module, options: Options, around: Around) -> Sync:
    """Connect a model, plain or under DDP, whose workers take local steps. All start with the first rank's parameters.

    A collective call. Raises `UsageError`, which says what the model needs, also for options for gradients.
    """
    for name, usual in (("hook", None), ("weighting", "hook"), ("batchnorm", "rank0")):
        if (value := getattr(options, name)) != usual:
            given = f"wrap({name}={value!r}) is about meeting over gradients"
            fix = "leave it out: with meet='parameters' models are averaged by samples; see averaging="
            raise UsageError(f"{given}: {fix}")
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        first = "pass a batch through it before controller.wrap(model, optimizer)"
        raise UsageError(f"the model has parameters whose shapes are not known yet: {first}")
    if isinstance(model, DistributedDataParallel):
        _keep_silent(model, around.recorder)
    averaging = averaging_of(model, options, around)
    around.watch(reduces=False, hooked=False)
    return Sync(model, around.recorder, averaging, exchanges="parameters")


def averaging_of(model: nn.Module, options: Options, around: Around, *, at_times: bool = False) -> ParameterAveraging:
    """The object that averages the workers' models, which start as the first rank's. A collective call."""
    group, ranks = around.group, around.ranks
    several = group is not None and ranks.workers > 1
    # A separate group, so that none of the loop's collectives can be mistaken for one of the averaging's.
    workers = Workers(group, ranks, new_gloo_group(dist.get_process_group_ranks(group)) if several else None)
    if group is not None and several:
        tensors = (*model.named_parameters(), *model.named_buffers())
        words = [f"{name} {list(t.shape)} {t.dtype}{'' if t.requires_grad else ', not trained'}" for name, t in tensors]
        workers.require_alike(words)
        broadcast_([t.detach() for _, t in tensors], group, ranks)
    how = options.averaging or Averaging()
    return ParameterAveraging(model, how, workers, scaler=options.scaler, at_times=at_times)


def _keep_silent(model: DistributedDataParallel, recorder: Recorder) -> None:
    """Turn off communication in the model's passes, because ranks run different numbers of them."""
    if model.static_graph:
        fix = "leave static_graph out, or pass the module without DDP: workers that meet over parameters need none"
        raise UsageError(f"DDP(static_graph=True) needs a first backward that synchronises: {fix}")
    put(model, broadcast_buffers=False, require_backward_grad_sync=False)

    def refuse(state: Any, bucket: Any) -> Any:
        if recorder.muted:  # discarded passes
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        crossed = "backward() exchanged gradients, but with meet='parameters' workers make local steps"
        raise UsageError(f"{crossed}: leave DDP's require_backward_grad_sync as controller.wrap() has set it")

    refuse.__annotations__.clear()  # DDP checks them
    model.register_comm_hook(None, refuse)
