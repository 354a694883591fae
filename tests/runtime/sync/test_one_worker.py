"""One worker that trains in pieces, or accumulates: what its optimizer applies is the gradient of the whole batch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.runtime.jobs import adaptive, classes
from tests.union import Script, larger

PIECES = {"batch_size": 30, "micro_batch": 8}
ACCUMULATED = {"batch_size": 5, "accumulate": 3}


class Alone:
    """A job of `models`, beside the first of which is a temperature of the loss.

    pieces   whether passes are under `controller.piece()`
    limit    what norms of gradients are clipped to
    """

    def __init__(self, options: dict[str, int], *, models: int = 1, pieces: bool = False, limit: float = 1e9) -> None:
        torch.manual_seed(0)
        x, y = classes(200).tensors
        self.data, self.pieces, self.limit = TensorDataset(x.double(), y), pieces, limit
        answers = [[30], [17]] if "micro_batch" in options else [[15]]
        self.controller = adaptive(Script(answers), max_batch_size=64, **options)
        nets = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(models))
        self.nets: list[Any] = [net.double() for net in nets]
        self.beside = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.parameters = [[*net.parameters(), *([] if n else [self.beside])] for n, net in enumerate(self.nets)]
        self.optimizers = [torch.optim.SGD(parameters, lr=0.05) for parameters in self.parameters]

    def wrap(self) -> None:
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            self.controller.wrap(net, optimizer)

    def loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        return loss * torch.exp(-self.beside) + self.beside if net is self.nets[0] else loss

    def train(self) -> float:
        """How far what is applied is from the gradient of whole batches, clipped."""
        dealt, furthest = list[tuple[Tensor, Tensor]](), 0.0
        for x, y in DataLoader(self.data, batch_sampler=self.controller.batch_sampler(self.data)):
            dealt.append((x, y))
            for net, parameters, optimizer in zip(self.nets, self.parameters, self.optimizers, strict=True):
                with self.controller.piece() if self.pieces else contextlib.nullcontext():
                    (self.loss(net, x, y) / self.controller.accumulate).backward()
                if self.controller.optimizer_due:
                    whole = self.loss(net, *(torch.cat(part) for part in zip(*dealt, strict=True)))
                    wanted = torch.autograd.grad(whole, trained := [p for p in parameters if p.requires_grad])
                    norm = torch.nn.utils.clip_grad_norm_(trained, self.limit)
                    furthest = larger(furthest, float((norm - torch.nn.utils.get_total_norm(wanted)).abs()))
                    for p, true in zip(trained, wanted, strict=True):
                        applied = torch.zeros(()) if p.grad is None else p.grad
                        clipped = true * (self.limit / (norm + 1e-6)).clamp(max=1.0)  # as torch has it
                        furthest = larger(furthest, float((applied - clipped).abs().max()))
                    optimizer.step()
                    optimizer.zero_grad()
            if self.controller.optimizer_due:
                dealt.clear()
            self.controller.step()
        self.controller.close()
        return furthest


@pytest.mark.parametrize("options", [PIECES, ACCUMULATED], ids=str)
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize(("models", "limit"), [(1, 1e9), (2, 1e-2)])
def test_it_clips_and_applies_whole_gradients_of_every_model(
    options: dict[str, int], pieces: bool, models: int, limit: float
) -> None:
    alone = Alone(options, models=models, pieces=pieces, limit=limit)
    alone.wrap()
    assert alone.train() < 1e-10


@pytest.mark.parametrize("options", [PIECES, ACCUMULATED], ids=str)
def test_it_accumulates_what_is_thawed_after_wrap(options: dict[str, int]) -> None:
    alone = Alone(options)
    first, _, last = alone.nets[0]
    first.requires_grad_(False)
    alone.wrap()
    first.requires_grad_(True)
    last.requires_grad_(False)
    alone.beside.requires_grad_(False)
    assert alone.train() < 1e-10


def test_it_clips_what_is_applied_after_a_backward_pass_that_broke_off() -> None:
    alone = Alone(PIECES)
    alone.wrap()
    whole = alone.loss

    def breaks_off(net: Any, x: Tensor, y: Tensor) -> Tensor:
        if alone.controller.optimizer_due and alone.loss is breaks_off:
            alone.loss = whole  # type: ignore[method-assign]
            before = [None if p.grad is None else p.grad.clone() for p in alone.parameters[0]]
            hook = net[0].weight.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                whole(net, x, y).backward()
            hook.remove()
            for p, gradient in zip(alone.parameters[0], before, strict=True):
                p.grad = gradient
        return whole(net, x, y)

    alone.loss = breaks_off  # type: ignore[method-assign]
    assert alone.train() < 1e-10
