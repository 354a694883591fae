from __future__ import annotations

import pytest
import torch
from torch import nn

from dynamix.errors import ConfigError
from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.convolution import resnet, vgg, weight_layers
from tests.refused import refused


@pytest.mark.parametrize(
    ("net", "depth"), [("vgg11", 11), ("vgg16", 16), ("vgg19", 19), ("resnet34", 34), ("resnet50", 50)]
)
def test_a_net_has_the_weight_layers_of_its_name(net: str, depth: int) -> None:
    assert weight_layers(make_workload(f"mnist1d-{net}", width=8).make_model(0)) == depth


SIZES = {"mnist1d": 112_138, "cifar10-vgg16": 15_249_354, "cifar10-resnet34": 21_282_122}


@pytest.mark.parametrize(("name", "parameters"), SIZES.items())
def test_nets_have_their_known_size(name: str, parameters: int) -> None:
    """VGG-16: 14,710,464 of convolutions, 8,448 of norms, 530,442 of three layers of 512. ResNet-34 as torchvision's,
    its first convolution 3 wide and its last layer for ten classes."""
    model = make_workload(name).make_model(0)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("family", [vgg, resnet])
@pytest.mark.parametrize(("dims", "shape"), [(1, (3, 2, 40)), (2, (3, 2, 32, 32))])
def test_one_and_two_dimensions(family, dims: int, shape: tuple[int, ...]) -> None:
    model = family(34 if family is resnet else 11, dims=dims, channels=2, classes=7, width=8)
    assert model(torch.randn(shape)).shape == (3, 7)


def gradient(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    return torch.cat([p.grad.flatten().clone() for p in model.parameters()])


def test_with_group_norm_unequal_shares_give_the_union_batch_and_with_batch_norm_they_do_not() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 1, 40, dtype=torch.float64), torch.arange(12) % 10
    errors = {}
    for norm in ("group", "batch"):
        model = make_workload("mnist1d-vgg11", width=8, norm=norm).make_model(0).double()
        whole = gradient(model, inputs, targets)
        union = sum(
            n / 12 * gradient(model, x, y) for n, x, y in ((9, inputs[:9], targets[:9]), (3, inputs[9:], targets[9:]))
        )
        errors[norm] = float((union - whole).norm() / whole.norm())
    assert errors["group"] < 1e-12
    assert errors["batch"] > 1e-3


def test_unknown_depths_and_norms_are_refused() -> None:
    refused(ConfigError, "11, 16, 19", vgg, 13, dims=1, channels=1, classes=10)
    refused(ConfigError, "group or batch", make_workload("mnist1d-vgg11", norm="layer").make_model, 0)
