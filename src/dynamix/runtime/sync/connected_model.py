"""How a model is connected: weighting in DDP's hook or in the loss, and what each kind of model needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynamix.data import Piece
from dynamix.errors import UsageError
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.ranks.compare import hook_settings
from dynamix.runtime.ranks.ranks import ALONE, Ranks
from dynamix.runtime.sync.collectives import average_, broadcast_
from dynamix.runtime.sync.gradients import GradientHook, GradientWeight, wipe_nonfinite_
from dynamix.runtime.sync.other_reductions import optimizers_in_backward
from dynamix.runtime.sync.parameter_averaging import ParameterAveraging
from dynamix.runtime.sync.shards import Shards, gradients_of, is_fully_sharded

_ALIKE_IN_DDP = ("find_unused_parameters", "static_graph", "broadcast_buffers", "bucket_bytes_cap")


class ConnectedModel:
    """A connected model: what the controller does to it besides weighting its gradients."""

    def __init__(self, model: nn.Module, recorder: Recorder, hook: GradientHook | None, ranks: Ranks = ALONE) -> None:
        self.model, self.recorder, self.hook, self.ranks = model, recorder, hook, ranks
        self.meeting: ParameterAveraging | None = None  # where workers step apart
        self.apart: Callable[[], bool] = lambda: False  # whether the batch in hand is trained apart
        self.shards: Shards | None = None  # of a model under FSDP2
        self.exchanges = "none"  # what crosses ranks, and how: the same on all of them
        self.settings: dict[str, Any] = {}  # of that, by name: plain values
        self.last_weight = 1.0  # n_i/N of the step before the forward that is starting: it produced the buffers
        self._finished: Piece | None = None  # the one whose optimizer step has its gradients as they should be

    def step_done(self) -> None:
        if self.hook is not None:
            self.hook.step_done()

    def before_forward(self, piece: Piece) -> None:
        """A forward pass of training begins. Raises `UsageError` where DDP would fail later without a reason."""
        if piece.plan.apart and self.meeting is not None:
            self.meeting.begin()
        ddp, hook = self.model, self.hook
        if hook is None or hook.buckets_seen or not isinstance(ddp, DistributedDataParallel):
            return
        if ddp.static_graph and not ddp.require_backward_grad_sync:
            do = "leave no_sync() out in the first optimizer step, or call controller.warm_up(forward_backward)"
            raise UsageError(f"DDP(static_graph=True) needs a first backward that synchronises: {do}")
        if (why := optimizers_in_backward(ddp)) is not None:
            raise UsageError(why)

    @contextmanager
    def local_passes(self, *, by_size: bool) -> Iterator[None]:
        """Inside, gradients stay on the rank. `by_size`: ranks have unlike numbers of these passes."""
        with getattr(self.model, "no_sync", nullcontext)():
            yield

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply what has accumulated in `.grad`; 0 zeroes it, whatever it holds."""
        for gradient in gradients_of(self.model):
            gradient.mul_(factor) if factor else gradient.zero_()

    @torch.no_grad()
    def piece_done(self, piece: Piece, applied: float | Tensor | None) -> None:
        """After a batch that is not the last of its optimizer step: make ready what has accumulated.

        The hook sees only the sum over micro-batches, so where an epoch's tail makes them unequal they are brought to
        the next one's weight: this rank's own gradient by its counts, and what all ranks have reduced already, where
        the loop leaves `no_sync` out, by the union's. `applied` is the weight that was in the loss, if it was weighted
        there. Raises `UsageError` where the two cannot be told apart.
        """
        if piece.plan.apart:
            return  # every piece has a step of its own
        plan, now, following = piece.plan, piece.samples, piece.following
        reductions = 0 if self.hook is None else self.hook.reductions
        if applied is None and reductions and (plan.group != plan.group[0]).any():
            if reductions != plan.micro + 1:
                do = "use no_sync() for all micro-batches of an optimizer step but the last, or for none of them"
                raise UsageError(f"some of this step's earlier micro-batches synchronised and some did not: {do}")
            union = plan.group.sum(1)
            if union[plan.micro + 1]:
                self.scale_gradients(float(union.mean() / union[plan.micro + 1]))
            return
        if applied is not None:
            if now == 0 and self.hook is not None:
                # A loss times 0 has a zero gradient, but where the placeholder's own was not finite 0 * NaN remained.
                for gradient in gradients_of(self.model):
                    wipe_nonfinite_(gradient)
        elif following and now != following:
            self.scale_gradients(now / following)

    def finish(self, piece: Piece, mean_of: int) -> None:
        """Without a hook, what the hook's weight does for unequal pieces. Done once for the last of them.

        mean_of   by how many batches the loop divides its losses
        """
        if self.hook is None and self.meeting is None and piece.last and piece.samples and self._finished is not piece:
            self._finished = piece
            self._scale_by(mean_of * piece.samples / piece.share)

    def reopen(self, piece: Piece, mean_of: int) -> None:
        """Passes of `piece` follow that will add to what `finish` was done to."""
        if self._finished is piece:
            self._finished = None
            self._scale_by(piece.share / (mean_of * piece.samples))

    def _scale_by(self, factor: float) -> None:
        if factor != 1.0:
            self.scale_gradients(factor)

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Passes inside leave no trace: buffers and gradients are put back, nothing is measured."""
        buffers = [b.detach().clone() for b in self.model.buffers()]
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in self.model.parameters()]
        self.recorder.muted = True
        if self.hook is not None:
            self.hook.muted = True
        try:
            yield
        finally:
            self.recorder.muted = False
            with torch.no_grad():
                for buffer, kept in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(kept)
                for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
            if self.hook is not None:
                self.hook.muted = False
                self.hook.make_groups()

    @property
    def whose(self) -> str:
        """The kind of the user's object that holds most of the state."""
        return type(self if self.hook is None else self.hook.inner_state).__name__

    def state_dict(self) -> dict[str, Any]:
        states = [owner.state_dict() for owner in (self.hook, self.meeting) if owner is not None]
        return {name: value for state in states for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for owner in (self.hook, self.meeting):
            if state and owner is not None:
                owner.load_state_dict(state)


def attach(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    share: Callable[[], GradientWeight],
    recorder: Recorder,
    hook: Callable[[Any, Any], Any] | None,
    hook_state: Any,
    scaler: Any,
    weighting: Literal["hook", "loss", "given"],
    batchnorm: Literal["rank0", "weighted"],
    ranks: Ranks = ALONE,
) -> ConnectedModel:
    """Connect `model`; the arguments are `Controller.wrap`'s. Raises `UsageError` naming what the model needs."""
    alone = group is None or dist.get_world_size(group) == 1
    if weighting == "hook" and not alone and (reason := _needs_loss_side(model)) is not None:
        fix = "pass wrap(..., weighting='loss') and call controller.weight(loss).backward() in the loop"
        raise UsageError(f"{reason}: {fix}")
    if not isinstance(model, DistributedDataParallel) or group is None:
        if hook is not None:
            raise UsageError("wrap(hook=...) needs a DistributedDataParallel model, which is what runs the hook")
        recorder.sees_communication = alone
        return ConnectedModel(model, recorder, None, ranks)
    device = next((p.device.type for p in model.parameters() if p.requires_grad), "cpu")
    entry = GradientHook(group, share, recorder, hook, hook_state, device=device, ranks=ranks)
    entry.register(model)
    if scaler is not None:
        entry.loss_scale = lambda: getattr(scaler, "_scale", None)  # get_scale() would synchronise the device
    attached = ConnectedModel(model, recorder, entry, ranks)
    name = "all-reduce" if hook is None else getattr(hook, "__qualname__", type(hook).__name__)
    attached.exchanges = f"{name}, buffers {batchnorm}"
    attached.settings = {option: getattr(model, option, None) for option in _ALIKE_IN_DDP}
    attached.settings |= {"losses scaled": scaler is not None, **hook_settings(hook_state)}
    exchange = _averaging(model, attached, entry, share) if batchnorm == "weighted" else _broadcasting(model, entry)
    _exchange_buffers(model, attached, exchange)
    return attached


Exchange = Callable[[dict[str, Tensor]], None]


def _exchange_buffers(model: DistributedDataParallel, attached: ConnectedModel, exchange: Exchange) -> None:
    """Before each forward pass of DDP `exchange` its buffers. There too a rank may be found lost."""
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    def hook(state: Any, buffers: dict[str, Tensor]) -> None:
        if model.training and torch.is_grad_enabled() and attached.apart():
            return  # DDP asks for it before the first of several passes that cross nothing
        named = attached.ranks.naming("the ranks could not exchange the model's buffers")
        with named, attached.recorder.timer.exchanging():
            exchange(buffers)

    model._register_buffer_comm_hook(None, hook, _BufferCommHookLocation.PRE_FORWARD)


def _broadcasting(model: DistributedDataParallel, entry: GradientHook) -> Exchange:
    def broadcast(buffers: dict[str, Tensor]) -> None:
        if any(buffer.device.type != "cpu" for buffer in buffers.values()):
            model._default_broadcast_coalesced()
        else:
            broadcast_(buffers.values(), entry.group, entry.ranks)

    return broadcast


def _averaging(
    model: DistributedDataParallel, attached: ConnectedModel, entry: GradientHook, share: Callable[[], GradientWeight]
) -> Exchange:
    attached.last_weight = 1.0 / entry.group.size()

    def average(buffers: dict[str, Tensor]) -> None:
        # With unequal shares the first rank, whose buffers DDP would take, may have the noisiest statistics.
        average_(buffers.values(), attached.last_weight, entry.group, entry.ranks)
        if not model.training or attached.recorder.muted:
            return  # evaluation and discarded passes have no share of their own
        attached.last_weight = share().part

    return average


def _needs_loss_side(model: nn.Module) -> str | None:
    if any(is_fully_sharded(module) for module in model.modules()):
        return "FSDP holds a part of the model only: call fully_shard() on the whole model, too"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm's backward mixes gradients of all ranks before any communication hook sees them"
    if not isinstance(model, DistributedDataParallel):
        return f"{type(model).__name__} is not a DistributedDataParallel model, so it has no communication hook"
    return None
