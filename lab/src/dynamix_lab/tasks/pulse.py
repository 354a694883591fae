"""pulse: a net estimates a pulse in a noisy signal: its place, width, wavelength and strength.

The net is residual with batch norm in one dimension, and a plain convolution in two. Training numbers are noisy, so
large batches pay; test numbers are not, so scores are smooth. Data of any size are generated quickly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.tasks.base import Arrays, Data, Workload, check_sizes, initial_weights
from dynamix_lab.tasks.teacher import explained

SIDE = {1: 40, 2: 12}
CHANNELS = 8
SIGNAL_NOISE = 0.3  # on every point of a signal, whose strength is 0.5 to 1.5
TARGET_NOISE = {1: 1.0, 2: 1.5}  # on every training number; these have unit variance
TRAIN_SAMPLES = 65_536
TEST_SAMPLES = 4_000
LEARNING_RATES = {1: 0.1, 2: 0.2}
MOMENTUM = 0.9
TARGETS = {1: 0.66, 2: 0.545}  # by the rule of docs/design/jobs.md


def workload(dims: int = 1) -> Workload:
    """Signals of 40 points and a residual net with batch norm (1), or 12 x 12 pixels and two convolutions (2)."""
    if dims not in SIDE:
        raise ConfigError("dims", dims, "1 or 2", "take one of them")

    def make_model(seed: int) -> nn.Module:
        with initial_weights(seed):
            return _residual() if dims == 1 else _conv()

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=LEARNING_RATES[dims], momentum=MOMENTUM)

    net = "40 points, two residual blocks with batch norm" if dims == 1 else "12 x 12 pixels, two convolutions"
    return Workload(
        name="pulse" if dims == 1 else "pulse-2d",
        make_data=functools.partial(make_data, dims=dims),
        make_model=make_model,
        make_optimizer=make_optimizer,
        loss=F.mse_loss,
        metric=explained,
        min_batch=2,
        max_batch=512,
        base_batch=128,
        target=TARGETS[dims],
        metric_name="explained variance",
        description=f"a pulse in noise, {net}",
    )


@functools.lru_cache(maxsize=4)
def make_data(seed: int, *, dims: int, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Data:
    """Signals (n, 1, 40) or images (n, 1, 12, 12), and numbers (n, 3 + dims) of unit variance before their noise.

    The numbers are the place along each axis, the width, the length of a wave along the first axis, and the strength,
    all drawn evenly.
    """
    check_sizes(train, test)
    generator, n = torch.Generator().manual_seed(seed), train + test
    drawn = torch.rand(n, dims + 3, generator=generator)
    signals = _signals(drawn, dims)
    signals += SIGNAL_NOISE * torch.randn(signals.shape, generator=generator)
    targets = (drawn - 0.5) * math.sqrt(12)
    targets[:train] += TARGET_NOISE[dims] * torch.randn(train, dims + 3, generator=generator)
    return Data(Arrays(signals[:train], targets[:train]), Arrays(signals[train:], targets[train:]))


def _signals(drawn: Tensor, dims: int) -> Tensor:
    """Bells with waves in them along the first axis; numbers (n, 3 + dims) in [0, 1)."""
    side = SIDE[dims]
    shape = (len(drawn), 1, *(1 for _ in range(dims)))
    width, wave, strength = (column.view(shape) for column in drawn[:, dims:].T)
    axis = torch.arange(side) / side
    places = [drawn[:, i].view(shape) * 0.6 + 0.2 for i in range(dims)]
    apart = [axis.view([-1 if i == j else 1 for j in range(dims)]) - place for i, place in enumerate(places)]
    bell = torch.exp(-sum(a**2 for a in apart) / (2 * (0.08 + 0.1 * width) ** 2))
    signals: Tensor = (0.5 + strength) * bell * torch.cos(2 * math.pi * apart[0] / (0.2 + 0.3 * wave))
    return signals


class Residual(nn.Module):
    """relu(shortcut(x) + branch(x)), the branch two 3-wide convolutions in one dimension (He et al., arXiv 1512.03385).

    The branch's last scale starts at 0, so that a deep net starts as a shallow one (Goyal et al., arXiv 1706.02677).
    """

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv1d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1, bias=False),
            last := nn.BatchNorm1d(width),
        )
        nn.init.zeros_(last.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            project = nn.Conv1d(channels, width, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm1d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


def _residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, CHANNELS, 5, stride=2, padding=2, bias=False),
        nn.BatchNorm1d(CHANNELS),
        nn.ReLU(),
        Residual(CHANNELS, CHANNELS, stride=1),
        Residual(CHANNELS, 2 * CHANNELS, stride=2),
        nn.Flatten(),
        nn.Linear(20 * CHANNELS, 4),
    )


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(18 * CHANNELS, 64),
        nn.ReLU(),
        nn.Linear(64, 5),
    )
