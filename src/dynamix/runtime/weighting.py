"""How a model is connected: weighting in DDP's hook or in the loss, and what each kind of model needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from dynamix.data import Piece
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.agreement import Explain, unnamed
from dynamix.runtime.averaging import average_, broadcast_
from dynamix.runtime.ending import Ending, wait_for
from dynamix.runtime.gradients import GradientHook, Share, wipe_nonfinite_
from dynamix.runtime.groups import new_gloo_group
from dynamix.runtime.liveness import failed_collective
from dynamix.runtime.observation import Recorder
from dynamix.runtime.parameters import ParameterMeeting


class Attached:
    """A connected model: what the controller does to it besides weighting its gradients."""

    def __init__(self, model: nn.Module, recorder: Recorder, hook: GradientHook | None) -> None:
        self.model, self.recorder, self.hook = model, recorder, hook
        self.explain: Explain = unnamed
        self.meeting: ParameterMeeting | None = None  # where workers step apart
        self.exchanges = "none"  # what crosses ranks, and how: the same on all of them
        self.last_weight = 1.0  # n_i/N of the step before the forward that is starting: it produced the buffers
        self._finished: Piece | None = None  # the one whose optimizer step has its gradients as they should be

    def explain_with(self, explain: Explain) -> None:
        """From now on a failed collective of a pass is told by `explain`."""
        self.explain = explain
        if self.hook is not None:
            self.hook.explain = explain

    def step_done(self) -> None:
        if self.hook is not None:
            self.hook.step_done()

    def before_forward(self) -> None:
        """A forward pass of training begins. Raises `UsageError` where DDP would fail later without a reason."""
        if self.meeting is not None:
            self.meeting.begin()
        ddp, hook = self.model, self.hook
        if hook is None or hook.buckets_seen or not isinstance(ddp, DistributedDataParallel):
            return
        if ddp.static_graph and not ddp.require_backward_grad_sync:
            do = "leave no_sync() out in the first optimizer step, or call controller.warm_up(forward_backward)"
            raise UsageError(f"DDP(static_graph=True) needs a first backward that synchronises: {do}")

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply what has accumulated in `.grad`; 0 zeroes it, whatever it holds."""
        for gradient in _gradients(self.model):
            gradient.mul_(factor) if factor else gradient.zero_()

    @torch.no_grad()
    def piece_done(self, piece: Piece, applied: float | Tensor | None) -> None:
        """After a batch that is not the last of its optimizer step: make ready what has accumulated.

        The hook sees only the sum over micro-batches, so where an epoch's tail makes them unequal they are brought to
        the next one's weight: this rank's own gradient by its counts, and what all ranks have reduced already, where
        the loop leaves `no_sync` out, by the union's. `applied` is the weight that was in the loss, if it was weighted
        there. Raises `UsageError` where the two cannot be told apart.
        """
        if self.meeting is not None:
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
                for gradient in _gradients(self.model):
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
        owner = self.hook or self.meeting
        return {} if owner is None else owner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and (owner := self.hook or self.meeting) is not None:
            owner.load_state_dict(state)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def attach(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    share: Callable[[], Share],
    recorder: Recorder,
    hook: Callable[[Any, Any], Any] | None,
    hook_state: Any,
    scaler: Any,
    weighting: Literal["hook", "loss"],
    batchnorm: Literal["rank0", "weighted"],
) -> Attached:
    """Connect `model`; the arguments are `Controller.wrap`'s. Raises `UsageError` naming what the model needs."""
    choices = ("weighting", weighting, ("hook", "loss")), ("batchnorm", batchnorm, ("rank0", "weighted"))
    for name, value, allowed in choices:
        if value not in allowed:
            raise ConfigError(name, value, " or ".join(allowed), "check the spelling")
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        ways = "torch.compile(controller.wrap(DDP(net), optimizer)), or compile inside, DDP(torch.compile(net))"
        raise UsageError(f"the model is torch.compile(DDP(...)), which hides DDP's hook: wrap first, {ways}")
    alone = group is None or dist.get_world_size(group) == 1
    if weighting == "hook" and not alone and (reason := _needs_loss_side(model)) is not None:
        fix = "pass wrap(..., weighting='loss') and call controller.weight(loss).backward() in the loop"
        raise UsageError(f"{reason}: {fix}")
    if not isinstance(model, DistributedDataParallel) or group is None:
        if hook is not None:
            raise UsageError("wrap(hook=...) needs a DistributedDataParallel model, which is what runs the hook")
        recorder.sees_communication = alone
        return Attached(model, recorder, None)
    entry = GradientHook(group, share, recorder, hook, hook_state)
    entry.register(model)
    if scaler is not None:
        entry.loss_scale = lambda: getattr(scaler, "_scale", None)  # get_scale() would synchronise the device
    attached = Attached(model, recorder, entry)
    name = "all-reduce" if hook is None else getattr(hook, "__qualname__", type(hook).__name__)
    attached.exchanges = f"{name}, buffers {batchnorm}"
    weighted = batchnorm == "weighted"
    exchange = _averaging(model, attached, entry, share) if weighted else _broadcasting(model, entry)
    _exchange_buffers(model, attached, exchange)
    return attached


Exchange = Callable[[dict[str, Tensor]], None]


def _exchange_buffers(model: DistributedDataParallel, attached: Attached, exchange: Exchange) -> None:
    """Before each forward pass of DDP `exchange` its buffers. There too a rank may be found lost."""
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    def hook(state: Any, buffers: dict[str, Tensor]) -> None:
        try:
            with attached.recorder.timer.exchanging():
                exchange(buffers)
        except RuntimeError as error:
            if not failed_collective(error):
                raise
            raise attached.explain(error, "the ranks could not exchange the model's buffers") from error

    model._register_buffer_comm_hook(None, hook, _BufferCommHookLocation.PRE_FORWARD)


def _broadcasting(model: DistributedDataParallel, entry: GradientHook) -> Exchange:
    def broadcast(buffers: dict[str, Tensor]) -> None:
        if any(buffer.device.type != "cpu" for buffer in buffers.values()):
            model._default_broadcast_coalesced()
        else:
            broadcast_(buffers.values(), entry.group, entry.arrivals.ending)

    return broadcast


def _averaging(
    model: DistributedDataParallel, attached: Attached, entry: GradientHook, share: Callable[[], Share]
) -> Exchange:
    attached.last_weight = 1.0 / entry.group.size()

    def average(buffers: dict[str, Tensor]) -> None:
        # With unequal shares the first rank, whose buffers DDP would take, may have the noisiest statistics.
        average_(buffers.values(), attached.last_weight, entry.group, entry.arrivals.ending)
        if not model.training or attached.recorder.muted:
            return  # evaluation and discarded passes have no share of their own
        attached.last_weight = share().part

    return average


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP (`fully_shard` or `FullyShardedDataParallel`) holds this module's parameters."""
    # Asked by name: importing `torch.distributed.fsdp` takes a third of the time that `import torch` takes.
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.distributed.")}
    return not kinds.isdisjoint(("FSDPModule", "FullyShardedDataParallel"))


def _needs_loss_side(model: nn.Module) -> str | None:
    if is_sharded(model):
        return "FSDP reduces gradients without a communication hook of DDP's"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm's backward mixes gradients of all ranks before any communication hook sees them"
    if not isinstance(model, DistributedDataParallel):
        return f"{type(model).__name__} is not a DistributedDataParallel model, so it has no communication hook"
    return None


class LossWeight:
    """The loss side: loss * n_i * W / N, with N from the sample plan or, for given counts, from an all-reduce.

    For counts, N is not known when backward starts. The loss then carries n_i * W / N_ref, N_ref being the last step's;
    when backward has ended, before the user's unscale or clipping, gradients are multiplied by N_ref / N.
    """

    def __init__(self, group: dist.ProcessGroup | None, accumulate: int) -> None:
        self.group, self.accumulate = group, accumulate
        self.explain: Explain = unnamed
        self.ending: Ending | None = None  # set by the owner
        self.workers = 1 if group is None else dist.get_world_size(group)
        self.applied: float | Tensor | None = None
        self.required = self._paused = False
        self._model: nn.Module | None = None
        self._counts_group: dist.ProcessGroup | None = None
        self.held: float | Tensor = 1.0  # what the gradient of this rank's pieces so far is over its mean
        self._reference: Tensor | None = None
        self._own: Tensor | None = None  # counts of this rank's pieces so far, where shares are cut by size
        self._counted: list[tuple[Tensor, Any]] = []

    def bind(self, model: nn.Module, *, required: bool) -> None:
        self._model, self.required = model, required

    def sum_async(self, values: Tensor) -> Any:
        """Start summing `values` in place over workers; returns a handle with `wait()`. A collective call."""
        if self.group is None:
            return SimpleNamespace(wait=lambda: None)
        if values.device.type == "cpu" and self._counts_group is None:
            self._counts_group = new_gloo_group(dist.get_process_group_ranks(self.group))
        group = self._counts_group if values.device.type == "cpu" else self.group
        return _Sum(dist.all_reduce(values, group=group, async_op=True), self)

    def apply(self, loss: Tensor, piece: Piece, count: float | Tensor | None) -> Tensor:
        """The weighted loss of this micro-batch; see `Controller.weight`."""
        if self._paused:
            return loss
        if self.applied is not None:
            raise UsageError("weight() was called twice for one batch: call controller.step() after each batch")
        if count is None:
            self.applied = piece.samples * self.workers * self.accumulate / piece.plan.samples
            self._hold(piece, self.applied)
            return loss * self.applied
        if not isinstance(count, Tensor) and not count >= 0:
            raise ConfigError("count", count, "0 or more", "pass the divisor of this mean loss")
        given = torch.as_tensor(count, dtype=torch.float64)  # on the device it came on, also on an idle rank
        return self._apply_counted(loss, piece, given if piece.samples else torch.zeros_like(given))

    def _hold(self, piece: Piece, applied: float | Tensor) -> None:
        self.held = applied + self.held if piece.by_size and piece.number else applied

    def _apply_counted(self, loss: Tensor, piece: Piece, count: Tensor) -> Tensor:
        if piece.by_size:
            return self._apply_summed(loss, piece, count)
        while piece.number == 0 and self._counted:  # an accumulation that was broken off leaves counts behind
            self._counted.pop(0)[1].wait()
        total = count.detach().clone()
        handle = self.sum_async(total)
        self._counted.append((total, handle))
        if self._reference is None or (piece.number == 0 and self._reference.device != total.device):
            handle.wait()
            self._reference = total.clone()
        weight = count * self.workers / self._reference
        self.applied = weight if piece.samples else 0.0
        self._hold(piece, self.applied)
        if piece.last:
            counted, self._counted = self._counted, []
            self._correct_after(loss, self._reference, counted)
        return loss * weight.to(loss.dtype).to(loss.device)

    def _apply_summed(self, loss: Tensor, piece: Piece, count: Tensor) -> Tensor:
        """Ranks have unlike numbers of pieces, so counts travel once, with the last."""
        self._own = count if piece.number == 0 or self._own is None else self._own + count
        reference = torch.tensor(float(piece.plan.samples), dtype=count.dtype, device=count.device)
        weight = count * self.workers / reference
        self.applied = weight if piece.samples else 0.0
        self._hold(piece, self.applied)
        if piece.last:
            total = self._own.detach().clone()
            self._correct_after(loss, reference, [(total, self.sum_async(total))])
        return loss * weight.to(loss.dtype).to(loss.device)

    def _correct_after(self, loss: Tensor, reference: Tensor, counted: list[tuple[Tensor, Any]]) -> None:
        def at_end() -> None:
            # Queued once more, so that it runs after DDP's and FSDP's own callbacks have finished the gradients.
            Variable._execution_engine.queue_callback(lambda: self._correct(reference, counted))

        loss.register_hook(lambda gradient: Variable._execution_engine.queue_callback(at_end))

    def _correct(self, reference: Tensor, counted: list[tuple[Tensor, Any]]) -> None:
        for _, handle in counted:
            handle.wait()
        total = torch.stack([value for value, _ in counted]).mean()
        self._reference = total
        if self._model is None:
            return
        factor = reference / total
        with torch.no_grad():
            for gradient in _gradients(self._model):
                gradient.mul_(factor.to(gradient.dtype).to(gradient.device))

    def close(self) -> list[dist.ProcessGroup]:
        """Let go of the group that counts travel in, and return it."""
        group, self._counts_group, self.ending = self._counts_group, None, None
        self._counted.clear()
        return [] if group is None else [group]

    def take(self) -> float | Tensor | None:
        """At the end of a micro-step: the weight that was applied, None if none was. Raises if one was required."""
        if self.required and self.applied is None:
            fix = "call controller.weight(loss).backward() instead of loss.backward()"
            raise UsageError(f"wrap(weighting='loss') was chosen, but this batch's loss was not weighted: {fix}")
        applied, self.applied = self.applied, None
        return applied

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


class _Sum:
    """A sum over ranks under way."""

    def __init__(self, work: Any, owner: LossWeight) -> None:
        self._work, self._owner = work, owner

    def wait(self) -> None:
        """Raises what another rank ends the job with meanwhile, and `WorkerLostError` where one is lost."""
        try:
            wait_for(self._work, self._owner.ending)
        except RuntimeError as error:
            if not failed_collective(error):
                raise
            raise self._owner.explain(error, "the ranks could not add their counts") from error
