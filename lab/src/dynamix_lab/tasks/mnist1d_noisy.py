"""mnist1d with half of the training labels random: the same data, but large batches pay.

The net is a perceptron. Test labels are the true ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.tasks import mnist1d
from dynamix_lab.tasks.base import Arrays, Data, Workload, accuracy, initial_weights
from dynamix_lab.tasks.teacher import randomise

CLASSES = 10
HIDDEN = 128
RANDOM_LABELS = 0.5
TEST_SAMPLES = 2_000
LEARNING_RATE = 0.2
MOMENTUM = 0.9
TARGET = 0.54  # by the rule of docs/design/jobs.md, for the default noise


def workload(*, noise: float = RANDOM_LABELS) -> Workload:
    """mnist1d with a fraction `noise` of its training labels random, and two hidden layers."""
    if not 0 <= noise < 1:
        raise ConfigError("noise", noise, "0 to below 1", "take a number in that range")
    return Workload(
        name="mnist1d-noisy-mlp",
        make_data=functools.partial(make_data, noise=noise),
        make_model=_perceptron,
        make_optimizer=make_optimizer,
        loss=F.cross_entropy,
        metric=accuracy,
        min_batch=1,
        max_batch=512,
        base_batch=256,
        target=TARGET if noise == RANDOM_LABELS else None,
        description=f"mnist1d, {100 * noise:g} % of training labels random, two hidden layers, 128 wide",
    )


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD, lr 0.2, momentum 0.9: the learning rate is for a global batch of 256."""
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


@functools.lru_cache(maxsize=4)
def make_data(
    seed: int, *, noise: float = RANDOM_LABELS, train: int = mnist1d.TRAIN_SAMPLES, test: int = TEST_SAMPLES
) -> Data:
    """mnist1d's samples for the same seed, with noisy training labels. `train`, `test` as `mnist1d.make_data`.

    It takes the first 2,000 of mnist1d's 4,000 test samples, because scoring is a large part of such a small job.
    """
    kept = mnist1d.TEST_SAMPLES if (train, test) == (mnist1d.TRAIN_SAMPLES, TEST_SAMPLES) else test
    clean = mnist1d.make_data(seed, train=train, test=kept)
    labels = clean.train.targets.clone()
    randomise(labels, noise, CLASSES, torch.Generator().manual_seed(seed))
    return Data(Arrays(clean.train.inputs, labels), Arrays(clean.test.inputs[:test], clean.test.targets[:test]))


def _perceptron(seed: int) -> nn.Module:
    with initial_weights(seed):
        first, second = ([nn.Linear(inputs, HIDDEN), nn.ReLU()] for inputs in (mnist1d.LENGTH, HIDDEN))
        return nn.Sequential(nn.Flatten(), *first, *second, nn.Linear(HIDDEN, CLASSES))
