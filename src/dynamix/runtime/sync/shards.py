"""FSDP2's (`fully_shard`) state of a model: its groups of parameters, and gradients that are not yet reduced over
ranks.

FSDP2 gathers a group's parameters before its passes and reduces its gradients after them. Without gradient sync the
gradients stay local, where neither `.grad` of the model's parameters nor `optimizer.zero_grad()` reaches them. So this
module reads torch's own state. It finds FSDP2 by name, because importing `torch.distributed.fsdp` takes a third of the
time of `import torch`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynamix.errors import UsageError
from dynamix.removed import message
from dynamix.runtime.sync.holding import holding

# The attributes that this module uses. If a version of torch lacks one, none is used.
_OF_GROUP = ("fsdp_params", "mesh_info", "post_forward_mesh_info", "reshard_after_backward", "_reduce_scatter_comm")
_OF_PARAMETER = ("sharded_param", "unsharded_accumulated_grad")
_EXCHANGES = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this module."""
    return _is_a(module, "FSDPModule")


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise `UsageError` for a model, or a part of one, under FSDP1, which torch itself deprecates."""
    if any(_is_a(module, "FullyShardedDataParallel") for module in model.modules()):
        fix = message("fully_shard(net), of torch.distributed.fsdp, in place of FullyShardedDataParallel(net)")
        raise UsageError(f"wrap() does not take FullyShardedDataParallel (FSDP1): {fix}")


def _is_a(module: nn.Module, name: str) -> bool:
    return any(k.__name__ == name and k.__module__.startswith("torch.distributed.") for k in type(module).__mro__)


class Shards:
    """The groups of parameters of `model`, in the order of its modules.

    modules    for each group, the module to which `fully_shard` was applied
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        found: dict[int, tuple[Any, Any]] = {}
        for module in filter(is_fully_sharded, model.modules()):
            for group in _groups_of(module):
                found.setdefault(id(group), (module, group))  # a group may have several modules
        self.modules = [module for module, _ in found.values()]
        self.groups = [group for _, group in found.values()]

    @classmethod
    def of(cls, model: nn.Module) -> "Shards | None":
        """The shards of `model`; None if this version of torch stores FSDP2's state differently."""
        try:
            shards = cls(model)
        except AttributeError:
            return None
        known = all(hasattr(group, name) for group in shards.groups for name in (*_OF_GROUP, *_EXCHANGES))
        return shards if known and all(hasattr(p, name) for p in shards.held() for name in _OF_PARAMETER) else None

    @property
    def device(self) -> torch.device:
        """The device on which the model trains."""
        return next((group.device for group in self.groups), torch.device("cpu"))

    def held(self) -> list[Any]:
        """FSDP2's record of each parameter."""
        return [p for group in self.groups for p in group.fsdp_params]

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, as the optimizer holds them."""
        return [p.sharded_param for p in self.held()]

    def reduced(self) -> list[Tensor]:
        """This rank's shards of the reduced gradients."""
        return [_local(p.grad) for p in self.parameters() if p.grad is not None]

    def kept_back(self) -> list[Tensor]:
        """This rank's gradients of whole parameters, which are not reduced yet."""
        found = [grad for p in self.held() for grad in (p.unsharded_accumulated_grad, getattr(_whole(p), "grad", None))]
        return [_local(grad) for grad in found if grad is not None]

    def drop(self) -> None:
        """Discard the gradients that are not reduced yet."""
        for p in self.held():
            p.unsharded_accumulated_grad = None
            if (whole := _whole(p)) is not None:
                whole.grad = None

    @contextmanager
    def staying_gathered(self) -> Iterator[None]:
        """Inside, gathered parameters stay gathered after forward and backward passes."""
        try:
            with ExitStack() as stack:
                for group in self.groups:
                    stack.enter_context(holding(group, post_forward_mesh_info=None, reshard_after_backward=False))
                yield
        finally:
            if getattr(self.model._get_fsdp_state(), "_auto_reshard_after_forward", False):
                for group in _groups_of(self.model):
                    group.post_forward_mesh_info = None  # as set by its first pass, which was inside

    def wrong_ranks(self, ours: list[int]) -> list[int] | None:
        """The ranks over which a group reduces, if they are not `ours`; None if all groups match."""
        for group in self.groups:
            sizes, theirs = 1, set[int]()
            for name in ("shard_process_group", "replicate_process_group"):
                if (over := getattr(group.mesh_info, name, None)) is not None:
                    sizes *= over.size()
                    theirs.update(dist.get_process_group_ranks(over))
            if sizes != len(ours) or not theirs <= set(ours):
                return sorted(theirs)
        return None

    def spread(self) -> int:
        """The largest number of ranks that hold parts of one parameter. With tensor parallelism, where a worker has
        several ranks, gradients are reduced over fewer ranks."""
        return max((int(p.device_mesh.size()) for p in self.parameters() if hasattr(p, "device_mesh")), default=1)

    def time_exchanges(self, timer: Any) -> None:
        """Let `timer` measure when each group gathers, reduces, and waits for either."""
        for group in self.groups:
            for name in _EXCHANGES:
                setattr(group, name, timer.exchanging()(getattr(group, name)))

    def stop_timing(self) -> None:
        """Undo `time_exchanges`."""
        for group in self.groups:
            for name in _EXCHANGES:
                group.__dict__.pop(name, None)


def gradients_of(model: nn.Module) -> list[Tensor]:
    """All accumulated gradients of `model`, as plain tensors of this rank that can be scaled in place."""
    if is_fully_sharded(model) and (shards := Shards.of(model)) is not None:
        of_fsdp = {id(of) for p in shards.held() for of in (p.sharded_param, _whole(p))}
        others = [p.grad for p in model.parameters() if id(p) not in of_fsdp and p.grad is not None]
        return [*shards.reduced(), *shards.kept_back(), *map(_local, others)]
    # Several parameters may share memory: list each once, and first the sparse gradients that are views of it.
    found = sorted((p.grad for p in model.parameters() if p.grad is not None), key=lambda g: not g.is_sparse)
    return list({id(g) if g.is_sparse else (_local(g).data_ptr(), g.numel()): g for g in found}.values())


def _groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    several, one = getattr(state, "_fsdp_param_groups", None), getattr(state, "_fsdp_param_group", None)
    return list(several) if several is not None else [] if one is None else [one]


def _whole(parameter: Any) -> Any:
    """The whole parameter that passes use, if it was ever gathered; it has the gradients that are not reduced yet."""
    return getattr(parameter, "_unsharded_param", None)


def _local(tensor: Any) -> Tensor:
    """This rank's part of a `DTensor`, which shares its memory; any other tensor unchanged."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
