"""How a model is connected: weighting in DDP's hook or in the loss, and what each kind of model needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynamix.data import Piece
from dynamix.errors import ConfigError, UsageError, spelling
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.part import Part
from dynamix.runtime.ranks.compare import hook_settings
from dynamix.runtime.sync.collectives import average_, broadcast_
from dynamix.runtime.sync.gradients import Around, GradientHook, scale_, wipe_nonfinite_
from dynamix.runtime.sync.inner_hook import InnerHook
from dynamix.runtime.sync.other_reductions import require_no_optimizers_in_backward
from dynamix.runtime.sync.parameter_averaging import Averaging, ParameterAveraging
from dynamix.runtime.sync.shards import Shards, gradients_of, is_fully_sharded

LOSS_SIDE = "pass wrap(..., weighting='loss') and call controller.weight(loss).backward() in the loop"
_ALIKE_IN_DDP = ("find_unused_parameters", "static_graph", "broadcast_buffers", "bucket_bytes_cap")


class ConnectedModel(Part):
    """A connected model: what the controller does to it besides weighting its gradients.

    hook        weights its gradients; None: nothing crosses ranks in it
    averaging   makes workers' models one, where they step apart
    shards      of a model under FSDP2
    owners      those of the two that there are, who own state and groups, and are handed every piece
    exchanges   what crosses ranks, and how: the same on all of them; `settings`: of that, by name, plain values
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        hook: GradientHook | None = None,
        *,
        averaging: ParameterAveraging | None = None,
        shards: Shards | None = None,
        exchanges: str = "none",
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.recorder, self.hook = model, recorder, hook
        self.averaging, self.shards = averaging, shards
        self.exchanges, self.settings = exchanges, settings or {}
        self.owners = [owner for owner in (hook, averaging) if owner is not None]
        self.settled = False  # no pass needs to be looked at before it begins
        self._finished: Piece | None = None  # the one whose optimizer step has its gradients as they should be

    @property
    def alike(self) -> bool:
        """Whether its parameters are the same on all ranks after every optimizer step, as far as is known."""
        return self.shards is None and self.hook is not None and self.hook.inner.alike

    def before_forward(self, piece: Piece) -> None:
        """A forward pass of training begins. Raises `UsageError` where DDP would fail later without a reason."""
        if piece.round.apart and self.averaging is not None:
            self.averaging.begin()
        ddp, hook = self.model, self.hook
        if hook is None or hook.buckets_seen or not isinstance(ddp, DistributedDataParallel):
            self.settled = self.averaging is None
            return
        if ddp.static_graph and not ddp.require_backward_grad_sync:
            do = "leave no_sync() out in the first optimizer step, or call controller.warm_up(forward_backward)"
            raise UsageError(f"DDP(static_graph=True) needs a first backward that synchronises: {do}")
        require_no_optimizers_in_backward(ddp)

    def local_passes(self, *, by_size: bool) -> AbstractContextManager[None]:
        """Inside, gradients stay on the rank. `by_size`: ranks have unlike numbers of these passes."""
        return getattr(self.model, "no_sync", nullcontext)()

    def _scale(self, factor: float) -> None:
        """All that has accumulated, times `factor`."""
        if factor != 1.0:
            scale_(gradients_of(self.model), factor)

    def _own(self) -> list[Tensor]:
        """What has accumulated of this rank's own; FSDP adds to what it has reduced, which has its own weight."""
        return gradients_of(self.model) if self.shards is None else self.shards.kept_back()

    @torch.no_grad()
    def make_ready(self, piece: Piece, applied: float | Tensor | None) -> None:
        """After a batch that is not the last of its optimizer step: bring what has accumulated to the next weight.

        The hook sees only the sum over micro-batches, so where an epoch's tail makes them unequal they are brought to
        the next one's weight: this rank's own gradient by its counts, and what all ranks have reduced already, where
        the loop leaves `no_sync` out, by the union's. `applied` is the weight that was in the loss, if it was weighted
        there. Raises `UsageError` where the two cannot be told apart.
        """
        micro, counts, now, following = piece.plan.micro, piece.round.counts, piece.samples, piece.following
        reductions = 0 if self.hook is None or self.shards is not None else self.hook.reductions
        if applied is not None:
            if now == 0 and not (self.hook is None and self.shards is None):
                # A loss times 0 has a zero gradient, but where the placeholder's own was not finite 0 * NaN remained.
                for gradient in self._own():
                    wipe_nonfinite_(gradient)
        elif reductions and (counts != counts[0]).any():
            if reductions != micro + 1:
                do = "use no_sync() for all micro-batches of an optimizer step but the last, or for none of them"
                raise UsageError(f"some of this step's earlier micro-batches synchronised and some did not: {do}")
            union = counts.sum(1)
            if union[micro + 1]:
                self._scale(float(union.mean() / union[micro + 1]))
        elif following and now != following:
            scale_(self._own(), now / following)

    def finish(self, piece: Piece, mean_of: int, *, more: bool) -> None:
        """Without a hook, what the hook's weight does for unequal pieces. Done once for the last of them.

        mean_of   by how many batches the loop divides its losses
        more      passes of `piece` follow, which will add to what this was done to
        """
        finished = self._finished is piece
        if more and finished:
            self._finished = None
            self._scale(piece.share / (mean_of * piece.samples))
        elif not (more or finished or self.owners) and piece.last and piece.samples:
            self._finished = piece
            self._scale(mean_of * piece.samples / piece.share)

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Passes inside leave no trace: buffers and gradients are put back, nothing is measured."""
        buffers = [b.detach().clone() for b in self.model.buffers()]
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in self.model.parameters()]
        with self.recorder.mute():
            try:
                yield
            finally:
                with torch.no_grad():
                    for buffer, kept in zip(self.model.buffers(), buffers, strict=True):
                        buffer.copy_(kept)
                    for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                        parameter.grad = gradient
                if self.hook is not None:
                    self.hook.make_groups()

    def close(self) -> list[dist.ProcessGroup]:
        """Let go of the groups that gradients and parameters travel in, and return them."""
        return [group for owner in self.owners for group in owner.close()]

    @property
    def whose(self) -> str:
        """The kind of the user's object that holds most of the state: an error of its is said to be its."""
        return type(self if self.hook is None else self.hook.inner.state).__name__

    def state_dict(self) -> dict[str, Any]:
        return {name: value for owner in self.owners for name, value in owner.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for owner in self.owners if state else ():
            owner.load_state_dict(state)


@dataclass(frozen=True)
class Options:
    """Those of `Controller.wrap`, checked as far as they can be without a model. Raises `ConfigError`."""

    hook: Callable[[Any, Any], Any] | None
    hook_state: Any
    scaler: Any
    weighting: Literal["hook", "loss", "given"]
    batchnorm: Literal["rank0", "weighted"]
    averaging: Averaging | None

    def __post_init__(self) -> None:
        for name, allowed in (("weighting", ("hook", "loss", "given")), ("batchnorm", ("rank0", "weighted"))):
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(name, value, " or ".join(allowed), spelling(value, allowed))


def attach(
    model: nn.Module,
    options: Options,
    around: Around,
    averaging: Callable[[], ParameterAveraging | None] = lambda: None,
) -> ConnectedModel:
    """Connect `model`, whose gradients meet. If parameters do in some rounds, `averaging` makes what averages them.

    Raises `UsageError` naming what the model needs.
    """
    group, recorder, alone = around.group, around.recorder, around.ranks.workers == 1
    if options.weighting == "hook" and not alone and (reason := _needs_loss_side(model)) is not None:
        raise UsageError(f"{reason}: {LOSS_SIDE}")
    if not isinstance(model, DistributedDataParallel) or group is None:
        if options.hook is not None:
            raise UsageError("wrap(hook=...) needs a DistributedDataParallel model, which is what runs the hook")
        if not alone:
            recorder.times.see_no_communication()
        around.watch(reduces=False, hooked=False)
        return ConnectedModel(model, recorder, averaging=averaging())
    device = next((p.device.type for p in model.parameters() if p.requires_grad), "cpu")
    inner = InnerHook(group, options.hook, options.hook_state, device=device)
    check = around.watch(reduces=not alone, hooked=inner.chained)
    hook = GradientHook(inner, around, check, scaler=options.scaler)
    hook.register(model)
    name = "all-reduce" if options.hook is None else getattr(options.hook, "__qualname__", type(options.hook).__name__)
    settings = {option: getattr(model, option, None) for option in _ALIKE_IN_DDP}
    settings |= {"losses scaled": options.scaler is not None, **hook_settings(options.hook_state)}
    exchanges = f"{name}, buffers {options.batchnorm}"
    exchange_buffers(model, hook, averaged=options.batchnorm == "weighted")
    return ConnectedModel(model, recorder, hook, averaging=averaging(), exchanges=exchanges, settings=settings)


def exchange_buffers(model: DistributedDataParallel, weights: GradientHook, *, averaged: bool) -> None:
    """Before each forward pass of DDP exchange its buffers. There too a rank may be found lost."""
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    group, ranks, recorder = weights.group, weights.ranks, weights.recorder
    last = [1.0 / group.size()]  # n_i/N of the step before the forward that is starting: it produced the buffers

    def hook(state: Any, buffers: dict[str, Tensor]) -> None:
        piece = weights.piece if model.training else None
        if piece is not None and torch.is_grad_enabled() and piece.round.apart:
            return  # DDP asks for it before the first of several passes that cross nothing
        with ranks.naming("the ranks could not exchange the model's buffers"), recorder.timer.exchanging():
            if averaged:
                # With unequal shares the first rank, whose buffers DDP would take, may have the noisiest statistics.
                average_(buffers.values(), last[0], group, ranks)
                if piece is not None and not recorder.muted:
                    last[0] = piece.share / piece.round.samples
            elif any(buffer.device.type != "cpu" for buffer in buffers.values()):
                model._default_broadcast_coalesced()
            else:
                broadcast_(buffers.values(), group, ranks)

    model._register_buffer_comm_hook(None, hook, _BufferCommHookLocation.PRE_FORWARD)


def _needs_loss_side(model: nn.Module) -> str | None:
    if any(is_fully_sharded(module) for module in model.modules()):
        return "FSDP holds a part of the model only: call fully_shard() on the whole model, too"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm's backward mixes gradients of all ranks before any communication hook sees them"
    if not isinstance(model, DistributedDataParallel):
        return f"{type(model).__name__} is not a DistributedDataParallel model, so it has no communication hook"
    return None
