"""A third of mnist1d with the two kinds of nets of the DYNAMIX paper, each with SGD and with Adam.

Signals have more noise, so that nets reach 70 to 95 %, as on CIFAR-10.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.tasks import mnist1d
from dynamix_lab.tasks.base import Arrays, Data, Workload, accuracy, initial_weights
from dynamix_lab.tasks.pulse import Residual

NETS = ("vgg", "resnet")
TRAIN_SAMPLES, TEST_SAMPLES = 8_000, 2_000
SGD_RATE, ADAM_RATE, MOMENTUM = 0.02, 0.001, 0.9  # for 16 samples
WIDTH = 16
NOISE = 0.2  # on every point of a signal, whose standard deviation is about 1


def workload(net: str = "vgg", *, adam: bool = False) -> Workload:
    """mnist1d with 3-wide convolutions in pairs (`vgg`) or residual blocks with batch norm (`resnet`); SGD, or Adam."""
    if net not in NETS:
        raise ConfigError("net", net, ", ".join(NETS), "check the spelling")
    return Workload(
        name="-".join(["mnist1d", net, *(["adam"] if adam else [])]),
        make_data=make_data,
        make_model=_vgg if net == "vgg" else _resnet,
        make_optimizer=functools.partial(Adam, lr=ADAM_RATE) if adam else _sgd,
        loss=F.cross_entropy,
        metric=accuracy,
        min_batch=4,
        max_batch=512,
        base_batch=16,
        description="8,000 samples of mnist1d, "
        + ("four convolutions and two layers" if net == "vgg" else "two residual blocks with batch norm"),
    )


@functools.lru_cache(maxsize=2)
def make_data(seed: int, *, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Data:
    """The first of mnist1d's samples for the same seed, with more noise. `train`, `test` as `mnist1d.make_data`."""
    usual = (train, test) == (TRAIN_SAMPLES, TEST_SAMPLES)
    full = mnist1d.make_data(seed) if usual else mnist1d.make_data(seed, train=train, test=test)
    generator = torch.Generator().manual_seed(seed)

    def noisy(inputs: Tensor) -> Tensor:
        return inputs + NOISE * torch.randn(inputs.shape, generator=generator)

    first = Arrays(noisy(full.train.inputs[:train]), full.train.targets[:train])
    return Data(first, Arrays(noisy(full.test.inputs[:test]), full.test.targets[:test]))


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=SGD_RATE, momentum=MOMENTUM)


def _vgg(seed: int) -> nn.Module:
    """Pairs of convolutions, each pair twice as wide and half as long as the one before (arXiv 1409.1556)."""
    with initial_weights(seed):
        layers: list[nn.Module] = []
        for inputs, width in ((1, WIDTH), (WIDTH, 2 * WIDTH)):
            for channels in (inputs, width):
                layers += [nn.Conv1d(channels, width, 3, padding=1), nn.ReLU()]
            layers.append(nn.MaxPool1d(2))
        head = [nn.Flatten(), nn.Linear(2 * WIDTH * mnist1d.LENGTH // 4, 64), nn.ReLU(), nn.Linear(64, 10)]
        return nn.Sequential(*layers, *head)


def _resnet(seed: int) -> nn.Module:
    """Residual blocks, the later ones twice as wide and half as long (arXiv 1512.03385)."""
    with initial_weights(seed):
        return nn.Sequential(
            nn.Conv1d(1, WIDTH, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.ReLU(),
            Residual(WIDTH, WIDTH, stride=1),
            Residual(WIDTH, 2 * WIDTH, stride=2),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(2 * WIDTH, 10),
        )
