"""VGG (Simonyan and Zisserman, arXiv 1409.1556) and ResNet (He et al., arXiv 1512.03385) in one or two dimensions.

Depth is the number of weight layers of the name, shortcut projections not counted; width is free, so that the deep ones
run on a laptop. Inputs are small, so ResNet starts with a 3-wide convolution instead of a strided 7 and a pool, and
VGG's three fully connected layers are as wide as its last stage.

Normalisation is by groups (Wu and He, arXiv 1803.08494) unless batch norm is asked for. With groups a sample's gradient
does not depend on the batch it is in, so unequal shares give exactly the union batch's gradient, one sample is a batch,
and the parameters alone are the model: what snapshots of a run hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from dynamix.errors import ConfigError

Norm = Literal["group", "batch"]

VGG_STAGES: dict[int, tuple[int, ...]] = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
RESNET_STAGES: dict[int, tuple[int, ...]] = {34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
BOTTLENECK_FROM = 50  # the depth from which blocks are bottlenecks
EXPANSION = 4
GROUPS = 8

_CONV: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d}
_POOL: dict[int, Any] = {1: nn.MaxPool1d, 2: nn.MaxPool2d}
_MEAN: dict[int, Any] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d}
_BATCH_NORM: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}


def vgg(depth: int, *, dims: int, channels: int, classes: int, width: int = 64, norm: Norm = "group") -> nn.Sequential:
    """VGG-11, 16 or 19: five stages of convolutions, each halved by a pool, then three fully connected layers.

    dims       1: inputs (n, channels, length); 2: (n, channels, height, width); 32 or more long and wide
    width      channels of the first stage; the others have 2, 4, 8 and 8 times as many

    >>> vgg(11, dims=1, channels=1, classes=10, width=8)(torch.zeros(2, 1, 40)).shape
    torch.Size([2, 10])
    """
    _check(depth, VGG_STAGES, norm)
    widths = [width, 2 * width, 4 * width, 8 * width, 8 * width]
    layers: list[nn.Module] = []
    head: list[nn.Module] = []
    for repeats, wide in zip(VGG_STAGES[depth], widths, strict=True):
        for _ in range(repeats):
            layers += [_convolution(dims, channels, wide), _norm(norm, dims, wide), nn.ReLU()]
            channels = wide
        layers.append(_POOL[dims](2))
    for _ in range(2):
        hidden = nn.Linear(channels, channels)
        nn.init.kaiming_normal_(hidden.weight)  # torch's own start shrinks what no norm scales up again
        head += [hidden, nn.ReLU()]
    return nn.Sequential(*layers, _MEAN[dims](1), nn.Flatten(), *head, nn.Linear(channels, classes))


def resnet(
    depth: int, *, dims: int, channels: int, classes: int, width: int = 64, norm: Norm = "group"
) -> nn.Sequential:
    """ResNet-34 (basic blocks) or 50 (bottlenecks): a convolution, four stages, mean, one fully connected layer.

    Arguments as `vgg`'s; stages have width, 2, 4 and 8 times width channels, 4 times that after bottlenecks.

    >>> resnet(50, dims=1, channels=1, classes=10, width=8)(torch.zeros(2, 1, 40)).shape
    torch.Size([2, 10])
    """
    _check(depth, RESNET_STAGES, norm)
    bottleneck = depth >= BOTTLENECK_FROM
    layers: list[nn.Module] = [_convolution(dims, channels, width), _norm(norm, dims, width), nn.ReLU()]
    channels = width
    for stage, repeats in enumerate(RESNET_STAGES[depth]):
        for block in range(repeats):
            stride = 2 if stage and not block else 1
            made = Residual(dims, channels, width * 2**stage, stride=stride, bottleneck=bottleneck, norm=norm)
            layers.append(made)
            channels = made.channels
    return nn.Sequential(*layers, _MEAN[dims](1), nn.Flatten(), nn.Linear(channels, classes))


class Residual(nn.Module):
    """relu(shortcut(x) + branch(x)), the branch two 3-wide convolutions or a bottleneck 1-3-1 of four times the width.

    The branch's last scale starts at 0, so that a deep net starts as a shallow one (Goyal et al., arXiv 1706.02677).
    """

    def __init__(self, dims: int, channels: int, width: int, *, stride: int, bottleneck: bool, norm: Norm) -> None:
        super().__init__()
        self.channels = width * EXPANSION if bottleneck else width
        plan = (
            [(width, 1, 1), (width, 3, stride), (self.channels, 1, 1)]
            if bottleneck
            else [(width, 3, stride), (width, 3, 1)]
        )
        wide = [channels, *(out for out, _, _ in plan)]
        branch: list[nn.Module] = []
        for (before, after), (_, kernel, step) in zip(itertools.pairwise(wide), plan, strict=True):
            branch += [
                _convolution(dims, before, after, kernel=kernel, stride=step),
                _norm(norm, dims, after),
                nn.ReLU(),
            ]
        self.branch = nn.Sequential(*branch[:-1])
        nn.init.zeros_(branch[-2].weight)  # type: ignore[arg-type]
        same = stride == 1 and channels == self.channels
        self.shortcut: nn.Module = nn.Identity()
        if not same:
            project = _convolution(dims, channels, self.channels, kernel=1, stride=stride)
            self.shortcut = nn.Sequential(project, _norm(norm, dims, self.channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW, lr 1e-3, for a global batch of 128: VGG normalised by groups does not start reliably with SGD and
    momentum.
    """
    return AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD, lr 0.05, momentum 0.9, weight decay 5e-4: the learning rate is for a global batch of 128."""
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)


class Pixels(nn.Module):
    """uint8 pixels to floats of zero mean and unit deviation per channel; data sets then stay a quarter as large."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
        super().__init__()
        # Not part of the state: they are constants, and DDP would broadcast buffers that are.
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() / 255 - self.mean) / self.deviation


def weight_layers(model: nn.Module) -> int:
    """Convolutions and fully connected layers, shortcut projections left out: the number in a net's name."""
    projections = {
        id(layer) for block in model.modules() if isinstance(block, Residual) for layer in block.shortcut.modules()
    }
    weighted = (nn.Conv1d, nn.Conv2d, nn.Linear)
    return sum(isinstance(layer, weighted) and id(layer) not in projections for layer in model.modules())


def _convolution(dims: int, before: int, after: int, *, kernel: int = 3, stride: int = 1) -> nn.Module:
    made: nn.Module = _CONV[dims](before, after, kernel, stride=stride, padding=kernel // 2, bias=False)
    return made


def _norm(norm: Norm, dims: int, channels: int) -> nn.Module:
    if norm == "group":
        return nn.GroupNorm(math.gcd(GROUPS, channels), channels)
    made: nn.Module = _BATCH_NORM[dims](channels)
    return made


def _check(depth: int, known: dict[int, tuple[int, ...]], norm: str) -> None:
    if depth not in known:
        raise ConfigError("depth", depth, ", ".join(map(str, known)), "choose one of them")
    if norm not in ("group", "batch"):
        raise ConfigError("norm", norm, "group or batch", "check the spelling")
