"""A job that meets over parameters; optimizers, two of papers among them that remember numbers in their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from dynamix.runtime.sync.parameter_averaging import Averaging
from tests.runtime.jobs import Training, apart, classes
from tests.union import Script

SHARES = [[24, 8], [12, 20]]

MEMORY = ("k", "weight_sum", "lr_max", "d", "numerator", "past")  # what groups remember


class ScheduleFree(Optimizer):
    """SGD whose average takes the place of a schedule (arXiv 2405.15682): its weights are in the group."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9, warmup: int = 4) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["lr"] * min(1.0, (group["k"] + 1) / group["warmup"])
            group["lr_max"] = max(group["lr_max"], rate)
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            part, beta = weight / group["weight_sum"], group["beta"]
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, part).add_(p.grad, alpha=rate * (beta * (1 - part) - 1))
                z.sub_(p.grad, alpha=rate)
            group["k"] += 1


class InTensors(Optimizer):
    """Prodigy, which learns how far it has to go (arXiv 2306.06101, without moments); it knows that in tensors.

    One has a place for every step. Beside them is what a scheduler puts into a group.
    """

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            zero = torch.zeros((), dtype=torch.float64)
            group |= {"d": zero + d0, "numerator": zero, "past": torch.zeros(3, dtype=torch.float64)}
            group |= {"initial_lr": 0.1, "name": "all", "fused": None}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            d, denominator = float(group["d"]), 0.0
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                first, s = state.setdefault("p0", p.detach().clone()), state.setdefault("s", torch.zeros_like(p))
                group["numerator"] = group["numerator"] + d * group["lr"] * float((p.grad * (first - p)).sum())
                s.add_(p.grad, alpha=d * group["lr"])
                denominator += float(s.abs().sum())
                p.sub_(p.grad, alpha=d * group["lr"])
            if denominator:
                found = max(d, 2 * float(group["numerator"]) / denominator)
                group["d"] = torch.full_like(group["d"], found)
            group["past"] = torch.cat([group["past"][1:], group["d"].reshape(1)])


def nesterov(parameters: list[Tensor]) -> Optimizer:
    """For the mean of all workers' moves."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "schedule-free": ScheduleFree,
    "tensors": InTensors,
}


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def net() -> Any:
    """With the same weights on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def job(
    shares: list[list[int]] | str = "static",
    model: nn.Module | None = None,
    optimizer: Callable[[Any], Optimizer] = sgd,
    *,
    how: dict[str, Any] | None = None,
    scaler: Any = None,
    **options: Any,
) -> Training:
    """A training that meets over parameters; `how` they are averaged, and `options` of the controller."""
    model = net() if model is None else model
    x, y = classes(240).tensors
    data = TensorDataset(x.to(next(p.dtype for p in model.parameters() if p.is_floating_point())), y)
    controller = apart(shares if isinstance(shares, str) else Script(shares), **{"batch_size": 16, **options})
    given = {"optimizer": optimizer(model.parameters()), "sampling": {"seed": 1}}
    return Training(controller, data, model, **given, averaging=Averaging(**(how or {})), scaler=scaler)
