"""The communication hook passed to `wrap`, run on weighted gradients; without one, torch's own all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dynamix.errors import UsageError
from dynamix.runtime.ranks.process_groups import new_gloo_group, on_gloo
from dynamix.runtime.sync.holding import holding

Hook = Callable[[Any, Bucket], "Future[Tensor]"]

# One collective and no memory each: non-finite values reach every rank, as in plain DDP.
_SINGLE_COLLECTIVE = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
_HOOKS_THAT_STEP = ("_hook_then_optimizer.", "hook_with_zero_step.", "hook_with_zero_step_interleaved.")


class InnerHook:
    """A DDP hook with its state, over the ranks of `group`.

    hook      None: torch's all-reduce. It may have these attributes, true or false. `lossless`: its result is the exact
              mean, and it handles infinities. `takes_sparse`: it also reduces sparse gradients. `ordered`: it keeps its
              collectives in one order, on its own process groups
    device    type of the gradients' device

    chained   it makes several collectives, or keeps state
    alike     all ranks are known to get the same result
    native    gradients are sent over gloo, on CPUs
    direct    it is torch's all-reduce, and native
    """

    def __init__(self, group: dist.ProcessGroup, hook: Hook | None, state: Any, *, device: str = "cpu") -> None:
        self.group, self.hook, self.state = group, hook, state
        self.chained = hook is not None and hook not in _SINGLE_COLLECTIVE
        plain = hook is None or hook is default_hooks.allreduce_hook
        self.lossless = plain or getattr(hook, "lossless", False)
        self.alike = self.lossless or not self.chained
        self.native = on_gloo(group, device)
        self.direct = self.native and plain
        self._ordered = getattr(hook, "ordered", False)
        if self._ordered:
            _require_same_ranks(getattr(state, "process_group", group), group)
        self._needs_groups = self.chained and self.native and not self._ordered
        if self._needs_groups or not self.lossless:
            _require_no_step(hook)
        self._takes_sparse = getattr(hook, "takes_sparse", False)
        self._groups: list[dist.ProcessGroup] = []  # one per bucket

    def reduce(self, bucket: Bucket, *, dense: bool) -> Future[Tensor]:
        """Start to reduce `bucket`; `dense`: without the hook."""
        if self.hook is None or dense or (bucket.buffer().is_sparse and not self._takes_sparse):
            return self.plainly(bucket)
        if self._ordered:
            return self.hook(self.state, bucket)
        if not self.chained:
            return self.hook(self.group if self.state is None else self.state, bucket)
        if self._needs_groups and bucket.index() >= len(self._groups):
            return self.plainly(bucket)  # before the rebuild the layout is unknown
        group = self._groups[bucket.index()] if self._needs_groups else self.group
        if not self.lossless:
            finite = torch.isfinite(bucket.buffer()).all().to(torch.float32)
            dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
            if not bool(finite.item()):
                # An infinite step would stay in the hook's error memory for ever; GradScaler must see it instead.
                return default_hooks.allreduce_hook(group, bucket)
        return self._over(group, self.hook, bucket)

    def _over(self, group: dist.ProcessGroup, hook: Hook, bucket: Bucket) -> Future[Tensor]:
        state = self.state
        if not hasattr(state, "process_group"):
            return hook(group if state is None or isinstance(state, dist.ProcessGroup) else state, bucket)
        with holding(state, process_group=group):  # hooks read it once, at the start
            return hook(state, bucket)

    def plainly(self, bucket: Bucket) -> Future[Tensor]:
        """Torch's all-reduce; sparse buckets stay sparse on gloo only. Compressing hooks cannot reduce sparse ones."""
        buffer, native = bucket.buffer(), self.native
        if not buffer.is_sparse:
            return default_hooks.allreduce_hook(self.group, bucket)
        # A sparse gradient's values may be a view of memory that autograd passes to others; `div_` would write into it.
        payload = buffer / self.group.size() if native else buffer.to_dense().div_(self.group.size())
        work = dist.all_reduce(payload, group=self.group, async_op=True)
        assert work is not None

        def finish(reduced: Future[Any]) -> Tensor:
            value = cast(Tensor, reduced.value()[0])
            return value if native else value.to_sparse(buffer.sparse_dim())

        return cast("Future[Tensor]", work.get_future().then(finish))

    def make_groups(self, buckets: int) -> None:
        """Create a process group per bucket if the hook chains collectives on gloo. A collective call."""
        if self._needs_groups and (missing := range(len(self._groups), buckets)):
            ranks = dist.get_process_group_ranks(self.group)
            self._groups += [new_gloo_group(ranks) for _ in missing]

    def close(self) -> list[dist.ProcessGroup]:
        """Release the buckets' groups, and return them."""
        groups, self._groups = self._groups, []
        return groups

    def state_dict(self) -> Any:
        """The state's `state_dict()`; without one, as in PowerSGDState, its attributes except the process group."""
        state = self.state
        if hasattr(state, "state_dict"):
            return state.state_dict()
        if state is None or isinstance(state, dist.ProcessGroup):
            return None
        names = vars(state) if (slots := getattr(type(state), "__slots__", None)) is None else slots
        return {name: getattr(state, name) for name in names if name != "process_group" and hasattr(state, name)}

    def load_state_dict(self, saved: Any) -> None:
        if saved is None or self.state is None:
            return
        if hasattr(self.state, "load_state_dict"):
            self.state.load_state_dict(saved)
        else:
            for name, value in saved.items():
                setattr(self.state, name, value)


def _require_same_ranks(own: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    ours, theirs = (dist.get_process_group_ranks(one) for one in (group, own))
    if ours != theirs:
        fix = "make hook_state with process_group=, the one that the Controller has"
        raise UsageError(f"hook_state reduces over ranks {theirs}, the controller over {ours}: {fix}")


def _require_no_step(hook: Any) -> None:
    """Raise `UsageError` for a hook of torch that steps, if some reductions skip the user's hook."""
    if (name := getattr(hook, "__qualname__", "")).startswith(_HOOKS_THAT_STEP):
        does = f"{name.partition('.')[0]} steps the optimizer inside the communication hook"
        lost = "which some reductions skip (the first ones, and one in 50), so those steps would be left out"
        raise UsageError(f"{does}, {lost}: pass the hook inside it, and call optimizer.step() in the loop")
