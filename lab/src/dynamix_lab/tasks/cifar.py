"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from a folder, in the authors' "python version": pickled batches.

Nothing is downloaded. Unpack cifar-10-python.tar.gz or cifar-100-python.tar.gz of www.cs.toronto.edu/~kriz/cifar.html
and name the folder, here or in DYNAMIX_DATA. Images stay uint8; the model makes floats of them. There is no
augmentation: it would draw random numbers per rank, and two runs with the same samples would no longer see the same
inputs.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from dynamix.errors import ConfigError
from dynamix_lab.tasks.base import Arrays, Data, Workload, accuracy, check_sizes, initial_weights
from dynamix_lab.tasks.convolution import Norm, Pixels, adamw, resnet, sgd, vgg
from dynamix_lab.tasks.restricted import load_plain

FOLDER_VARIABLE = "DYNAMIX_DATA"
IMAGE_BYTES = 3 * 32 * 32


@dataclass(frozen=True, slots=True)
class _Format:
    """How the authors laid out one data set; mean and deviation of the training pixels per channel, in [0, 1]."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: bytes
    classes: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]


FORMATS = {
    "cifar10": _Format(
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        b"labels",
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Format(
        "cifar-100-python",
        ("train",),
        ("test",),
        b"fine_labels",
        100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
}
_NETS: dict[str, Any] = {"vgg16": (vgg, 16), "resnet34": (resnet, 34)}
NETS = tuple(_NETS)


def workload(
    data_set: str, net: str, *, folder: str | Path | None = None, width: int = 64, norm: Norm = "group"
) -> Workload:
    """`cifar10` or `cifar100` with `vgg16` or `resnet34`.

    folder   that holds the batches, or the folder above it; None: the environment variable DYNAMIX_DATA names it
    width    channels of the first stage; 64 as published
    norm     "batch" as published with these data, or "group" (see `dynamix_lab.tasks.convolution`)
    """
    for name, value, known in (("data_set", data_set, FORMATS), ("net", net, _NETS)):
        if value not in known:
            raise ConfigError(name, value, ", ".join(known), "check the spelling")
    form, (family, depth) = FORMATS[data_set], _NETS[net]

    def make_model(seed: int) -> nn.Module:
        with initial_weights(seed):
            body = family(depth, dims=2, channels=3, classes=form.classes, width=width, norm=norm)
        return nn.Sequential(Pixels(form.mean, form.deviation), body)

    return Workload(
        name=f"{data_set}-{net}",
        make_data=functools.partial(make_data, data_set=data_set, folder=folder),
        make_model=make_model,
        make_optimizer=adamw if family is vgg else sgd,
        loss=F.cross_entropy,
        metric=accuracy,
        min_batch=8,
        max_batch=1024,
        base_batch=128,
        description=f"{data_set} from a local folder, {net}, {width} channels wide at first, {norm} norm",
    )


def make_data(
    seed: int,
    *,
    train: int | None = None,
    test: int | None = None,
    data_set: str = "cifar10",
    folder: str | Path | None = None,
) -> Data:
    """Images (n, 3, 32, 32) uint8 and classes; `train` and `test` of them, chosen by `seed`, None: all in their order.

    Raises `ConfigError` when the folder or a file is missing, or a file is not what the authors distribute.
    """
    form = FORMATS[data_set]
    place = find_folder(data_set, folder)
    parts = [_read(place, form, names) for names in (form.train, form.test)]
    rng = np.random.default_rng(seed)
    chosen = []
    for name, wanted, whole in zip(("train", "test"), (train, test), parts, strict=True):
        if wanted is None:
            chosen.append(whole)
            continue
        check_sizes(wanted, 1)
        if wanted > len(whole):
            raise ConfigError(name, wanted, f"1 to {len(whole):,}", "ask for fewer, or complete the folder")
        order = torch.from_numpy(rng.permutation(len(whole))[:wanted])
        chosen.append(Arrays(whole.inputs[order], whole.targets[order]))
    return Data(*chosen)


def find_folder(data_set: str, folder: str | Path | None = None) -> Path:
    """The folder of the batches themselves. Raises `ConfigError` that says what is missing and where to get it."""
    form = FORMATS[data_set]
    given = folder if folder is not None else os.environ.get(FOLDER_VARIABLE)
    fix = f"unpack the python version of www.cs.toronto.edu/~kriz/cifar.html and pass folder= or set {FOLDER_VARIABLE}"
    allowed = f"a folder with {form.folder}/, or with its files {', '.join(form.train + form.test)}"
    if given is None:
        raise ConfigError("folder", None, allowed, fix)
    for place in (Path(given), Path(given) / form.folder):
        if all((place / name).is_file() for name in form.train + form.test):
            return place
    raise ConfigError("folder", str(given), allowed, fix)


@functools.lru_cache(maxsize=4)
def _read(place: Path, form: _Format, names: tuple[str, ...]) -> Arrays:
    images, labels = zip(*(_read_batch(place / name, form) for name in names), strict=True)
    pixels = np.concatenate(images).reshape(-1, 3, 32, 32)
    return Arrays(torch.from_numpy(pixels), torch.from_numpy(np.concatenate(labels)))


def _read_batch(path: Path, form: _Format) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    fix = "unpack the authors' archive again"
    batch = load_plain(path, fix=fix)
    keys = {b"data", form.labels}
    if not isinstance(batch, dict) or not keys <= {k.encode() if isinstance(k, str) else k for k in batch}:
        found = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise ConfigError("file", str(path), f"a dict with {sorted(keys)}, this is {found}", fix)
    known = {k.encode() if isinstance(k, str) else k: value for k, value in batch.items()}
    data, labels = known[b"data"], known[form.labels]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != IMAGE_BYTES:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise ConfigError("file", str(path), f"images as uint8 (n, {IMAGE_BYTES}), this is {found}", fix)
    right = isinstance(labels, list) and all(type(label) is int and 0 <= label < form.classes for label in labels)
    if not right or len(labels) != len(data) or not labels:
        raise ConfigError("file", str(path), f"a label 0 to {form.classes - 1} for each of {len(data)} images", fix)
    return data, np.array(labels, dtype=np.int64)
