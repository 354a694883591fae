"""teacher: a student network learns a fixed teacher network's outputs for random inputs, with noise on its labels.

The noise decides how large a batch pays: it is in every gradient, and the plateau is far away. Data of any size are
generated quickly. Training labels are noisy; test labels are not, so scores and held-out losses are smooth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.tasks.base import Arrays, Data, Workload, accuracy, check_sizes, initial_weights

INPUTS = 32
TEACHER_WIDTH = {"regression": 8, "classes": 16}
OUTPUTS = {"regression": 4, "classes": 10}
NOISE = {"regression": 2.0, "classes": 0.8}
TEACHER_SEED = 0  # one teacher for all seeds: seeds change only inputs, noise and weights
TEACHER_SAMPLES = 8_192  # samples to standardise its outputs
TRAIN_SAMPLES = 65_536
TEST_SAMPLES = 2_000
WIDTH = 128
LEARNING_RATE = 0.1
# By the rule of docs/design/jobs.md, for the default noise and width.
TARGETS = {"regression": 0.824, "classes": 0.56}
MOMENTUM = 0.9


def workload(kind: str = "regression", *, noise: float | None = None, width: int = WIDTH) -> Workload:
    """`regression`: four outputs of unit variance; `classes`: which of ten outputs is largest.

    noise   standard deviation of the noise on each output (2.0), or the fraction of random labels (0.8)
    width   of both hidden layers of the student
    """
    if kind not in OUTPUTS:
        raise ConfigError("kind", kind, ", ".join(OUTPUTS), "check the spelling")
    noisy = NOISE[kind] if noise is None else noise
    if not 0 <= noisy < (math.inf if kind == "regression" else 1):
        allowed = "0 or more" if kind == "regression" else "0 to below 1"
        raise ConfigError("noise", noisy, allowed, "take a number in that range")

    def make_student(seed: int) -> nn.Module:
        with initial_weights(seed):
            first, second = ([nn.Linear(inputs, width), nn.ReLU()] for inputs in (INPUTS, width))
            return nn.Sequential(*first, *second, nn.Linear(width, OUTPUTS[kind]))

    about: dict[str, Any] = (
        {"loss": F.mse_loss, "metric": explained, "metric_name": "explained variance"}
        if kind == "regression"
        else {"loss": F.cross_entropy, "metric": accuracy}
    )
    return Workload(
        name="teacher" if kind == "regression" else "teacher-classes",
        make_data=functools.partial(make_data, kind=kind, noise=noisy),
        make_model=make_student,
        make_optimizer=make_optimizer,
        min_batch=1,
        max_batch=512,
        base_batch=256,
        target=TARGETS[kind] if (noisy, width) == (NOISE[kind], WIDTH) else None,
        description=f"a student of two hidden layers, {width} wide, and a teacher with noise {noisy:g}, {kind}",
        **about,
    )


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD, lr 0.1, momentum 0.9: the learning rate is for a global batch of 256."""
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def explained(predicted: Tensor, targets: Tensor) -> float:
    """1 - mean squared error / mean variance of the outputs (n, outputs), at least 0.

    >>> explained(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [3.0]]))
    1.0
    """
    variance = float(targets.var(0, correction=0).mean())
    return max(0.0, 1 - float(F.mse_loss(predicted, targets)) / max(variance, 1e-12))


@functools.lru_cache(maxsize=4)
def make_data(seed: int, *, kind: str, noise: float, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Data:
    """Inputs (n, 32) standard normal; targets (n, 4) float32 of unit variance before the noise, or (n,) int64."""
    check_sizes(train, test)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(train + test, INPUTS, generator=generator)
    clean = _teacher(kind)(inputs)
    if kind == "regression":
        targets = clean.clone()
        targets[:train] += noise * torch.randn(train, OUTPUTS[kind], generator=generator)
    else:
        targets = clean.argmax(1)
        randomise(targets[:train], noise, OUTPUTS[kind], generator)
    return Data(Arrays(inputs[:train], targets[:train]), Arrays(inputs[train:], targets[train:]))


def randomise(labels: Tensor, part: float, classes: int, generator: torch.Generator) -> None:
    """Replace about a fraction `part` of the labels, in place, by random classes, which may be the right ones."""
    chosen = torch.rand(len(labels), generator=generator) < part
    labels[chosen] = torch.randint(classes, (int(chosen.sum()),), generator=generator)


@functools.lru_cache
def _teacher(kind: str) -> nn.Module:
    """tanh between two random layers, with standardised outputs."""
    generator = torch.Generator().manual_seed(TEACHER_SEED)
    width = TEACHER_WIDTH[kind]
    first = 2 * torch.randn(INPUTS, width, generator=generator) / math.sqrt(INPUTS)
    second = torch.randn(width, OUTPUTS[kind], generator=generator) / math.sqrt(width)
    raw = torch.tanh(torch.randn(TEACHER_SAMPLES, INPUTS, generator=generator) @ first) @ second
    return _Teacher(first, second, raw.mean(0), raw.std(0))


class _Teacher(nn.Module):
    def __init__(self, first: Tensor, second: Tensor, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.first, self.second, self.mean, self.deviation = first, second, mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.first) @ self.second - self.mean) / self.deviation
