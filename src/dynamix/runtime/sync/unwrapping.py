"""Finds the model and optimizer inside a framework's wrappers, because weights apply to the inner module."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynamix.runtime.sync.shards import is_fully_sharded

_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


def inner_model(model: nn.Module) -> nn.Module:
    """The module under DDP or FSDP2 inside a compiled, Fabric or Accelerate model; any other module unchanged.

    The wrappers are `torch.compile`'s (`_orig_mod`) and Fabric's (`_forward_module`). A compiled plain module is
    returned unchanged, because the trained module is the same.

    >>> net = nn.Linear(1, 1)
    >>> inner_model(net) is net
    True
    """
    found = model
    while not (isinstance(found, DistributedDataParallel) or is_fully_sharded(found)):
        inside = getattr(found, "_forward_module" if type(found).__name__ == "_FabricModule" else "_orig_mod", None)
        if not isinstance(inside, nn.Module):
            return model
        found = inside
    return found


def inner_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside one that a framework has prepared (Accelerate, Fabric, Lightning).

    >>> from torch.optim import SGD
    >>> optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    >>> inner_optimizer(optimizer) is optimizer
    True
    """
    inside = getattr(optimizer, "optimizer", None)
    prepared = type(optimizer).__module__.partition(".")[0] in _FRAMEWORKS and isinstance(inside, Optimizer)
    return inner_optimizer(inside) if prepared else optimizer
