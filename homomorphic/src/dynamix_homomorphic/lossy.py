"""LOSSY, before the lossless exchange: only the largest gradients are sent, the rest is added to the next step's.

    state = LossyState(net, keep=0.01, hook_state=CompressionState("compaction"))
    model.register_comm_hook(state, lossy_hook)            # or Controller.wrap(..., hook=lossy_hook, hook_state=state)

Unlike everything else here this changes training: a step applies the mean over ranks of what they sent, not of their
gradients. Error feedback (Seide et al. 2014; Stich et al., arXiv 1809.07599; Karimireddy et al., arXiv 1901.09847)
carries the rest to the next step, so that nothing is lost for good:

    sum over steps of what was applied + mean over ranks of what they still hold = sum over steps of the mean gradient

up to the rounding of each step's additions.

Top-k is as in Stich et al., a fixed threshold as in Dutta et al. (arXiv 2108.00951). The sent gradient is mostly zeros.
The lossless hook that follows (`compression_hook`) exchanges it as index and values without a further loss.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dynamix.compression.hooks import compression_hook
from dynamix.errors import ConfigError, StateError, UsageError

Hook = Callable[[Any, Bucket], "Future[Tensor]"]
LossScale = Callable[[], float] | None
Held = list[tuple[str, Tensor]]  # by parameter: the rest that this rank will hold if the step is applied


class ErrorFeedback:
    """The rest of the gradients that one rank has not sent yet, by parameter. No communication.

    keep         fraction of a parameter's elements to send, those of largest magnitude; at least one of them
    threshold    instead: send every element of at least this magnitude
    loss_scale   returns the current factor of the gradients (`scaler.get_scale`). The rest is held without it, so that
                 a changed scale does not change it; exact if scales are powers of two, as a GradScaler's are

    >>> feedback, gradient = ErrorFeedback(keep=0.25), torch.tensor([1.0, -4.0, 2.0, 3.0])
    >>> items, held = feedback.take_(gradient, "weight")
    >>> gradient.tolist(), held.tolist()
    ([0.0, -4.0, 0.0, 0.0], [1.0, 0.0, 2.0, 3.0])
    """

    def __init__(
        self, *, keep: float | None = None, threshold: float | None = None, loss_scale: LossScale = None
    ) -> None:
        if (keep is None) == (threshold is None):
            raise ConfigError("keep, threshold", (keep, threshold), "exactly one of them", "keep=0.01 sends 1 %")
        if keep is not None and not 0 < keep <= 1:
            raise ConfigError("keep", keep, "above 0, up to 1", "0.01 sends 1 % of the elements")
        if threshold is not None and not 0 < threshold < math.inf:
            raise ConfigError("threshold", threshold, "above 0 and finite", "give the least magnitude worth sending")
        self.keep, self.threshold, self.loss_scale = keep, threshold, loss_scale
        self.memory: dict[str, Tensor] = {}

    def take_(self, part: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Leave in `part`, the gradient (n,) of parameter `name`, only what is sent; the rest becomes zero.

        Returns the positions to send, int64 (k,), and the rest to hold, (n,) in float32 or float64: gradient plus held
        rest minus what is sent, with the rounding of half types. It is stored only by `commit`. NaN and infinity are
        always sent. Raises `StateError` if the held rest has another shape.
        """
        scale = 1.0 if self.loss_scale is None else float(self.loss_scale())
        held = part.detach().to(torch.float64 if part.dtype == torch.float64 else torch.float32, copy=True).div_(scale)
        before = self.memory.get(name)
        if before is not None:
            if before.shape != held.shape:
                sizes = f"{name} has {held.numel()} elements, the memory that was loaded for it {before.numel()}"
                raise StateError(f"{sizes}: load the state_dict of this model")
            held.add_(before.to(device=held.device, dtype=held.dtype))
        items = self._largest(held)
        sent = (held[items] * scale).to(part.dtype)
        part.zero_()[items] = sent
        held[items] -= sent.to(held.dtype) / scale
        return items, held

    def commit(self, held: Held) -> None:
        """Store the rest, after the sent part has been applied."""
        self.memory.update(held)

    def _largest(self, values: Tensor) -> Tensor:
        magnitude = values.abs()
        if self.threshold is not None:
            return (~(magnitude < self.threshold)).nonzero().squeeze(1)  # NaN is not less than anything
        assert self.keep is not None
        n = values.numel()
        k = max(1, math.ceil(self.keep * n - 1e-9))
        if k >= n:
            return torch.arange(n, device=values.device)
        if magnitude.device.type == "cpu":
            return torch.from_numpy(_largest_of(magnitude.numpy(), k))
        return torch.topk(magnitude, k, sorted=False).indices


def _largest_of(magnitude: NDArray[Any], k: int) -> NDArray[np.int64]:
    """The places of the k largest of (n,), in any order; NaN counts as the largest. It takes a third to a sixth of
    `torch.topk`'s time. Equal values make a partition slow, so if most are zero it searches only the others."""
    n = len(magnitude)
    if 2 * np.count_nonzero(magnitude) > n:
        return np.argpartition(magnitude, n - k)[n - k :]
    found = np.flatnonzero(magnitude)
    if len(found) > k:
        return np.asarray(found[np.argpartition(magnitude[found], len(found) - k)[len(found) - k :]])
    return np.concatenate([found, np.flatnonzero(magnitude == 0)[: k - len(found)]])


class LossyState:
    """The state of `lossy_hook` and `lossy_topk_hook`: error feedback, and the hook that exchanges what is sent. LOSSY.

    model        the owner of the parameters; their names are the keys of the saved state
    keep, threshold, loss_scale   as in `ErrorFeedback`; pass `loss_scale=scaler.get_scale` with a GradScaler
    hook, hook_state   for `lossy_hook`: averages the sparse bucket. Use `compression_hook` with a `CompressionState`
                 made without `model=`, because single elements remain, or any other hook that averages over ranks

    The rest is held in float32 (float64 for such parameters): one more copy of the model on each rank. Selection is by
    parameter, so neither DDP's buckets nor their rebuilding change what is sent.

    *Unequal batches*: gradients reach this hook weighted by n_i W/N, and are held weighted, so the sum in the module's
    docstring is that of the weighted means. A rank without a share keeps sending what it holds. *Accumulation*: under
    `no_sync` DDP calls no hook; the sum of the micro-batches is one gradient. *Not finite*: if a bucket's mean is not
    finite, it is so on all ranks, and every rank keeps what it held before. A GradScaler sees the infinity and skips
    the step. What the step's other buckets sent is lost with it, as their gradients would have been.

    `state_dict()` differs between ranks: save and load it on each. It includes the state of `hook_state` if that has
    one. If it is loaded with fewer ranks, what the removed ranks held is lost.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        keep: float | None = None,
        threshold: float | None = None,
        hook: Hook = compression_hook,
        hook_state: Any = None,
        loss_scale: LossScale = None,
    ) -> None:
        self.feedback = ErrorFeedback(keep=keep, threshold=threshold, loss_scale=loss_scale)
        self.hook, self.hook_state = hook, hook_state
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._group: dist.ProcessGroup | None = hook_state if isinstance(hook_state, dist.ProcessGroup) else None
        self._names: dict[tuple[int, ...], list[tuple[str, int]]] = {}

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that reduces. Setting it (the controller does, once per bucket) sets the inner state's too."""
        if hasattr(self.hook_state, "process_group"):
            return cast(dist.ProcessGroup, self.hook_state.process_group)
        return self._group or cast(dist.ProcessGroup, dist.group.WORLD)

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup) -> None:
        self._group = group
        if hasattr(self.hook_state, "process_group"):
            self.hook_state.process_group = group

    def sparsify_(self, bucket: Bucket) -> tuple[Tensor, Held]:
        """Leave in the bucket what this rank sends. Returns its positions, int64 (k,), and the rest to hold."""
        flat, at = bucket.buffer(), 0
        chosen, held = [torch.empty(0, dtype=torch.int64, device=flat.device)], []
        for name, n in self._named(bucket):
            items, left = self.feedback.take_(flat[at : at + n], name)
            chosen.append(items + at)
            held.append((name, left))
            at += n
        return torch.cat(chosen), held

    def settle(self, mean: Tensor, held: Held) -> Tensor:
        """Take the bucket's mean. If it is finite, which all ranks see alike, what was sent counts as sent."""
        if bool(torch.isfinite(mean).all()):
            self.feedback.commit(held)
        return mean

    def state_dict(self) -> dict[str, Any]:
        inner = self.hook_state.state_dict() if hasattr(self.hook_state, "state_dict") else None
        return {"memory": {name: held.clone() for name, held in self.feedback.memory.items()}, "inner": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.feedback.memory = {name: held.clone() for name, held in state["memory"].items()}
        if state["inner"] is not None and hasattr(self.hook_state, "load_state_dict"):
            self.hook_state.load_state_dict(state["inner"])

    def _named(self, bucket: Bucket) -> list[tuple[str, int]]:
        parameters = [p for p in bucket.parameters() if p.numel()]
        key = tuple(p.data_ptr() for p in parameters)
        if key not in self._names:
            names = {p.data_ptr(): name for name, p in self._model.named_parameters()}
            if not set(key) <= names.keys():
                raise UsageError("LossyState was made with another model: pass the one that DDP trains")
            self._names[key] = [(names[p.data_ptr()], p.numel()) for p in parameters]
        return self._names[key]


def lossy_hook(state: LossyState, bucket: Bucket) -> Future[Tensor]:
    """A DDP communication hook, LOSSY: sparsify with error feedback, then exchange by `state.hook`."""
    inner, group = state.hook_state, state.process_group
    if inner is None and state.hook is compression_hook:
        raise UsageError("lossy_hook needs LossyState(..., hook_state=CompressionState()), made on every rank")
    if inner is None or isinstance(inner, dist.ProcessGroup):
        inner = group
    if bucket.buffer().is_sparse:
        bucket.set_buffer(bucket.buffer().clone())  # it may be a view of other gradients, and hooks divide in place
        return state.hook(inner, bucket)
    _, held = state.sparsify_(bucket)
    return _then(state.hook(inner, bucket), lambda reduced: state.settle(reduced.value(), held))


def lossy_topk_hook(state: LossyState, bucket: Bucket) -> Future[Tensor]:
    """A DDP communication hook, LOSSY: every rank gathers and adds the largest elements of all, as index and value.

    One collective of W k (4 + element size) bytes: the usual top-k exchange, here for comparison. Needs `keep`, because
    all ranks must send equally many elements. `state.hook` is not used.
    """
    flat, group = bucket.buffer(), state.process_group
    if state.feedback.keep is None:
        raise ConfigError("threshold", state.feedback.threshold, "keep=", "use lossy_hook with a threshold")
    if flat.is_sparse:
        bucket.set_buffer(flat.clone())
        return default_hooks.allreduce_hook(group, bucket)
    items, held = state.sparsify_(bucket)
    index_bytes = 4 * items.numel()
    mine = torch.cat([items.to(torch.int32).view(torch.uint8), flat[items].view(torch.uint8)])
    everybodys = mine.new_empty(group.size() * mine.numel())
    work = dist.all_gather_into_tensor(everybodys, mine, group=group, async_op=True)
    assert work is not None

    def add(gathered: Future[Any]) -> Tensor:
        gathered.value()  # raises what the collective raised
        flat.zero_()
        for one in everybodys.view(group.size(), -1):
            index, values = one[:index_bytes].clone(), one[index_bytes:].clone()  # copied to align them
            flat.index_add_(0, index.view(torch.int32), values.view(flat.dtype), alpha=1 / group.size())
        return state.settle(flat, held)

    return _then(work.get_future(), add)


def _then(future: Future[Any], step: Callable[[Future[Any]], Tensor]) -> Future[Tensor]:
    return cast("Future[Tensor]", future.then(step))


lossy_hook.__annotations__.clear()  # DDP checks annotations, and rejects strings
lossy_topk_hook.__annotations__.clear()
