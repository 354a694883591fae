"""Gradients of unequal batches: weighting in DDP's communication hook.

The gradient of the union batch is g = sum_i (n_i / N) g_i, with g_i the gradient of worker i's mean loss over n_i
samples. DDP averages over W workers, so each worker's gradient is multiplied by n_i * W / N before it is reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllreduceOptions
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.autograd import Variable
from torch.futures import Future

from dynamix.data import Piece, Round
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.part import Observation, Part
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.sync.inner_hook import Hook, InnerHook
from dynamix.runtime.sync.loss_weight import LossWeight

_ANEW = "make a new DistributedDataParallel of its module, and train that one"
ADDED = "the ranks could not add their gradients"
_ADD = AllreduceOptions()  # asynchronous
# A lossy hook hides the true |g|: one step in so many is reduced densely to measure the noise scale.
DENSE_EVERY = 50


@torch.no_grad()
def scale_(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply them in place. A factor of 0 sets them to zero, even NaN (0 * NaN would stay NaN)."""
    for gradient in gradients if factor != 1.0 else ():
        gradient.mul_(factor) if factor else gradient.zero_()


def wipe_nonfinite_(values: Tensor) -> None:
    """Replace NaN and infinity in `values` by 0, in place. A sparse tensor is set to 0 completely."""
    if values.is_sparse:
        values.zero_()
    else:
        torch.nan_to_num_(values, nan=0.0, posinf=0.0, neginf=0.0)


def weighted(inner_hook: Hook, *, count: Callable[[], tuple[float, float]]) -> Hook:
    """A DDP communication hook for loops of your own: weights unequal batches before `inner_hook`.

    `count()` returns (n_i, N) of the optimizer step being reduced: this worker's divisor of the mean loss, and its sum
    over workers. Register it with `model.register_comm_hook(state, dynamix.weighted(hook, count=...))`; `state` is
    `inner_hook`'s. `inner_hook` must average over workers, as torch's hooks do. Backward raises `ConfigError` for
    impossible counts. On gloo with several buckets, hooks with more than one collective (PowerSGD) need
    `Controller.wrap(hook=...)`, which gives each bucket a process group.
    """

    def hook(state: Any, bucket: Bucket) -> Future[Tensor]:
        n, total = count()
        if not (0 <= n <= total and total > 0):
            raise ConfigError("count", (n, total), "0 <= n_i <= N, N > 0", "return this step's (n_i, N)")
        if bucket.buffer().is_sparse:
            bucket.set_buffer(bucket.buffer().clone())  # `inner_hook` may divide in place, as torch's do
        group = getattr(state, "process_group", state)
        workers = group.size() if isinstance(group, dist.ProcessGroup) else dist.get_world_size()
        scale_([bucket.buffer()], n * workers / total)
        return inner_hook(state, bucket)

    hook.__annotations__.clear()  # DDP checks them, and rejects strings as types
    return hook


class Check(Protocol):
    """The controller's check of the loop. It is called for every synchronised backward pass, and may raise."""

    def fail(self, message: str) -> NoReturn: ...
    def covers(self, parameters: list[Tensor]) -> None: ...
    def reducing(self, piece: Piece | None) -> None: ...
    def reduced(self) -> None: ...


@dataclass(frozen=True)
class Around:
    """The job's services for a connected model.

    group     the data-parallel group; None: a single process
    recorder  gets timing marks and, in steps in which it needs them, squared norms ("local_sq", "global_sq", per
              bucket); only for the model that is `measured`
    weights   says which weight a loss carries
    watch     starts the check of the loop for this model; its arguments say whether gradients are reduced over ranks,
              and whether a user's hook may apply them
    in_pieces   shares are cut into pieces, and gradients are exchanged with a round's last piece
    """

    group: dist.ProcessGroup | None
    ranks: Ranks
    recorder: Recorder
    measured: bool
    weights: LossWeight
    watch: Callable[..., Check]
    in_pieces: bool


class GradientWeight:
    """The weight with which this rank's gradient of the current pass enters the mean.

    count     samples of the piece being reduced; 0 for a placeholder batch
    total     N; count * W / total is the weight
    applied   the weight already in the loss; None if the hook must apply it
    over      accumulated gradient divided by this rank's mean gradient
    """

    def __init__(self, piece: Piece, weights: LossWeight) -> None:
        own = piece.share / piece.samples if piece.by_size and piece.samples else 1.0
        self.count, self.total = float(piece.samples), piece.round.samples / weights.accumulate
        self.applied = weights.in_gradient(piece) if weights.given or weights.applied is not None else None
        self.over = own if self.applied is None else self.applied

    def enter(self, values: Tensor, workers: int) -> None:
        """Scale `values`, in place, so that their mean over `workers` is the union batch's gradient.

        A loss times 0 leaves zeros, or NaN (0 * NaN) if the placeholder's gradient was not finite. Only these are
        wiped: in a loop that synchronises every micro-batch, the rest was already reduced.
        """
        if self.applied is None:
            values.mul_(self.count * workers / self.total) if self.count else values.zero_()
        elif not self.count:
            wipe_nonfinite_(values)


class GradientHook(Part):
    """The only communication hook that DDP allows: weights, wraps the user's hook, measures norms and times.

    inner     the user's hook, or torch's all-reduce
    loop      is called for every backward pass, and may raise
    scaler    AMP's GradScaler, if any: norms are measured without its scale
    piece     the piece of the current passes

    It waits for the reductions at the end of a backward pass. For torch's own all-reduce on CPUs it waits without
    another thread, so the backend's threads run no Python. There, one pass over the gradient does both weighting and
    averaging.
    """

    def __init__(self, inner: InnerHook, around: Around, check: Check, *, scaler: Any) -> None:
        self.inner, self.loop, self.group, self._scaler = inner, check, inner.group, scaler
        self.weights, self.recorder, self.ranks = around.weights, around.recorder, around.ranks
        self._measured = around.measured
        self.closed = False  # whether its controller is closed
        self.piece: Piece | None = None  # of the current passes
        self._kept = False
        self.buckets_seen = 0
        self.steps = 0
        self.reductions = 0  # in the current optimizer step
        self.crossed = 0  # synchronised backward passes so far
        self._under_way: list[Future[Tensor]] = []
        self._awaited = False  # `_arrived` will be called in this backward pass
        self._norms_due = self._measuring = False
        self._since_dense = DENSE_EVERY

    def pass_begins(self, piece: Piece, kept: bool) -> None:
        self.piece, self._kept = piece, kept

    def __call__(self, bucket: Bucket, *, static_graph: bool) -> Future[Tensor]:
        """Reduce `bucket` of a model with or without `static_graph`."""
        part, buffer = bucket.index(), bucket.buffer()
        if part == 0:
            self._under_way, self._awaited = [], False
        self.buckets_seen = max(self.buckets_seen, part + 1)
        if self.crossed <= 1:
            self.loop.covers(bucket.parameters())
        weight = None if self.recorder.muted else self.begin(part, buffer, first=part == 0)
        # In its first backward pass a static graph does not run callbacks queued for the end, but waits.
        direct = self.inner.direct and not static_graph and buffer.is_cpu and not buffer.is_sparse
        if weight is not None and direct and (summed := self._summed(weight, bucket)) is not None:
            return summed
        future = self.inner.plainly(bucket) if weight is None else self._reduced(weight, bucket)
        self._awaited = self._awaited or at_end_of_backward(self._arrived)
        self._under_way.append(future)
        return future

    def _arrived(self) -> None:
        """Called at the end of backward. Raises another rank's error, or `WorkerLostError` if a rank is lost."""
        futures, self._under_way = self._under_way, []
        for future in futures:
            self.ranks.wait(future, ADDED)

    def begin(
        self, part: int, values: Tensor, *, first: bool, measured: bool = True, divided: float = 1.0
    ) -> GradientWeight:
        """Before a part of the gradients is reduced: returns its weight, and records its norm if due and `measured`.

        first     the first part of a backward pass
        divided   `values` are this rank's gradients divided by this
        """
        if first:
            self.loop.reducing(self.piece)
        if self.piece is None:
            self.loop.fail("backward() exchanged gradients, but no forward pass of this model came before it")
        weight = GradientWeight(self.piece, self.weights)
        if first:
            self.reductions, self.crossed = self.reductions + 1, self.crossed + 1
            if self.reductions > 1:
                self._again(self.piece, weight)
            else:
                due = self._norms_due = self._measured and self.recorder.norms_due()
                wanted = self._kept and self.steps >= 2 and self._since_dense >= DENSE_EVERY
                self._measuring = due if self.inner.lossless else wanted
                self._since_dense = -1 if self._measuring else self._since_dense
        # Later reductions add to a mean without this loss's weight, so only the first shows this rank's own gradient.
        own = measured and weight.count != 0 and (weight.applied is None or self.reductions == 1)
        if own and (self._norms_due or self._measuring):
            self._tell_norm("local_sq", values, weight.over / divided, part)
        return weight

    def _again(self, piece: Piece, weight: GradientWeight) -> None:
        """A later synchronised pass of the round begins, of `piece`: turn norms off if needed, or fail."""
        if piece.of == 1 or piece.by_size:
            # Several passes of one batch may be one update or several; either way the first is a complete gradient.
            self._norms_due = self._measuring = False
            return
        counts = piece.round.counts
        if self.reductions > piece.number + 1 and weight.applied is None and (counts != counts[0]).any():
            # Every later pass rescales reduced gradients by its weights, whose sum is not 1 here.
            several = "several synchronised backward passes of a batch, in a step of batches that differ in size"
            self.loop.fail(f"{several}: write (loss1 + loss2).backward(), or all but the last under model.no_sync()")

    def _summed(self, weight: GradientWeight, bucket: Bucket) -> Future[Tensor] | None:
        """Torch's all-reduce on CPUs, as a sum of gradients times n_i / N; None if waiting at the end is impossible."""
        buffer, part, measure = bucket.buffer(), bucket.index(), self._measuring
        future: Future[Tensor] = Future()
        work: Any = None

        def arrive() -> None:
            self.ranks.wait_here(work, ADDED)
            self.recorder.timer.reduced()
            if measure:
                self._tell_norm("global_sq", buffer, 1.0, part)
            future.set_result(buffer)

        # One callback per bucket: a checkpointed part of the model has its own backward pass, which ends earlier.
        if not at_end_of_backward(arrive):
            return None
        weight.enter(buffer, 1)
        if weight.applied is not None:
            buffer.mul_(1.0 / self.group.size())
        self.recorder.timer.gradients_ready()
        # `dist.all_reduce` would look up in every step what is known here.
        work = self.group.allreduce([torch.view_as_real(buffer) if buffer.is_complex() else buffer], _ADD)
        if bucket.is_last():
            self.loop.reduced()
        return future

    def _reduced(self, weight: GradientWeight, bucket: Bucket) -> Future[Tensor]:
        buffer, part, measure = bucket.buffer(), bucket.index(), self._measuring
        weight.enter(buffer, self.group.size())
        self.recorder.timer.gradients_ready()
        future = self.inner.reduce(bucket, dense=measure and not self.inner.lossless)
        if bucket.is_last():
            self.loop.reduced()

        def done(reduced: Future[Tensor]) -> Tensor:
            value = reduced.value()
            value = value[0] if isinstance(value, (list, tuple)) else value
            self.recorder.timer.reduced()
            if measure:
                self._tell_norm("global_sq", value, 1.0, part)
            return value

        return cast("Future[Tensor]", future.then(done))

    def register(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Register with DDP, which allows one hook only, and has no way to ask whether it has one."""
        hook, ddp = weakref.ref(self), weakref.ref(model)  # weak: garbage collection does not see C++

        def entry(state: Any, bucket: Bucket) -> Future[Tensor]:
            own, held = hook(), ddp()
            if own is None or own.closed:
                raise UsageError(f"the model's controller is closed: {_ANEW}")
            return own(bucket, static_graph=held is not None and held.static_graph)

        entry.__annotations__.clear()
        try:
            model.register_comm_hook(None, entry)
        except RuntimeError as error:
            # DDP also keeps the hook that it refuses.
            if sum(getattr(hook, "__code__", None) is entry.__code__ for hook, _ in model._comm_hooks) > 1:
                raise UsageError(f"the model was given to an earlier controller: {_ANEW}") from error
            fix = "pass it as controller.wrap(model, optimizer, hook=hook, hook_state=state)"
            remove = "remove your register_comm_hook(state, hook) line"
            problem = "the model already has a communication hook, and DDP allows one"
            raise UsageError(f"{problem}: {remove} and {fix}") from error

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        self.piece = None

    def round_done(self, done: Round) -> None:
        self.steps, self.reductions, self._since_dense = self.steps + 1, 0, self._since_dense + 1
        if self.inner.chained and self.steps >= 2:  # now the bucket layout is known
            self.make_groups()

    def make_groups(self) -> None:
        """Create a group for each bucket if the hook chains collectives. A collective call."""
        self.inner.make_groups(self.buckets_seen)

    def close(self) -> list[dist.ProcessGroup]:
        """Release the buckets' groups, and return them. DDP cannot remove the hook, so its next pass raises."""
        self.closed = True
        return self.inner.close()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "since_dense": self._since_dense, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._since_dense = state["steps"], state["since_dense"]
        self.inner.load_state_dict(state["inner"])

    def _tell_norm(self, name: str, values: Tensor, weight: float | Tensor, part: int) -> None:
        """Record the square of the norm of `values` divided by `weight`."""
        if not self._measured:
            return
        if values.is_sparse:
            values = values.coalesce().values()
        norm = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)) / weight
        scale = getattr(self._scaler, "_scale", None)  # get_scale() would synchronise the device
        self.recorder.add(name, torch.square(norm if scale is None else norm / scale.to(norm.device)), part=part)


def at_end_of_backward(call: Callable[[], None]) -> bool:
    """Run `call` when autograd is done, before DDP waits: errors raised later lose their type, and name no rank.

    Returns False before autograd has begun: DDP reduces buckets at once if none of their parameters leads to an output.
    """
    try:
        cast(Any, Variable._execution_engine).queue_callback(call)
    except RuntimeError:
        return False
    return True
