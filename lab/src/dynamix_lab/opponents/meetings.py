"""Averaging after local steps: what workers send, and what happens to parameters and momentum.

One sum over workers carries everything: parameters, floating-point buffers and (if it is averaged) the optimizer's
state, each times the worker's samples; then the samples, the loss, the seconds of each worker's step, and whether any
worker wants to stop. So every rank has the same values after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.window import Floats
from dynamix_lab.opponents.trial import LocalSettings


@dataclass(frozen=True, slots=True)
class Met:
    """The results of an averaging, the same on every rank.

    values    flattened parameters and buffers, then the averaged part of the optimizer's state
    samples   trained in the round by all workers
    loss      mean over them
    step_s    (W,) seconds of a local step of each worker
    stop      whether a worker wants to stop
    """

    values: Tensor
    samples: float
    loss: float
    step_s: Floats
    stop: bool


class NesterovOuter:
    """DiLoCo's outer step (arXiv 2311.08105): SGD with Nesterov momentum along before - mean.

    >>> outer = NesterovOuter(rate=1.0, momentum=0.0)
    >>> outer.step(torch.tensor([1.0]), torch.tensor([0.5]))      # without momentum: the mean
    tensor([0.5000])
    """

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum
        self._velocity: Tensor | None = None

    def step(self, before: Tensor, mean: Tensor) -> Tensor:
        """New parameters, from those at the beginning of the round and their mean at its end."""
        movement = before - mean
        velocity = movement if self._velocity is None else self.momentum * self._velocity + movement
        self._velocity = velocity
        return before - self.rate * (movement + self.momentum * velocity)


class Baggage:
    """The tensors that one worker sends to an averaging and takes over from it.

    model, optimizer   its own; the optimizer has taken a step before the first averaging
    settings           say what happens to the optimizer's state
    rank, workers      set the place of this worker's seconds
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, settings: LocalSettings, rank: int, workers: int
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.optimizer, self.settings, self.rank, self.workers = optimizer, settings, rank, workers
        self.count = sum(p.numel() for p in self.parameters)
        self.outer = None
        if settings.outer == "nesterov":
            self.outer = NesterovOuter(settings.outer_rate, settings.outer_momentum)
            self._before = self.flat_parameters()

    def flat_parameters(self) -> Tensor:
        """A copy of the flattened parameters."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    @torch.no_grad()
    def packed(self, samples: int, loss: float, step_s: float, *, stop: bool = False) -> Tensor:
        """The vector that is summed over workers. `loss` is the mean over this worker's `samples`."""
        facts = torch.zeros(self.workers + 3)
        facts[0], facts[1], facts[2], facts[3 + self.rank] = samples, loss * samples, float(stop), step_s
        values = torch.cat([t.detach().reshape(-1) for t in self._travelling()]).mul_(samples)
        return torch.cat([values, facts.to(values.dtype)])

    def unpacked(self, total: Tensor) -> Met:
        """The results from the sum over workers. Overwrites `total`."""
        facts = total[-(self.workers + 3) :].double()
        samples = float(facts[0])
        values = total[: -(self.workers + 3)].div_(samples)
        if self.outer is not None:
            self._before = self.outer.step(self._before, values[: self.count])
            values[: self.count] = self._before
        return Met(values, samples, float(facts[1]) / samples, np.array(facts[3:].tolist()), bool(facts[2] > 0))

    @torch.no_grad()
    def taken_home(self, met: Met) -> None:
        """Continue from the averaged state."""
        at = 0
        for tensor in self._travelling():
            tensor.copy_(met.values[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()
        if self.settings.momentum == "reset":
            self.optimizer.state.clear()

    @property
    def payload_bytes(self) -> int:
        """The bytes that one worker contributes, before any algorithm of the all-reduce."""
        return sum(t.numel() * t.element_size() for t in self._travelling()) + 4 * (self.workers + 3)

    def _travelling(self) -> Sequence[Tensor]:
        state = list[Tensor]()
        if self.settings.momentum == "averaged":
            for parameter in self.parameters:
                own = self.optimizer.state.get(parameter, {})
                state += [own[name] for name in sorted(own) if _shaped_like(own[name], parameter)]
        return [*self.parameters, *self.buffers, *state]


def _shaped_like(value: object, parameter: Tensor) -> bool:
    """Whether an entry of the optimizer's state is a moving mean of gradients or their squares, not a count."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
