"""mnist1d (Greydanus, arXiv 2011.14439): ten digit templates, stretched, shifted, sheared and with added noise.

The `mnist1d` package generates any number of samples here; nothing is downloaded. 28,000 samples take about 15 s, so
they are stored in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.optim import SGD, Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.installed import how_to_install
from dynamix_lab.tasks.base import Arrays, Data, Workload, accuracy

TRAIN_SAMPLES = 24_000
TEST_SAMPLES = 4_000
LEARNING_RATE = 0.05
MOMENTUM = 0.9
WIDTH = 128
LENGTH = 40

# 98 % of the plateau (0.966) of static training with a global batch of 512 on these seeds, which are never used again.
# docs/design/comparison.md says how it was chosen.
TARGET_ACCURACY = 0.947
TUNING_SEEDS = (9001, 9002)


def workload() -> Workload:
    """mnist1d with a 1-D convolutional net of 112,138 parameters and SGD with momentum."""
    return Workload(
        name="mnist1d",
        make_data=make_data,
        make_model=make_model,
        make_optimizer=make_optimizer,
        loss=F.cross_entropy,
        metric=accuracy,
        min_batch=8,
        max_batch=512,
        target=TARGET_ACCURACY,
        base_batch=512,
        description="mnist1d, the data set's three convolutions, 128 wide",
    )


def make_model(seed: int) -> nn.Module:
    """The data set's own three-layer convolutional net, 128 wide: 1 x 40 -> 10 logits, 112,138 parameters.

    Without batch norm and dropout, so that one weighted all-reduce equals one pass over the union batch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv1d(1, WIDTH, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(WIDTH * 10, 10),
        )


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD, lr 0.05, momentum 0.9: the learning rate is for a global batch of 512."""
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


@functools.lru_cache(maxsize=2)
def make_data(seed: int, *, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Data:
    """`train` and `test` samples (their sum a multiple of 10); the same for the same seed and version of `mnist1d`.

    Raises `ConfigError` if the package is missing or a size is impossible.
    """
    if train < 1 or test < 1 or (train + test) % 10:
        fix = "every digit gets the same number of samples"
        raise ConfigError("samples", train + test, "a multiple of 10, of which 1 or more to train and to test", fix)
    path = _cache_path(seed, f"{train}+{test}")
    if path.exists():
        arrays = _load(path, train + test)
    else:
        arrays = _generate(seed, train, test)
        _save(path, arrays)
    inputs = torch.from_numpy(arrays["inputs"]).unsqueeze(1)
    targets = torch.from_numpy(arrays["targets"])
    return Data(Arrays(inputs[:train], targets[:train]), Arrays(inputs[train:], targets[train:]))


def _generate(seed: int, train: int, test: int) -> dict[str, NDArray[Any]]:
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError as error:
        fix = how_to_install("bench")
        raise ConfigError("workload", "mnist1d", "a workload whose packages are installed", fix) from error
    arguments = get_dataset_args()  # type: ignore[no-untyped-call]
    arguments.num_samples = train + test
    arguments.train_split = (train + 0.5) / (train + test)  # int() truncates it; half a sample avoids rounding errors
    arguments.seed = seed
    with _random_state_kept():  # the generator seeds the global generators
        made = make_dataset(arguments)  # type: ignore[no-untyped-call]
    return {
        "inputs": np.concatenate([made["x"], made["x_test"]]).astype(np.float32),
        "targets": np.concatenate([made["y"], made["y_test"]]).astype(np.int64),
    }


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    plain, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(numpy)


def _cache_path(seed: int, size: str) -> Path:
    from importlib.metadata import PackageNotFoundError, version

    try:
        made_by = version("mnist1d")
    except PackageNotFoundError:
        made_by = "none"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "dynamix" / f"mnist1d-{made_by}-{size}-seed{seed}.npz"


def _load(path: Path, samples: int) -> dict[str, NDArray[Any]]:
    """The data that `_save` wrote. Raises `ConfigError` for other files: truncated, or written by another program."""
    try:
        with path.open("rb") as file, np.load(file) as saved:
            arrays = {name: saved[name] for name in ("inputs", "targets")}
        known = {name: (a.shape, a.dtype.name) for name, a in arrays.items()}
        if known != {"inputs": ((samples, LENGTH), "float32"), "targets": ((samples,), "int64")}:
            raise ValueError(f"it holds {known}")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        fix = f"remove it, and the data are made again ({error})"
        raise ConfigError("cached data", str(path), "a complete file of this version", fix) from error
    return arrays


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write all or nothing, so that no reader sees half a file. A read-only home is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
            unfinished = Path(file.name)
            try:
                np.savez(file, inputs=arrays["inputs"], targets=arrays["targets"])
                file.flush()
                unfinished.replace(path)
            except OSError:
                unfinished.unlink()  # a full disk
                raise
