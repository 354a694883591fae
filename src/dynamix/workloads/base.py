"""A workload: a model, its data and how its result is scored, none of which needs a download."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset


class Arrays(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets held in memory. `__getitems__` takes a whole batch by one index, which a loader then passes on
    untouched (`collate_fn=as_is`): on a host with a sixth of a core, collating sample by sample would dominate.

    inputs    (n, ...) float32
    targets   (n,) int64
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


def as_is(batch: Any) -> Any:
    """`collate_fn` for `Arrays`, whose batches are complete already."""
    return batch


@dataclass(frozen=True, slots=True)
class Data:
    """What a workload trains on and is scored on."""

    train: Arrays
    test: Arrays


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything a run needs to know about a task.

    make_data(seed, *, train=, test=)   samples to train and to test on; the same for the same seed
    make_model(seed)        the same initial weights for the same seed; global random state is left alone
    make_optimizer(params)  for the base batch
    loss(logits, targets)   mean over the batch
    metric(logits, targets) in [0, 1], higher is better
    min_batch, max_batch    samples per worker that make sense here: the bounds of its batch sizes
    target                  metric that counts as trained; fixed beforehand, see docs/design/demo.md
    """

    name: str
    make_data: Callable[..., Data]
    make_model: Callable[[int], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Callable[[Tensor, Tensor], float]
    min_batch: int
    max_batch: int
    target: float


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """Share of rows whose largest logit is the target's.

    >>> accuracy(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    0.5
    """
    return float((logits.argmax(-1) == targets).float().mean())


def score(workload: Workload, model: nn.Module, data: Arrays, *, rows: int = 250) -> float:
    """The workload's metric of `model` on `data`, `rows` samples at a time; the model's mode is put back."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(part) for part in data.inputs.split(rows)])
    model.train(training)
    return workload.metric(logits, data.targets)
