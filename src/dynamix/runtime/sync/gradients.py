"""Gradients of unequal batches: weighting in DDP's communication hook.

The gradient of the union batch is g = sum_i (n_i / N) g_i, with g_i the gradient of worker i's mean loss over n_i
samples. DDP averages over W workers, so each worker's gradient is multiplied by n_i * W / N before it is reduced.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.ranks.process_groups import new_gloo_group, on_gloo
from dynamix.runtime.ranks.ranks import ALONE, Ranks
from dynamix.runtime.sync.other_reductions import require_no_step

Hook = Callable[[Any, Bucket], "Future[Tensor]"]

# One collective each and no memory: non-finite values pass through them to every rank, as in plain DDP.
_SINGLE_COLLECTIVE = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
_ANEW = "train on with a new DistributedDataParallel around its module"
# A lossy hook hides the true |g|: one step in this many is reduced densely to measure the noise scale.
DENSE_EVERY = 50
NOT_ADDED = "the ranks could not add their gradients"


def scale_(values: Tensor, count: float, total: float, workers: int) -> Tensor:
    """Multiply `values` in place by count * workers / total; a count of 0 zeroes them (0 * NaN would stay NaN)."""
    if count == 0:
        return values.zero_()
    factor = count * workers / total
    return values if factor == 1.0 else values.mul_(factor)


def wipe_nonfinite_(values: Tensor) -> Tensor:
    """NaN and infinity in `values` become 0, in place; a sparse tensor becomes 0 altogether."""
    return values.zero_() if values.is_sparse else torch.nan_to_num_(values, nan=0.0, posinf=0.0, neginf=0.0)


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
        scale_(bucket.buffer(), n, total, _group_of(state).size())
        return inner_hook(state, bucket)

    hook.__annotations__.clear()  # DDP checks them, and takes strings for wrong types
    return hook


def _group_of(state: Any) -> dist.ProcessGroup:
    group = getattr(state, "process_group", state)
    return group if isinstance(group, dist.ProcessGroup) else cast(dist.ProcessGroup, dist.group.WORLD)


class Meter(Protocol):
    """What the hook reports to: the controller's recorder."""

    def gradients_ready(self) -> None: ...
    def reduced(self) -> None: ...
    def norms_due(self) -> bool: ...
    def add(self, name: str, value: Tensor, *, part: int = 0) -> None: ...


class Check(Protocol):
    """Who is told of every synchronised backward pass, and may raise: the controller's check of the loop."""

    def fail(self, message: str) -> None: ...
    def covers(self, parameters: list[Tensor]) -> None: ...
    def reducing(self) -> None: ...
    def reduced(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GradientWeight:
    """How this rank's gradient of the current optimizer step enters the mean."""

    count: float  # samples of the piece being reduced; 0 for a placeholder batch
    total: float  # N; count * W / total is the weight
    kept: bool = True  # whether the open window will keep this step's measurements
    applied: float | Tensor | None = None  # the weight already in the loss, None when the hook must apply it
    own: float = 1.0  # what has accumulated over this rank's mean gradient, when the hook applies the weight
    part: float = 0.0  # of the optimizer step's samples that are this rank's: over ranks they add up to 1


class GradientHook:
    """The one communication hook DDP allows: weights, wraps the user's hook, measures norms and times.

    share     says how the current step is weighted
    inner     the user's hook and its state; torch's all-reduce when None. A true attribute `lossless` of the hook says
              that its result is the mean itself and that it copes with infinities on its own, `takes_sparse` that it
              reduces sparse gradients, too, `ordered` that it has process groups of its own
    device    type of the gradients' device
    meter     receives timing marks and, in the steps for which it wants them, squared norms ("local_sq", "global_sq",
              per bucket)

    `arrivals` waits for the reductions at the end of a backward pass, `check` is told of them. Torch's own all-reduce
    on CPUs is waited for without it: the backend's threads then have nothing to do in Python, and one pass over the
    gradient does what weighting and averaging need.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        share: Callable[[], GradientWeight],
        meter: Meter,
        inner: Hook | None,
        inner_state: Any,
        *,
        device: str = "cpu",
        ranks: Ranks = ALONE,
    ) -> None:
        self.group, self.share, self.meter, self.ranks = group, share, meter, ranks
        self.inner, self.inner_state = inner, inner_state
        self.chained = inner is not None and inner not in _SINGLE_COLLECTIVE
        # A hook that says so gives the true mean and agrees on finiteness by itself.
        self.lossless = inner is None or inner is default_hooks.allreduce_hook or getattr(inner, "lossless", False)
        self.alike = self.lossless or not self.chained  # all ranks get the same, as far as is known
        self.native = on_gloo(group, device)
        # A hook that says so keeps its collectives in one order by itself, on groups of its own.
        self.ordered = getattr(inner, "ordered", False)
        if self.ordered:
            _require_same_ranks(getattr(inner_state, "process_group", group), group)
        self.needs_groups = self.chained and self.native and not self.ordered
        if self.needs_groups or not self.lossless:
            require_no_step(inner)
        self.takes_sparse = getattr(inner, "takes_sparse", False)
        self.direct = self.native and (inner is None or inner is default_hooks.allreduce_hook)
        self.bucket_groups: list[dist.ProcessGroup] = []
        self.buckets_seen = 0
        self.steps = 0
        self.reductions = 0  # of the optimizer step under way
        self.crossed = 0  # backward passes so far
        self.loss_scale: Callable[[], Tensor | None] = lambda: None
        self.muted = False  # discarded warm-up passes: plain all-reduce, nothing measured
        self.arrivals = ranks.arrivals()
        self.check: Check | None = None
        self._under_way: list[Future[Tensor]] = []
        self._awaited = False  # that `_arrived` will be called in this backward pass
        self._norms_due = self._measuring = False
        self._since_dense = DENSE_EVERY

    def __call__(self, state: Any, bucket: Bucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self._under_way, self._awaited = [], False
        share = self._begin(bucket)
        if share is not None and self.direct and bucket.buffer().is_cpu and not bucket.buffer().is_sparse:
            summed = self._summed(share, bucket)
            if summed is not None:
                return summed
        future = self._discarded(bucket) if share is None else self._reduced(share, bucket)
        self._awaited = self._awaited or at_end_of_backward(self._arrived)
        self._under_way.append(future)
        return future

    def _arrived(self) -> None:
        """At the end of backward. Raises what another rank ends the job with; `WorkerLostError` where one is lost."""
        futures, self._under_way = self._under_way, []
        self.arrivals.wait()
        with self.ranks.naming(NOT_ADDED):
            for future in futures:
                future.wait()

    def _begin(self, bucket: Bucket) -> GradientWeight | None:
        """Before a bucket is reduced; None while passes are discarded."""
        part = bucket.index()
        self.buckets_seen = max(self.buckets_seen, part + 1)
        if self.crossed <= 1 and self.check is not None:
            self.check.covers(bucket.parameters())
        return None if self.muted else self.begin(part, bucket.buffer(), first=part == 0)

    def begin(
        self, part: int, values: Tensor, *, first: bool, measured: bool = True, divided: float = 1.0
    ) -> GradientWeight:
        """Before a part of the gradients is reduced: its weight, and its norm where that is due and it is `measured`.

        first     of a backward pass
        divided   `values` are this rank's gradients over that
        """
        if first and self.check is not None:
            self.check.reducing()
        share = self.share()
        self.reductions += first
        self.crossed += first
        if first and self.reductions == 1:
            due = self._norms_due = self.meter.norms_due()
            wanted = share.kept and self.steps >= 2 and self._since_dense >= DENSE_EVERY
            self._measuring = due if self.lossless else wanted
        # What was reduced before has no weight of this loss, so then only the first reduction shows this rank's own.
        own = measured and share.count != 0 and (share.applied is None or self.reductions == 1)
        if own and (self._norms_due or self._measuring):
            weight = share.own if share.applied is None else share.applied
            self.meter.add("local_sq", self._norm_sq(values, weight / divided), part=part)
        return share

    def _weighted_before(self, share: GradientWeight, buffer: Tensor) -> Tensor:
        """A loss times 0 left zeros, and 0 * NaN where the placeholder's gradient was not finite.

        Zeroing all would take away what was already reduced, in a loop that synchronises every micro-batch.
        """
        return buffer if share.count else wipe_nonfinite_(buffer)

    def _summed(self, share: GradientWeight, bucket: Bucket) -> Future[Tensor] | None:
        """Torch's all-reduce on CPUs, as a sum of gradients times n_i / N; None where it could not be waited for."""
        buffer, part, measure = bucket.buffer(), bucket.index(), self._measuring
        future: Future[Tensor] = Future()
        begun: list[dist.Work] = []

        def arrive() -> None:
            self.ranks.wait_here(begun.pop(), NOT_ADDED)
            self.meter.reduced()
            if measure:
                self.meter.add("global_sq", self._norm_sq(buffer, 1.0), part=part)
            future.set_result(buffer)

        # One for each bucket: where a checkpointed part of the model has a backward pass of its own, they end apart.
        if not at_end_of_backward(arrive):
            return None
        if share.applied is None:
            scale_(buffer, share.count, share.total, 1)
        else:
            self._weighted_before(share, buffer).mul_(1.0 / self.group.size())
        self.meter.gradients_ready()
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None
        begun.append(work)
        if self.check is not None and bucket.is_last():
            self.check.reduced()
        return future

    def _reduced(self, share: GradientWeight, bucket: Bucket) -> Future[Tensor]:
        buffer, part, measure = bucket.buffer(), bucket.index(), self._measuring
        if share.applied is None:
            scale_(buffer, share.count, share.total, self.group.size())
        else:
            self._weighted_before(share, buffer)
        self.meter.gradients_ready()
        future = self._reduce(bucket, dense=measure and not self.lossless)
        if self.check is not None and bucket.is_last():
            self.check.reduced()
        arrivals, failed = self.arrivals, True
        arrivals.expect()

        def done(reduced: Future[Tensor]) -> Tensor:
            nonlocal failed
            try:
                value = reduced.value()
                value = value[0] if isinstance(value, (list, tuple)) else value
                self.meter.reduced()
                if measure:
                    self.meter.add("global_sq", self._norm_sq(value, 1.0), part=part)
                failed = False
                return value
            finally:
                arrivals.arrived(failed=failed)

        return cast("Future[Tensor]", future.then(done))

    def register(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Register with DDP, which refuses a second hook and has no getter to ask whether there is one."""
        ddp = weakref.ref(model)  # what C++ holds no collector of garbage can see

        def entry(state: Any, bucket: Bucket) -> Future[Tensor]:
            if self.direct and (held := ddp()) is not None and held.static_graph:
                self.direct = False  # in its first backward DDP waits without calling what was to be called at the end
            return self(state, bucket)

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

    def step_done(self) -> None:
        """After an optimizer step: the bucket layout is known by now, so give chained hooks their groups."""
        self.steps, self.reductions = self.steps + 1, 0
        self._since_dense = 0 if self._measuring else self._since_dense + 1
        if self.steps >= 2:
            self.make_groups()

    def close(self) -> list[dist.ProcessGroup]:
        """Let go of the controller, as DDP cannot let go of this hook; returns the groups of buckets."""
        self.share, self.check = _closed, None
        groups, self.bucket_groups = self.bucket_groups, []
        return groups

    def make_groups(self) -> None:
        """One process group per bucket for hooks that chain collectives on gloo. A collective call."""
        if self.needs_groups and (missing := range(len(self.bucket_groups), self.buckets_seen)):
            ranks = dist.get_process_group_ranks(self.group)
            self.bucket_groups += [new_gloo_group(ranks) for _ in missing]

    def state_dict(self) -> dict[str, Any]:
        state = self.inner_state
        saved = state.state_dict() if hasattr(state, "state_dict") else _plain_state(state)
        return {"steps": self.steps, "since_dense": self._since_dense, "inner": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._since_dense = state["steps"], state["since_dense"]
        if state["inner"] is None or self.inner_state is None:
            return
        if hasattr(self.inner_state, "load_state_dict"):
            self.inner_state.load_state_dict(state["inner"])
        else:
            for name, value in state["inner"].items():
                setattr(self.inner_state, name, value)

    def _reduce(self, bucket: Bucket, *, dense: bool) -> Future[Tensor]:
        if self.inner is None or dense or (bucket.buffer().is_sparse and not self.takes_sparse):
            return self._plainly(bucket)
        if self.ordered:
            return self.inner(self.inner_state, bucket)
        if not self.chained:
            return self.inner(self.group if self.inner_state is None else self.inner_state, bucket)
        if self.needs_groups and bucket.index() >= len(self.bucket_groups):
            return self._plainly(bucket)  # before the rebuild: layout not known yet
        group = self.bucket_groups[bucket.index()] if self.needs_groups else self.group
        if not self.lossless:
            finite = torch.isfinite(bucket.buffer()).all().to(torch.float32)
            dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
            if not bool(finite.item()):
                # One infinite step would stay in the hook's error memory for ever; let GradScaler see it instead.
                return default_hooks.allreduce_hook(group, bucket)
        return self._inner_on(group, bucket)

    def _inner_on(self, group: dist.ProcessGroup, bucket: Bucket) -> Future[Tensor]:
        assert self.inner is not None
        state = self.inner_state
        if not hasattr(state, "process_group"):
            return self.inner(group if state is None or isinstance(state, dist.ProcessGroup) else state, bucket)
        users = state.process_group
        state.process_group = group  # hooks read it once, at their start
        try:
            return self.inner(state, bucket)
        finally:
            state.process_group = users

    def _plainly(self, bucket: Bucket) -> Future[Tensor]:
        """Torch's all-reduce; of a sparse bucket natively on gloo, densely elsewhere (compressing hooks cannot)."""
        buffer, native = bucket.buffer(), self.native
        if not buffer.is_sparse:
            return default_hooks.allreduce_hook(self.group, bucket)
        # The values of a sparse gradient may be a view of what autograd hands to others; `div_` writes into it.
        payload = buffer / self.group.size() if native else buffer.to_dense().div_(self.group.size())
        work = dist.all_reduce(payload, group=self.group, async_op=True)
        assert work is not None

        def finish(reduced: Future[Any]) -> Tensor:
            value = cast(Tensor, reduced.value()[0])
            return value if native else value.to_sparse(buffer.sparse_dim())

        return cast("Future[Tensor]", work.get_future().then(finish))

    def _discarded(self, bucket: Bucket) -> Future[Tensor]:
        """Of passes that are discarded: waited for as long as no other rank ends the job."""
        arrivals, future = self.arrivals, self._plainly(bucket)
        arrivals.expect()
        future.add_done_callback(lambda _: arrivals.arrived())
        return future

    def _norm_sq(self, values: Tensor, weight: float | Tensor) -> Tensor:
        if values.is_sparse:
            values = values.coalesce().values()
        wide = torch.promote_types(values.dtype, torch.float32)
        norm, scale = torch.linalg.vector_norm(values, dtype=wide) / weight, self.loss_scale()
        return torch.square(norm if scale is None else norm / scale.to(norm.device))


def at_end_of_backward(call: Callable[[], None]) -> bool:
    """Let `call` run when autograd is done, before DDP waits: what is raised later has lost its type, and names nobody.

    False before autograd has begun: DDP reduces at once the buckets of which no parameter leads to an output.
    """
    try:
        cast(Any, Variable._execution_engine).queue_callback(call)
    except RuntimeError:
        return False
    return True


def _require_same_ranks(own: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    ours, theirs = (dist.get_process_group_ranks(one) for one in (group, own))
    if ours != theirs:
        fix = "make hook_state with process_group=, the one that the Controller has"
        raise UsageError(f"hook_state reduces over ranks {theirs}, the controller over {ours}: {fix}")


def _closed() -> GradientWeight:
    raise UsageError(f"the model's controller is closed: {_ANEW}")


def _plain_state(state: Any) -> dict[str, Any] | None:
    """The attributes of a hook state that has no `state_dict` (PowerSGDState), without its process group."""
    if state is None or isinstance(state, dist.ProcessGroup):
        return None
    names = vars(state) if (slots := getattr(type(state), "__slots__", None)) is None else slots
    return {name: getattr(state, name) for name in names if name != "process_group" and hasattr(state, name)}
