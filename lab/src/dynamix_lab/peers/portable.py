"""Workloads that an interpreter without dynamix can train, and their description for it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import SGD

from dynamix.errors import ConfigError
from dynamix_lab.peers.jobs.job import built
from dynamix_lab.tasks import Workload


def check_portable(workload: Workload) -> None:
    """Raise `ConfigError` if an interpreter without dynamix cannot train a workload: its layers and its loss must be
    torch's own, and its optimizer SGD with momentum."""
    model = workload.make_model(0)
    foreign = {type(m).__qualname__ for m in model.modules() if getattr(nn, type(m).__name__, None) is not type(m)}
    if not foreign and not _can_be_described(model):
        foreign = {"layers whose arguments cannot be read off them"}
    optimizer = workload.make_optimizer(model.parameters())
    foreign |= {type(optimizer).__qualname__} - {SGD.__qualname__}
    foreign |= {workload.loss.__qualname__} if getattr(nn.functional, workload.loss.__name__, None) is None else set()
    if foreign:
        allowed = "one whose model, loss and optimizer (SGD) are torch's own, such as mnist1d or teacher"
        raise ConfigError("workload", f"{workload.name} ({', '.join(sorted(foreign))})", allowed, "take another")


def described(module: nn.Module) -> list[Any]:
    """The JSON from which `jobs.job.built` makes a network of torch's own layers, without weights.

    >>> described(nn.Sequential(nn.Flatten(), nn.ReLU()))
    ['Sequential', [['Flatten', {'start_dim': 1, 'end_dim': -1}], ['ReLU', {'inplace': False}]]]
    """
    if isinstance(module, nn.Sequential):
        return ["Sequential", [described(layer) for layer in module]]
    given: dict[str, Any] = {}
    for name in inspect.signature(type(module)).parameters:
        value = getattr(module, name, None)
        if name == "bias" and not isinstance(value, bool):
            value = value is not None  # a layer stores the tensor under the argument's name
        if isinstance(value, (bool, int, float, str, list, tuple)):
            given[name] = value
    return [type(module).__name__, given]


def _can_be_described(model: nn.Module) -> bool:
    try:
        return repr(built(described(model))) == repr(model)
    except TypeError:  # an argument that the layer does not store
        return False
