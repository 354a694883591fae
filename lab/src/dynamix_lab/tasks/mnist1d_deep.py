"""mnist1d with deep nets: VGG-11, 16, 19 and ResNet-34, 50 in one dimension, narrow enough for two cores.

The data are mnist1d's. Families of one kind and several depths are what transfer of policies is measured on.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from dynamix.errors import ConfigError
from dynamix_lab.tasks.base import Workload, accuracy, initial_weights
from dynamix_lab.tasks.convolution import RESNET_STAGES, VGG_STAGES, Norm, adamw, resnet, vgg
from dynamix_lab.tasks.mnist1d import make_data

VGG_WIDTH = 16
RESNET_WIDTH = 8
CLASSES = 10

_FAMILIES = {
    **{f"vgg{depth}": (vgg, depth, VGG_WIDTH) for depth in VGG_STAGES},
    **{f"resnet{depth}": (resnet, depth, RESNET_WIDTH) for depth in RESNET_STAGES},
}
NETS = tuple(_FAMILIES)


def workload(net: str, *, width: int | None = None, norm: Norm = "group") -> Workload:
    """mnist1d with `net`: vgg11, vgg16, vgg19, resnet34 or resnet50.

    width   channels of the first stage; None: 16 (VGG) or 8 (ResNet)
    norm    "batch" as first published, or "group" (see `dynamix_lab.tasks.convolution`)
    """
    if net not in _FAMILIES:
        raise ConfigError("net", net, ", ".join(NETS), "check the spelling")
    family, depth, usual = _FAMILIES[net]
    wide = usual if width is None else width

    def make_model(seed: int) -> nn.Module:
        with initial_weights(seed):
            return family(depth, dims=1, channels=1, classes=CLASSES, width=wide, norm=norm)

    return Workload(
        name=f"mnist1d-{net}",
        make_data=make_data,
        make_model=make_model,
        make_optimizer=adamw,
        loss=F.cross_entropy,
        metric=accuracy,
        min_batch=8,
        max_batch=512,
        base_batch=128,
        description=f"mnist1d, {net} in one dimension, {wide} channels wide at first, {norm} norm",
    )
