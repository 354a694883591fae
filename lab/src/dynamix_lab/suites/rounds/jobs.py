"""The jobs on which ways of meeting are compared, and the workers that train them. Fixed before rows are run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dynamix.errors import ConfigError
from dynamix.window import Floats, Ints
from dynamix_lab.tasks import Arrays, Data, Workload, make_workload
from dynamix_lab.tasks.base import initial_weights
from dynamix_lab.tasks.sequence import Transformer

WORKERS = 4
FIXED_S, PER_SAMPLE_S = 0.020, 0.00125  # of a pass of the fastest worker, as in the regimes of the opponents
LEAST = 0.01  # of the first rate, where the cosine ends
SAMPLES = 16_000  # of Python source to train on
Make = Callable[[Iterable[nn.Parameter], float], Optimizer]


@dataclass(frozen=True, slots=True)
class RoundsJob:
    """What is trained, and until when.

    workload   its name
    make       parameters and learning rate to optimizer
    moments    tensors that the optimizer remembers for each parameter; they travel too
    piece      samples of an optimizer step
    rate       learning rate of a piece, about which the search begins
    target     held-out loss at which a run has arrived: about what synchronous training reaches after `budget` / 2
    budget     samples that a run may need; it is given up at twice as many
    unlike     part of the samples that workers get by their label, in order, and not at random
    cosine     the rate falls
    """

    workload: str
    make: Make
    moments: int
    piece: int
    rate: float
    target: float
    budget: int
    unlike: float = 0.0
    cosine: bool = False

    def rate_factor(self, samples: float) -> float:
        """What the schedule multiplies the rate by: 1, or a cosine down to a hundredth at `budget`."""
        part = min(samples / self.budget, 1.0)
        return LEAST + (1 - LEAST) * (1 + math.cos(math.pi * part)) / 2 if self.cosine else 1.0

    def load(self) -> Workload:
        """The workload, with this optimizer."""
        if self.workload == "small-transformer":
            made = make_workload("pysource")
            return dataclasses.replace(made, make_model=_transformer, make_data=_source)
        return make_workload(self.workload)


def sgd(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    return SGD(parameters, lr=rate, momentum=0.9)


def _adam(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    return Adam(parameters, lr=rate)


def _adamw(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    return AdamW(parameters, lr=rate)


def _transformer(seed: int) -> nn.Module:
    with initial_weights(seed):
        return Transformer(tokens=256, context=16, width=32, layers=1)


def _source(_: int) -> Data:
    """Python source, the first 16 bytes of each sample; the same for every seed, as some files are harder to learn."""
    whole = make_workload("pysource").make_data(0, train=SAMPLES, test=500)
    cut = [Arrays(part.inputs[:, :16].clone(), part.targets[:, :16].clone()) for part in (whole.train, whole.test)]
    return Data(*cut)


JOBS = {
    "perceptron": RoundsJob("mnist1d-noisy-mlp", sgd, 1, 32, 0.1, 1.70, 50_000),
    "perceptron, Adam": RoundsJob("mnist1d-noisy-mlp", _adam, 2, 32, 0.003, 1.70, 50_000),
    "convolution": RoundsJob("mnist1d-noisy", sgd, 1, 32, 0.2, 1.60, 50_000),
    "transformer, AdamW": RoundsJob("small-transformer", _adamw, 2, 8, 0.008, 1.45, 8_000),
    "unlike data": RoundsJob("mnist1d-noisy-mlp", sgd, 1, 32, 0.1, 1.75, 50_000, unlike=0.5),
    "perceptron, cosine": RoundsJob("mnist1d-noisy-mlp", sgd, 1, 32, 0.2, 1.65, 80_000, cosine=True),
}


def job_named(name: str) -> RoundsJob:
    """Raises `ConfigError` for a job that is not known."""
    if name not in JOBS:
        raise ConfigError("job", name, ", ".join(JOBS), "check the spelling")
    return JOBS[name]


def speeds_of(spread: float) -> Floats:
    """(WORKERS,) speeds that fall evenly from 1 to 1 / `spread`.

    >>> speeds_of(4.0).tolist()
    [1.0, 0.75, 0.5, 0.25]
    """
    return np.linspace(1.0, 1.0 / spread, WORKERS)


def pass_s(samples: Ints, speeds: Floats) -> Floats:
    """Seconds (W,) of a pass of each worker over its `samples` (W,)."""
    return np.where(samples > 0, FIXED_S + PER_SAMPLE_S * samples, 0.0) / speeds


def mean_piece_s(job: RoundsJob, speeds: Floats) -> float:
    """Seconds of a piece in the mean over workers, as all of them together train samples."""
    return float(WORKERS / (1.0 / pass_s(np.full(WORKERS, job.piece), speeds)).sum())


def exchange_s(job: RoundsJob, speeds: Floats, ratio: float) -> float:
    """Seconds of an exchange of gradients that takes `ratio` times a piece."""
    return ratio * mean_piece_s(job, speeds)


def meeting_s(job: RoundsJob, speeds: Floats, ratio: float) -> float:
    """Seconds of a meeting over parameters there: moments travel with them."""
    return (1 + job.moments) * exchange_s(job, speeds, ratio)


def shards(data: Arrays, unlike: float, seed: int) -> list[torch.Tensor]:
    """Indices of every worker's own samples: a part `unlike` of all goes by label in order, the rest at random."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data), generator=generator)
    by_label = order[: int(unlike * len(data))]
    by_label = by_label[torch.argsort(data.targets[by_label], stable=True)]
    at_random = order[len(by_label) :]
    return [torch.cat(parts) for parts in zip(by_label.chunk(WORKERS), at_random.chunk(WORKERS), strict=True)]
