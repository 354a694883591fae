"""A job of `dynamix bench compression`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class CompressionTask:
    """make_model(seed), make_optimizer(parameters), loss(outputs, targets), and batch(number), a function of its
    number: that of the step times the workers plus the rank.
    """

    name: str
    make_model: Callable[[int], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    make_sparse: Callable[[int], nn.Module] | None = None  # the model with sparse gradients, if it has embeddings
    keep: float | None = None  # fraction of a worker's gradient that it sends, by top-k with error feedback; None: all
