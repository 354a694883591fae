"""digits: 1,797 handwritten digits of 8 x 8 pixels (UCI, Alpaydin and Kaynak 1998), bundled with scikit-learn.

It trains to its plateau in seconds. It is too small to measure batch sizes beyond 256.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.installed import how_to_install
from dynamix_lab.tasks.base import Arrays, Data, Workload, accuracy, check_sizes, initial_weights

SAMPLES = 1797
TRAIN_SAMPLES = 1437
TEST_SAMPLES = 360
LEARNING_RATE = 0.05
MOMENTUM = 0.9
NETS = ("conv", "mlp")
ADAMW_RATE = 0.002


def workload(net: str = "conv", *, adamw: bool = False) -> Workload:
    """digits with a small convolutional net (`conv`) or a perceptron of one hidden layer (`mlp`); SGD, or AdamW."""
    if net not in NETS:
        raise ConfigError("net", net, ", ".join(NETS), "check the spelling")
    return Workload(
        name="-".join(["digits", *([] if net == "conv" else [net]), *(["adamw"] if adamw else [])]),
        make_data=make_data,
        make_model=_conv if net == "conv" else _perceptron,
        make_optimizer=functools.partial(AdamW, lr=ADAMW_RATE) if adamw else make_optimizer,
        loss=F.cross_entropy,
        metric=accuracy,
        min_batch=2,
        max_batch=128,
        base_batch=64,
        description="1,797 handwritten digits of 8 x 8 pixels, "
        + ("two convolutions" if net == "conv" else "perceptron"),
    )


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD, lr 0.05, momentum 0.9: the learning rate is for a global batch of 64."""
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


@functools.lru_cache(maxsize=2)
def make_data(seed: int, *, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Data:
    """`train` and `test` of the 1,797 digits, shuffled by `seed`: (n, 1, 8, 8) in [0, 1].

    Raises `ConfigError` if scikit-learn is missing or there are not enough digits.
    """
    check_sizes(train, test, most=SAMPLES)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        fix = how_to_install("bench")
        raise ConfigError("workload", "digits", "a workload whose packages are installed", fix) from error
    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(SAMPLES)[: train + test]
    inputs = torch.from_numpy((pixels[order] / 16).astype(np.float32)).view(-1, 1, 8, 8)
    targets = torch.from_numpy(digits[order].astype(np.int64))
    return Data(Arrays(inputs[:train], targets[:train]), Arrays(inputs[train:], targets[train:]))


def _conv(seed: int) -> nn.Module:
    with initial_weights(seed):
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 16, 10),
        )


def _perceptron(seed: int) -> nn.Module:
    with initial_weights(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
