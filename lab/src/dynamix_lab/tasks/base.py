"""A workload: a model, its data and its score. None needs a download."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from dynamix.errors import ConfigError
from dynamix.window import Floats


class Arrays(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets in memory. `__getitems__` takes a whole batch by one index, which a loader passes on unchanged
    (`collate_fn=as_is`): on a host with a sixth of a core, collating single samples would take most of the time.

    inputs    (n, ...) of the model's input type: float32, uint8 pixels, int64 tokens or ids
    targets   (n, ...) int64 classes, or float32 values
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
    """`collate_fn` for `Arrays`, whose batches are already complete."""
    return batch


@dataclass(frozen=True, slots=True)
class Data:
    """The data on which a workload trains and is scored."""

    train: Arrays
    test: Arrays


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that a run needs to know about a task.

    make_data(seed, *, train=, test=)   samples to train and to test on; the same for the same seed
    make_model(seed)        the same initial weights for the same seed; does not change global random state
    make_optimizer(params)  for the base batch; parameters may have sparse gradients
    loss(logits, targets)   mean over the batch: over its samples, or over the units of `count`
    metric(logits, targets) in [0, 1], higher is better; a mean over the units of `count`, if that is given
    min_batch, max_batch    samples per worker that make sense here: the bounds of its batch sizes
    target                  metric at which training counts as done, fixed beforehand (docs/design/comparison.md); None
                            if it has not been measured
    count(targets)          divisor of the mean loss if that is not the number of samples: tokens, for
                            `controller.weight(loss, count=...)`
    costs(data)             cost of computing each sample beyond the constant part, shape (n,), in tokens or other units
                            (`per_cost_ms` of a device); None if all samples have the same cost
    base_batch              global batch for which the optimizer's learning rate is meant
    metric_name             of the metric, for tables
    description             one line: data, model, size
    """

    name: str
    make_data: Callable[..., Data]
    make_model: Callable[[int], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Callable[[Tensor, Tensor], float]
    min_batch: int
    max_batch: int
    target: float | None = None
    count: Callable[[Tensor], int] | None = None
    costs: Callable[[Arrays], Floats] | None = None
    base_batch: int = 512
    metric_name: str = "accuracy"
    description: str = ""

    def fixed_target(self) -> float:
        """The target. Raises `ConfigError` if none was fixed."""
        if self.target is None:
            allowed = "a workload whose target was fixed beforehand (mnist1d)"
            raise ConfigError("workload", self.name, allowed, "take that one, or train a given number of steps")
        return self.target

    def divisor(self, targets: Tensor) -> int:
        """The divisor of these targets' mean loss: their `count`, or the number of samples."""
        return len(targets) if self.count is None else self.count(targets)


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """Fraction of rows whose largest logit is the target's.

    >>> accuracy(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    0.5
    """
    return float((logits.argmax(-1) == targets).float().mean())


def score(workload: Workload, model: nn.Module, data: Arrays, *, rows: int = 250) -> float:
    """The workload's metric of `model` on `data`, `rows` samples at a time. Restores the model's mode.

    With `count`, the parts' metrics are averaged by it, because the logits of all tokens would not fit into memory.
    """
    if workload.count is not None:
        return _mean(workload.metric, workload, model, data, rows)
    with evaluating(model):
        return workload.metric(torch.cat([model(part) for part in data.inputs.split(rows)]), data.targets)


def held_out_loss(workload: Workload, model: nn.Module, data: Arrays, *, rows: int = 250) -> float:
    """The workload's mean loss of `model` on `data`, `rows` samples at a time. Restores the model's mode."""
    return _mean(workload.loss, workload, model, data, rows)


def _mean(of: Callable[[Tensor, Tensor], Any], workload: Workload, model: nn.Module, data: Arrays, rows: int) -> float:
    total = weight = 0.0
    with evaluating(model):
        for inputs, targets in zip(data.inputs.split(rows), data.targets.split(rows), strict=True):
            part = workload.divisor(targets)
            total, weight = total + part * float(of(model(inputs), targets)), weight + part
    return total / weight


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without gradients. Restores its mode."""
    training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(training)


@contextlib.contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Weights made inside depend only on `seed`. Restores torch's global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def check_sizes(train: int, test: int, *, most: int | None = None, what: str = "samples") -> None:
    """Raise `ConfigError` unless both are 1 or more and their sum is at most `most`."""
    if train < 1 or test < 1:
        raise ConfigError(what, (train, test), "1 or more to train and 1 or more to test", "ask for some of each")
    if most is not None and train + test > most:
        fix = "ask for fewer"
        raise ConfigError(what, train + test, f"at most {most:,} to train and to test together", fix)
