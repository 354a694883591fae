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
# A lossy hook hides the true |g|: one step in this many is reduced densely to measure the noise scale.
DENSE_EVERY = 50


@torch.no_grad()
def scale_(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply them in place; 0 zeroes them, whatever they hold (0 * NaN would stay NaN)."""
    for gradient in gradients if factor != 1.0 else ():
        gradient.mul_(factor) if factor else gradient.zero_()


def wipe_nonfinite_(values: Tensor) -> None:
    """NaN and infinity in `values` become 0, in place; a sparse tensor becomes 0 altogether."""
    if values.is_sparse:
        values.zero_()
    else:
        torch.nan_to_num_(values, nan=0.0, posinf=0.0, neginf=0.0)


def weighted(inner_hook: Hook, *, count: Callable[[], tuple[float, float]]) -> Hook:
    """A DDP communication hook that weights unequal batches before `inner_hook`: for users with their own loop.

    `count()` returns (n_i, N) of the optimizer step being reduced: this worker's divisor of the mean loss, and its sum
    over workers. Register with `model.register_comm_hook(state, dynamix.weighted(hook, count=...))`, `state` being
    `inner_hook`'s. `inner_hook` must average over workers, as torch's hooks do. Raises `ConfigError` from backward
    for counts that cannot be. On gloo with several buckets, hooks with more than one collective (PowerSGD) need
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

    hook.__annotations__.clear()  # DDP checks them, and takes strings for wrong types
    return hook


class Check(Protocol):
    """Hears of every synchronised backward pass, and may raise: the controller's check of the loop."""

    def fail(self, message: str) -> NoReturn: ...
    def covers(self, parameters: list[Tensor]) -> None: ...
    def reducing(self, piece: Piece | None) -> None: ...
    def reduced(self) -> None: ...


@dataclass(frozen=True)
class Around:
    """The job's services for a connected model.

    group     the data-parallel one; None: one process alone
    recorder  receives timing marks and, in the steps for which it wants them, squared norms ("local_sq", "global_sq",
              per bucket); norms of one model alone, the one that is `measured`
    weights   says what a loss carries of its weight
    watch     begins to watch the loop with it: says whether its gradients cross ranks, and whether a hook of the
              user's may apply them
    in_pieces   shares are cut by size, and gradients cross ranks with the last piece of a round
    """

    group: dist.ProcessGroup | None
    ranks: Ranks
    recorder: Recorder
    measured: bool
    weights: LossWeight
    watch: Callable[..., Check]
    in_pieces: bool


class GradientWeight:
    """How this rank's gradient of the pass under way enters the mean.

    count     samples of the piece being reduced; 0 for a placeholder batch
    total     N; count * W / total is the weight
    applied   the weight already in the loss, None when the hook must apply it
    over      what has accumulated over this rank's mean gradient
    """

    def __init__(self, piece: Piece, weights: LossWeight) -> None:
        own = piece.share / piece.samples if piece.by_size and piece.samples else 1.0
        self.count, self.total = float(piece.samples), piece.round.samples / weights.accumulate
        self.applied = weights.in_gradient(piece) if weights.given or weights.applied is not None else None
        self.over = own if self.applied is None else self.applied

    def enter(self, values: Tensor, workers: int) -> None:
        """Bring `values`, in place, to what so many workers are to take the mean of.

        A loss times 0 left zeros, and 0 * NaN where the placeholder's gradient was not finite. Zeroing all would take
        away what was already reduced, in a loop that synchronises every micro-batch.
        """
        if self.applied is None:
            values.mul_(self.count * workers / self.total) if self.count else values.zero_()
        elif not self.count:
            wipe_nonfinite_(values)


class GradientHook(Part):
    """The one communication hook DDP allows: weights, wraps the user's hook, measures norms and times.

    inner     the user's hook, or torch's all-reduce
    loop      is told of every backward pass, and may refuse it
    scaler    AMP's GradScaler, if there is one: norms are measured without its scale
    piece     of the passes under way

    The reductions are waited for at the end of a backward pass. Torch's own all-reduce on CPUs is waited for without
    another thread: the backend's threads then have nothing to do in Python, and one pass over the gradient does what
    weighting and averaging need.
    """

    def __init__(self, inner: InnerHook, around: Around, check: Check, *, scaler: Any) -> None:
        self.inner, self.loop, self.group, self._scaler = inner, check, inner.group, scaler
        self.weights, self.recorder, self.ranks = around.weights, around.recorder, around.ranks
        self._measured = around.measured
        self.closed = False  # its controller
        self.piece: Piece | None = None  # of the passes under way
        self._kept = False
        self.buckets_seen = 0
        self.steps = 0
        self.reductions = 0  # of the optimizer step under way
        self.crossed = 0  # backward passes so far
        self._under_way: list[Future[Tensor]] = []
        self._awaited = False  # that `_arrived` will be called in this backward pass
        self._norms_due = self._measuring = False
        self._since_dense = DENSE_EVERY

    def pass_begins(self, piece: Piece, kept: bool) -> None:
        self.piece, self._kept = piece, kept

    def __call__(self, bucket: Bucket, *, static_graph: bool) -> Future[Tensor]:
        """Reduce `bucket` of a model with a `static_graph` or without."""
        part, buffer = bucket.index(), bucket.buffer()
        if part == 0:
            self._under_way, self._awaited = [], False
        self.buckets_seen = max(self.buckets_seen, part + 1)
        if self.crossed <= 1:
            self.loop.covers(bucket.parameters())
        weight = None if self.recorder.muted else self.begin(part, buffer, first=part == 0)
        # In its first backward pass a static graph waits without calling what was to be called at the end.
        direct = self.inner.direct and not static_graph and buffer.is_cpu and not buffer.is_sparse
        if weight is not None and direct and (summed := self._summed(weight, bucket)) is not None:
            return summed
        future = self.inner.plainly(bucket) if weight is None else self._reduced(weight, bucket)
        self._awaited = self._awaited or at_end_of_backward(self._arrived)
        self._under_way.append(future)
        return future

    def _arrived(self) -> None:
        """Called at the end of backward. Raises another rank's error; `WorkerLostError` if one is lost."""
        futures, self._under_way = self._under_way, []
        for future in futures:
            self.ranks.wait(future, ADDED)

    def begin(
        self, part: int, values: Tensor, *, first: bool, measured: bool = True, divided: float = 1.0
    ) -> GradientWeight:
        """Before a part of the gradients is reduced: its weight, and its norm where that is due and it is `measured`.

        first     of a backward pass
        divided   `values` are this rank's gradients over that
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
        # What was reduced before has no weight of this loss, so then only the first reduction shows this rank's own.
        own = measured and weight.count != 0 and (weight.applied is None or self.reductions == 1)
        if own and (self._norms_due or self._measuring):
            self._tell_norm("local_sq", values, weight.over / divided, part)
        return weight

    def _again(self, piece: Piece, weight: GradientWeight) -> None:
        """A further pass of the round begins to cross ranks, of `piece`: whether norms are measured, or it may not."""
        if piece.of == 1 or piece.by_size:
            # Passes of one batch are one update's or several's: what the first has made is one gradient in both cases.
            self._norms_due = self._measuring = False
            return
        counts = piece.round.counts
        if self.reductions > piece.number + 1 and weight.applied is None and (counts != counts[0]).any():
            # What has crossed is rescaled by the weights of every pass that follows, whose sum is not 1 here.
            several = "several synchronised backward passes of a batch, in an optimizer step of unlike batches"
            self.loop.fail(f"{several}: write (loss1 + loss2).backward(), or all but the last under model.no_sync()")

    def _summed(self, weight: GradientWeight, bucket: Bucket) -> Future[Tensor] | None:
        """Torch's all-reduce on CPUs, as a sum of gradients times n_i / N; None where it could not be waited for."""
        buffer, part, measure = bucket.buffer(), bucket.index(), self._measuring
        future: Future[Tensor] = Future()
        work: Any = None

        def arrive() -> None:
            self.ranks.wait_here(work, ADDED)
            self.recorder.timer.reduced()
            if measure:
                self._tell_norm("global_sq", buffer, 1.0, part)
            future.set_result(buffer)

        # One for each bucket: where a checkpointed part of the model has a backward pass of its own, they end apart.
        if not at_end_of_backward(arrive):
            return None
        weight.enter(buffer, 1)
        if weight.applied is not None:
            buffer.mul_(1.0 / self.group.size())
        self.recorder.timer.gradients_ready()
        # `dist.all_reduce` looks up what is known here, in every step.
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
        """Register with DDP, which refuses a second hook and has no getter to ask whether there is one."""
        hook, ddp = weakref.ref(self), weakref.ref(model)  # what C++ holds no collector of garbage can see

        def entry(state: Any, bucket: Bucket) -> Future[Tensor]:
            own, held = hook(), ddp()
            if own is None or own.closed:
                raise UsageError(f"the model's controller is closed: {_ANEW}")
            return own(bucket, static_graph=held is not None and held.static_graph)

        entry.__annotations__.clear()
        try:
            model.register_comm_hook(None, entry)
        except RuntimeError as error:
            # DDP keeps the hook that it refuses, too.
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
        if self.inner.chained and self.steps >= 2:  # the bucket layout is known by now
            self.make_groups()

    def make_groups(self) -> None:
        """Give a chained hook a group for each bucket. A collective call."""
        self.inner.make_groups(self.buckets_seen)

    def close(self) -> list[dist.ProcessGroup]:
        """Let go of the groups of buckets, and return them. DDP cannot let go of the hook: its next pass fails."""
        self.closed = True
        return self.inner.close()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "since_dense": self._since_dense, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._since_dense = state["steps"], state["since_dense"]
        self.inner.load_state_dict(state["inner"])

    def _tell_norm(self, name: str, values: Tensor, weight: float | Tensor, part: int) -> None:
        """Let the recorder know the square of the norm of `values` over `weight`."""
        if not self._measured:
            return
        if values.is_sparse:
            values = values.coalesce().values()
        wide = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(values, dtype=wide) / weight
        scale = getattr(self._scaler, "_scale", None)  # get_scale() would synchronise the device
        square = torch.square(norm if scale is None else norm / scale.to(norm.device))
        self.recorder.add(name, square, part=part)


def at_end_of_backward(call: Callable[[], None]) -> bool:
    """Let `call` run when autograd is done, before DDP waits: what is raised later has lost its type, and names nobody.

    False before autograd has begun: DDP reduces at once the buckets of which no parameter leads to an output.
    """
    try:
        cast(Any, Variable._execution_engine).queue_callback(call)
    except RuntimeError:
        return False
    return True
