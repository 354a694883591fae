"""A workload: a model, its data and how its result is scored, none of which needs a download."""

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
    """Inputs and targets held in memory. `__getitems__` takes a whole batch by one index, which a loader then passes on
    untouched (`collate_fn=as_is`): on a host with a sixth of a core, collating sample by sample would dominate.

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
    """`collate_fn` for `Arrays`, whose batches are complete already."""
    return batch


@dataclass(frozen=True, slots=True)
class Data:
    """The data on which a workload trains and is scored."""

    train: Arrays
    test: Arrays


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything a run needs to know about a task.

    make_data(seed, *, train=, test=)   samples to train and to test on; the same for the same seed
    make_model(seed)        the same initial weights for the same seed; global random state is left alone
    make_optimizer(params)  for the base batch; parameters may have sparse gradients
    loss(logits, targets)   mean over the batch: over its samples, or over what `count` counts
    metric(logits, targets) in [0, 1], higher is better; a mean over what `count` counts, where that is given
    min_batch, max_batch    samples per worker that make sense here: the bounds of its batch sizes
    target                  metric that counts as trained, fixed beforehand (see docs/design/comparison.md); None
                            where nobody has measured one
    count(targets)          divisor of the mean loss where that is not the number of samples: tokens, for
                            `controller.weight(loss, count=...)`
    costs(data)             what computing each sample costs beyond the same for all, shape (n,), in tokens or other
                            units (`per_cost_ms` of a device); None where all samples cost the same
    base_batch              global batch that the optimizer's learning rate is for
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
        """The target; raises `ConfigError` if none was fixed."""
        if self.target is None:
            allowed = "a workload whose target was fixed beforehand (mnist1d)"
            raise ConfigError("workload", self.name, allowed, "take that one, or train a given number of steps")
        return self.target

    def divisor(self, targets: Tensor) -> int:
        """The number by which the mean loss of these targets was divided: their `count`, or the number of samples."""
        return len(targets) if self.count is None else self.count(targets)


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """Share of rows whose largest logit is the target's.

    >>> accuracy(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    0.5
    """
    return float((logits.argmax(-1) == targets).float().mean())


def score(workload: Workload, model: nn.Module, data: Arrays, *, rows: int = 250) -> float:
    """The workload's metric of `model` on `data`, `rows` samples at a time; the model's mode is put back.

    If there is a `count`, the parts' metrics are averaged by it: the logits of all tokens would not fit into memory.
    """
    training = model.training
    model.eval()
    with torch.no_grad():
        if workload.count is None:
            logits = torch.cat([model(part) for part in data.inputs.split(rows)])
            value = workload.metric(logits, data.targets)
        else:
            value = _score_by_count(workload, workload.count, model, data, rows)
    model.train(training)
    return value


def _score_by_count(
    workload: Workload, count: Callable[[Tensor], int], model: nn.Module, data: Arrays, rows: int
) -> float:
    total = weight = 0.0
    for inputs, targets in zip(data.inputs.split(rows), data.targets.split(rows), strict=True):
        tokens = count(targets)
        total, weight = total + tokens * workload.metric(model(inputs), targets), weight + tokens
    return total / weight


def held_out_loss(workload: Workload, model: nn.Module, data: Arrays, *, rows: int = 250) -> float:
    """The workload's mean loss of `model` on `data`, `rows` samples at a time; the model's mode is put back."""
    training = model.training
    model.eval()
    total = weight = 0.0
    with torch.no_grad():
        for inputs, targets in zip(data.inputs.split(rows), data.targets.split(rows), strict=True):
            part = workload.divisor(targets)
            total, weight = total + part * float(workload.loss(model(inputs), targets)), weight + part
    model.train(training)
    return total / weight


@contextlib.contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Weights made inside depend on `seed` alone; torch's global random state is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def check_sizes(train: int, test: int, *, most: int | None = None, what: str = "samples") -> None:
    """Raises `ConfigError` unless both are 1 or more and, together, at most `most`."""
    if train < 1 or test < 1:
        raise ConfigError(what, (train, test), "1 or more to train and 1 or more to test", "ask for some of each")
    if most is not None and train + test > most:
        fix = "ask for fewer"
        raise ConfigError(what, train + test, f"at most {most:,} to train and to test together", fix)
