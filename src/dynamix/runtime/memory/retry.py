"""A backward pass that goes on in smaller pieces where memory runs out, and crosses ranks exactly once.

DDP reduces while backward still runs, so nothing could be tried again. Here all pieces run under `no_sync`, the ranks
agree that every one has its gradient, and a backward pass of nothing then sends it through the hook.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynamix.errors import MemoryLimitError
from dynamix.runtime.control import ControlGroup
from dynamix.runtime.gradients import GradientHook
from dynamix.runtime.memory.agree import all_of, raise_for
from dynamix.runtime.memory.batches import length, piece
from dynamix.runtime.memory.exit_advice import advice
from dynamix.runtime.memory.gauge import Gauge, is_out_of_memory, release
from dynamix.runtime.weighting import Attached
from dynamix.window import Ints

Loss = Callable[[Any], Tensor]
Gradients = list[Tensor | None]
_OK, _AGAIN, _FAILED, _FULL = range(4)


class RetryingBackward:
    """`Controller.backward`'s work; one per controller. A collective object.

    models   the one whose gradient crosses ranks, and others through which `loss_fn` may go: theirs stays here
    """

    def __init__(self, models: Sequence[Attached], *, group: ControlGroup | None, gauge: Gauge) -> None:
        self.attached, self.others, self.group, self.gauge = models[0], models[1:], group, gauge
        self.rank = 0 if group is None else group.rank
        self.largest: int | None = None  # samples of a piece that may fit this rank, after some did not
        self._error: Exception | None = None

    def run(self, loss_fn: Loss, batch: Any, *, weight: float, last: bool) -> Tensor:
        """The mean loss of `batch`, detached, its gradient times `weight` added to `.grad`; reduced if `last`.

        Raises as `Controller.backward` does, `MemoryLimitError` on all ranks when not even one sample fits.
        """
        ddp = self.attached.model if isinstance(self.attached.model, DistributedDataParallel) else None
        flush = ddp is not None and last and ddp.require_backward_grad_sync
        parameters = [p for p in self.attached.model.parameters() if p.requires_grad]
        earlier: Gradients = [p.grad for p in parameters]  # of other micro-batches: a failed piece must not spoil them
        if ddp is not None:
            _exchange_before(ddp)
        with contextlib.ExitStack() as here:
            for other in (attached.model for attached in self.others):
                if isinstance(other, DistributedDataParallel):
                    _exchange_before(other)
                    here.callback(setattr, other, "require_forward_param_sync", True)
                    here.enter_context(other.no_sync())
            if ddp is not None:
                here.enter_context(ddp.no_sync())
            states, loss = self._pieces(loss_fn, batch, weight, parameters)
        self._raise(states, parameters, earlier)
        for parameter, before in zip(parameters, earlier, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else _sum(before, parameter.grad)
        if flush and ddp is not None:
            self._flush(ddp, parameters, length(batch))
        assert loss is not None
        return loss

    def _pieces(
        self, loss_fn: Loss, batch: Any, weight: float, parameters: list[nn.Parameter]
    ) -> tuple[Ints, Tensor | None]:
        """Until every rank has its gradient in `.grad`, or one cannot: how each ended (W,), and this rank's loss."""
        own = [b for attached in (self.attached, *self.others) for b in attached.model.buffers()]
        buffers = [b.detach().clone() for b in own]
        loss: Tensor | None = None
        _clear(parameters)
        while True:
            state = _OK
            if loss is None:
                state, loss = self._attempt(loss_fn, batch, weight)
                if self.group is not None:
                    # Waiting for slower ranks is no computing; the hook's own mark comes too late.
                    self.attached.recorder.gradients_ready()
            states = all_of(state, self.group)
            if self.group is not None:
                self.attached.recorder.reduced()
            if (states >= _FAILED).any() or not (states == _AGAIN).any():
                return states, loss
            if state == _AGAIN:
                _clear(parameters)
                with torch.no_grad():
                    for buffer, kept in zip(own, buffers, strict=True):
                        buffer.copy_(kept)
                release()

    def _attempt(self, loss_fn: Loss, batch: Any, weight: float) -> tuple[int, Tensor | None]:
        """One pass over all of `batch`, in pieces; gradients add up in `.grad`."""
        total: Tensor | None = None
        size = 1
        try:
            samples = length(batch)
            size = self.gauge.most(min(samples, self.largest or samples))
            with self.gauge.measure(size) if self.gauge.limited else contextlib.nullcontext():
                for start in range(0, samples, size):
                    stop = min(start + size, samples)
                    loss = loss_fn(batch if size >= samples else piece(batch, start, stop))
                    part = (stop - start) / samples
                    (loss * (part * weight)).backward()
                    seen = loss.detach() * part
                    total = seen if total is None else total + seen
                    del loss
        except Exception as error:
            if is_out_of_memory(error):
                self.largest = -(-size // 2)
                if size > 1:
                    return _AGAIN, None
                self._error = _too_large(self.rank)
                self._error.__cause__ = error.with_traceback(None)
                return _FULL, None
            self._error = error
            return _FAILED, None
        return _OK, total

    def _raise(self, states: Ints, parameters: list[nn.Parameter], earlier: Gradients) -> None:
        """If any rank cannot go on: its own error there, one that names it elsewhere."""
        error, self._error = self._error, None
        if not (states >= _FAILED).any():
            return
        for parameter, before in zip(parameters, earlier, strict=True):
            parameter.grad = before
        if error is None and (states == _FULL).any():
            error = _too_large(int((states == _FULL).argmax()))
        raise_for(states == _FAILED, error, "loss_fn failed")

    def _flush(self, ddp: DistributedDataParallel, parameters: list[nn.Parameter], samples: int) -> None:
        """Through DDP and its hook with what is in `.grad`."""
        used = [p for p in parameters if p.grad is not None] if ddp.find_unused_parameters else parameters
        try:
            with torch.enable_grad(), _not_timing(self.attached.hook):
                ddp._pre_forward()
                nothing = ddp._post_forward(_Nothing.apply(*used))  # type: ignore[no-untyped-call]
                nothing.backward()
        except Exception as error:
            if is_out_of_memory(error):
                where = "while its gradient was being reduced, where nothing can be tried again"
                raise MemoryLimitError(
                    f"rank {self.rank} ran out of memory {where}: {advice(self.rank, samples)}"
                ) from error
            raise


class _Nothing(torch.autograd.Function):
    """A zero that depends on every parameter and whose gradient is an exact zero of no size."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return parameters[0].new_zeros(()) if parameters else torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sparse = [p.grad if p.grad is not None and p.grad.is_sparse else None for p in ctx.parameters]
        given = zip(ctx.parameters, sparse, strict=True)
        return tuple(p.new_zeros(()).expand_as(p) if s is None else torch.zeros_like(s) for p, s in given)


def _exchange_before(ddp: DistributedDataParallel) -> None:
    """What DDP exchanges when a forward pass begins, now: later a rank may fail before it gets there."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    if ddp._check_sync_bufs_pre_fwd():
        ddp._sync_buffers()
    ddp.require_forward_param_sync = False


@contextlib.contextmanager
def _not_timing(hook: GradientHook | None) -> Iterator[None]:
    """Inside, the hook does not mark the end of computing."""
    if hook is None:
        yield
        return
    meter = hook.meter
    hook.meter = SimpleNamespace(
        gradients_ready=lambda: None, reduced=meter.reduced, add=meter.add, norms_due=meter.norms_due
    )
    try:
        yield
    finally:
        hook.meter = meter


def _too_large(rank: int) -> MemoryLimitError:
    fix = "use a smaller model, activation checkpointing, or a worker with more memory"
    return MemoryLimitError(f"rank {rank} ran out of memory even with one sample at a time: {fix}")


def _clear(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


@torch.no_grad()
def _sum(before: Tensor, added: Tensor) -> Tensor:
    return before + added if before.is_sparse or added.is_sparse else before.add_(added)
