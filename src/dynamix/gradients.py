"""Gradients of unequal batches: weighting in DDP's communication hook, noise scale, model averaging.

The gradient of the union batch is g = sum_i (n_i / N) g_i, with g_i the gradient of worker i's mean loss over n_i
samples. DDP averages over W workers, so each worker's gradient is multiplied by n_i * W / N before it is reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dynamix.errors import ConfigError, UsageError
from dynamix.window import Floats

Hook = Callable[[Any, Bucket], "Future[Tensor]"]

# One collective each and no memory: non-finite values pass through them to every rank, as in plain DDP.
_SINGLE_COLLECTIVE = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)
# A lossy hook hides the true |g|: one step in this many is reduced densely to measure the noise scale.
DENSE_EVERY = 50


def scale_(values: Tensor, count: float, total: float, workers: int) -> Tensor:
    """Multiply `values` in place by count * workers / total; a count of 0 zeroes them (0 * NaN would stay NaN)."""
    if count == 0:
        return values.zero_()
    return values.mul_(count * workers / total)


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

    def add(self, name: str, value: Tensor, *, part: int = 0) -> None: ...


@dataclass(frozen=True, slots=True)
class Share:
    """How this rank's gradient of the current optimizer step enters the mean."""

    count: float  # n_i of the micro-step being reduced; 0 for a placeholder batch
    total: float  # N; count * W / total is the weight
    kept: bool = True  # whether the open window will keep this step's measurements
    applied: float | Tensor | None = None  # the weight already in the loss, None when the hook must apply it


class GradientHook:
    """The one communication hook DDP allows: weights, wraps the user's hook, measures norms and times.

    share     says how the current step is weighted
    inner     the user's hook and its state; torch's all-reduce when None. A true attribute `lossless` of the hook says that
              its result is the mean itself and that it copes with infinities on its own
    meter     receives timing marks and squared norms ("local_sq", "global_sq", per bucket)
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        share: Callable[[], Share],
        meter: Meter,
        inner: Hook | None,
        inner_state: Any,
    ) -> None:
        self.group, self.share, self.meter = group, share, meter
        self.inner, self.inner_state = inner, inner_state
        self.chained = inner is not None and inner not in _SINGLE_COLLECTIVE
        # A hook that says so gives the true mean and agrees on finiteness by itself.
        self.lossless = inner is None or inner is default_hooks.allreduce_hook or getattr(inner, "lossless", False)
        self.needs_groups = self.chained and dist.get_backend(group) == "gloo"
        self.bucket_groups: list[dist.ProcessGroup] = []
        self.buckets_seen = 0
        self.steps = 0
        self.loss_scale: Callable[[], Tensor | None] = lambda: None
        self.muted = False  # discarded warm-up passes: plain all-reduce, nothing measured
        self._measuring, self._since_dense = False, DENSE_EVERY

    def __call__(self, state: Any, bucket: Bucket) -> Future[Tensor]:
        if self.muted:
            self.buckets_seen = max(self.buckets_seen, bucket.index() + 1)
            buffer = bucket.buffer()
            return self._reduce_sparse(buffer) if buffer.is_sparse else default_hooks.allreduce_hook(self.group, bucket)
        share, buffer, part = self.share(), bucket.buffer(), bucket.index()
        if share.count != 0:
            self.meter.add(
                "local_sq", self._norm_sq(buffer, 1.0 if share.applied is None else share.applied), part=part
            )
        if share.applied is None:
            scale_(buffer, share.count, share.total, self.group.size())
        elif share.count == 0:
            # A loss times 0 left zeros, and 0 * NaN where the placeholder's gradient was not finite. Zeroing all would
            # take away what was already reduced, in a loop that synchronises every micro-batch.
            wipe_nonfinite_(buffer)
        self.buckets_seen = max(self.buckets_seen, bucket.index() + 1)
        if bucket.index() == 0:
            self._measuring = self.lossless or (share.kept and self.steps >= 2 and self._since_dense >= DENSE_EVERY)
        measure = self._measuring
        self.meter.gradients_ready()
        future = self._reduce(bucket, dense=measure and not self.lossless)

        def done(reduced: Future[Tensor]) -> Tensor:
            value = reduced.value()
            value = value[0] if isinstance(value, (list, tuple)) else value
            self.meter.reduced()
            if measure:
                self.meter.add("global_sq", self._norm_sq(value, 1.0), part=part)
            return value

        return cast("Future[Tensor]", future.then(done))

    def register(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Register with DDP, which refuses a second hook and has no getter to ask whether there is one."""

        def entry(state: Any, bucket: Bucket) -> Future[Tensor]:
            return self(state, bucket)

        entry.__annotations__.clear()
        try:
            model.register_comm_hook(None, entry)
        except RuntimeError as error:
            raise UsageError(
                "the model already has a communication hook, and DDP allows one: remove your register_comm_hook(state, hook) "
                "line and pass it as controller.wrap(model, optimizer, hook=hook, hook_state=state)"
            ) from error

    def step_done(self) -> None:
        """After an optimizer step: the bucket layout is known by now, so give chained hooks their groups."""
        self.steps += 1
        self._since_dense = 0 if self._measuring else self._since_dense + 1
        if self.steps >= 2:
            self.make_groups()

    def make_groups(self) -> None:
        """One process group per bucket for hooks that chain collectives on gloo. A collective call."""
        if self.needs_groups and len(self.bucket_groups) < self.buckets_seen:
            ranks = dist.get_process_group_ranks(self.group)
            missing = self.buckets_seen - len(self.bucket_groups)
            self.bucket_groups += [new_gloo_group(ranks) for _ in range(missing)]

    def state_dict(self) -> dict[str, Any]:
        """The user's hook state (error memories and the like) and the step count."""
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
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return self._reduce_sparse(buffer)
        if self.inner is None or dense:
            return default_hooks.allreduce_hook(self.group, bucket)
        if not self.chained:
            state = self.inner_state if self.inner_state is not None else self.group
            return self.inner(state, bucket)
        if self.needs_groups and bucket.index() >= len(self.bucket_groups):
            return default_hooks.allreduce_hook(self.group, bucket)  # before the rebuild: layout not known yet
        group = self.bucket_groups[bucket.index()] if self.needs_groups else self.group
        if not self.lossless:
            finite = torch.isfinite(buffer).all().to(torch.float32)
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

    def _reduce_sparse(self, buffer: Tensor) -> Future[Tensor]:
        """Sum a sparse bucket: natively on gloo, densely elsewhere (compressing hooks cannot take it)."""
        workers = self.group.size()
        native = dist.get_backend(self.group) == "gloo"
        payload = (buffer if native else buffer.to_dense()).div_(workers)
        work = dist.all_reduce(payload, group=self.group, async_op=True)
        assert work is not None

        def finish(reduced: Future[Any]) -> Tensor:
            value = cast(Tensor, reduced.value()[0])
            return value if native else value.to_sparse(buffer.sparse_dim())

        return cast("Future[Tensor]", work.get_future().then(finish))

    def _norm_sq(self, values: Tensor, weight: float | Tensor) -> Tensor:
        if values.is_sparse:
            values = values.coalesce().values()
        wide = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(values, dtype=wide) / weight
        scale = self.loss_scale()
        return torch.square(norm if scale is None else norm / scale.to(norm.device))


def _plain_state(state: Any) -> dict[str, Any] | None:
    """The attributes of a hook state that has no `state_dict` (PowerSGDState), without its process group."""
    if state is None or isinstance(state, dist.ProcessGroup):
        return None
    slots = getattr(type(state), "__slots__", None)
    names = slots if slots is not None else vars(state)
    return {name: getattr(state, name) for name in names if name != "process_group" and hasattr(state, name)}


def new_gloo_group(ranks: list[int], timeout: Any = None) -> dist.ProcessGroup:
    """A gloo group over `ranks`; a collective of those ranks alone."""
    subset = len(ranks) != dist.get_world_size()
    options: dict[str, Any] = {"use_local_synchronization": True} if subset else {}
    if timeout is not None:
        options["timeout"] = timeout
    return cast(dist.ProcessGroup, dist.new_group(ranks, backend="gloo", **options))


# ---------------------------------------------------------------- noise scale


class NoiseScale:
    """tr(Sigma) and |G|^2 from gradients of unequal batches; their ratio is the gradient noise scale, in samples.

    With worker means g_i over b_i samples and the applied g = sum_i w_i g_i (w_i = b_i/B up to token counts),
    E|g_i|^2 = G2 + S/b_i and E|g|^2 = G2 + S sum w_i^2/b_i. The pooled scatter gives

        S = (sum w_i |g_i|^2 - |g|^2) / (sum w_i/b_i - sum w_i^2/b_i),   G2 = |g|^2 - S sum w_i^2/b_i

    which at w_i = b_i/B is the within-group variance estimator: unbiased for any split, and of least variance for
    Gaussian gradients, hence never worse than inverse-variance weighting of per-worker estimates (Cannikin, arXiv
    2402.05302, tested against it). Numerator and denominator are smoothed separately.

    decay   weight of the past per update, in [0, 1)
    """

    def __init__(self, decay: float = 0.8) -> None:
        self.decay = decay
        self._noise = self._signal = self._mass = 0.0

    @staticmethod
    def estimate(
        local_sq: Floats, global_sq: float, batch: Floats, weight: Floats | None = None
    ) -> tuple[float, float]:
        """(S, G2) of one measurement; NaN unless two workers or more were active. Arrays of shape (W,).

        >>> NoiseScale.estimate(np.array([5.0, 3.0]), 2.0, np.array([2.0, 4.0]))
        (10.0, 0.3333333333333335)
        """
        active = (batch > 0) & np.isfinite(local_sq)
        if active.sum() < 2 or not np.isfinite(global_sq):
            return float("nan"), float("nan")
        b, sq = batch[active].astype(np.float64), local_sq[active]
        w = b / b.sum() if weight is None else weight[active] / weight[active].sum()
        pooled = float((w * w / b).sum())
        noise = (float((w * sq).sum()) - global_sq) / (float((w / b).sum()) - pooled)
        return noise, global_sq - noise * pooled

    def update(self, noise: float, signal: float) -> None:
        """Blend in one estimate; NaN leaves the state alone."""
        if np.isfinite(noise) and np.isfinite(signal):
            self._noise = self.decay * self._noise + (1 - self.decay) * noise
            self._signal = self.decay * self._signal + (1 - self.decay) * signal
            self._mass = self.decay * self._mass + (1 - self.decay)

    @property
    def noise(self) -> float:
        """Smoothed tr(Sigma) per sample; NaN before the first update."""
        return max(self._noise / self._mass, 0.0) if self._mass else float("nan")

    @property
    def signal(self) -> float:
        """Smoothed |G|^2 (may be negative while the estimate is dominated by noise); NaN before the first update."""
        return self._signal / self._mass if self._mass else float("nan")

    def state_dict(self) -> dict[str, float]:
        return {"noise": self._noise, "signal": self._signal, "mass": self._mass}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._noise, self._signal, self._mass = state["noise"], state["signal"], state["mass"]


class ConsecutiveNoise:
    """The noise scale of a single worker, from pairs of consecutive gradients g, h of b samples each.

    S = b |g - h|^2 / 2 and G2 = g.h, as if the parameters stood still between the two (so a slight overestimate).
    Keeps one copy of the gradients. Results stay on the device; nothing synchronises.
    """

    def __init__(self) -> None:
        self._previous: tuple[list[Tensor], float] | None = None

    def observe(self, gradients: list[Tensor], batch: float) -> tuple[Tensor, Tensor] | None:
        """(S, G2) as 0-dim tensors at every second call with the same batch; None in between."""
        before, self._previous = self._previous, None
        if before is None or before[1] != batch or len(before[0]) != len(gradients):
            self._previous = ([g.detach().clone() for g in gradients], batch)
            return None
        apart = torch.stack([(g - h).float().square().sum() for g, h in zip(gradients, before[0], strict=True)]).sum()
        along = torch.stack([(g * h).float().sum() for g, h in zip(gradients, before[0], strict=True)]).sum()
        return batch * apart / 2, along


# ---------------------------------------------------------------- averaging


@torch.no_grad()
def weighted_average(model: nn.Module, count: float, *, group: dist.ProcessGroup | None = None) -> None:
    """Replace parameters and floating buffers by their mean over workers, weighted by `count`: model averaging.

    A collective call. `count` is the number of samples this worker has trained on since the last averaging (H steps);
    a worker with 0 contributes nothing and receives the average. With H = 1 and plain SGD this equals the weighted
    gradient (DBS, arXiv 2007.11831). Integer buffers are taken from the group's first rank. Raises `ConfigError`
    for a negative count, `UsageError` when no worker has a sample.
    """
    if not count >= 0:
        raise ConfigError("count", count, "0 or more", "pass the samples trained on since the last averaging")
    pg = group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD)
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.tensor(float(count), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=pg)
    if total.item() <= 0:
        raise UsageError("weighted_average: no worker has trained on a sample since the last averaging")
    first = dist.get_global_rank(pg, 0)
    for tensor in tensors:
        if tensor.is_floating_point():
            scale_(tensor, count, float(total.item()), 1)
            dist.all_reduce(tensor, group=pg)
        else:
            dist.broadcast(tensor, src=first, group=pg)


def average_buffers_hook(
    share: Callable[[], float], group: dist.ProcessGroup
) -> Callable[[Any, dict[str, Tensor]], None]:
    """A DDP buffer hook: floating buffers become their mean weighted by n_i/N instead of the first rank's.

    With unequal shares the first rank may hold the smallest batch and so the noisiest BatchNorm statistics.
    """
    first = dist.get_global_rank(group, 0)

    def hook(state: Any, buffers: dict[str, Tensor]) -> None:
        for tensor in buffers.values():
            if tensor.is_floating_point():
                dist.all_reduce(scale_(tensor, share(), 1.0, 1), group=group)
            else:
                dist.broadcast(tensor, src=first, group=group)

    return hook
