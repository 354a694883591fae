"""pysource: a byte-level language model of the running interpreter's standard library. Real text on every machine.

A sample is as many whole lines of one file as fit into 129 bytes (longer lines are cut): 128 inputs, and the byte after
each as its target. So samples differ in length, and the divisor of the mean loss is a number of bytes: train with
`controller.weight(loss, count=workload.divisor(targets))`. Files, not samples, are split into train and test. The text
is the interpreter's, so scores are comparable only with the same version of Python.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.tasks.base import Arrays, Data, Workload, check_sizes, initial_weights
from dynamix_lab.tasks.sequence import Lstm, Transformer

TOKENS = 256
CONTEXT = 128
IGNORE = -100  # target beyond the end of a sample: cross_entropy's own default
TRAIN_SAMPLES = 24_000
TEST_SAMPLES = 1_000
NETS = ("transformer", "lstm")
LEARNING_RATES = {"transformer": 3e-3, "lstm": 1e-2}

# Not the library's own code: installed packages, and tests, which are mostly tables.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def workload(net: str = "transformer") -> Workload:
    """The standard library's source with a two-layer causal transformer, or one LSTM layer (`lstm`)."""
    if net not in NETS:
        raise ConfigError("net", net, ", ".join(NETS), "check the spelling")

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=LEARNING_RATES[net])

    return Workload(
        name="pysource" if net == "transformer" else f"pysource-{net}",
        make_data=make_data,
        make_model=_transformer if net == "transformer" else _lstm,
        make_optimizer=make_optimizer,
        loss=loss,
        metric=byte_accuracy,
        min_batch=2,
        max_batch=128,
        count=count,
        base_batch=64,
        metric_name="next-byte accuracy",
        description=f"bytes of Python's standard library, {net}",
    )


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy (nats) over the existing bytes; logits (n, 256, length), targets (n, length)."""
    return F.cross_entropy(logits, targets, ignore_index=IGNORE)


def count(targets: Tensor) -> int:
    """The number of bytes of that mean.

    >>> count(torch.tensor([[7, 8, IGNORE], [9, IGNORE, IGNORE]]))
    3
    """
    return int((targets != IGNORE).sum())


def byte_accuracy(logits: Tensor, targets: Tensor) -> float:
    """Fraction of bytes whose largest logit is the right one."""
    there = targets != IGNORE
    return float((logits.argmax(1)[there] == targets[there]).float().mean())


@functools.lru_cache(maxsize=2)
def make_data(
    seed: int, *, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES, folder: str | Path | None = None
) -> Data:
    """`train` and `test` samples of whole files, in an order drawn by `seed`: inputs and targets (n, 128) int64.

    folder   of Python source; None: the running interpreter's standard library

    Raises `ConfigError` if there is no source (a frozen interpreter), or not enough.
    """
    check_sizes(train, test)
    files = source_files(folder)
    order = np.random.default_rng(seed).permutation(len(files))
    taken: dict[str, list[bytes]] = {"test": [], "train": []}
    remaining = iter(order)
    for name, wanted in (("test", test), ("train", train)):
        found = taken[name]
        for index in remaining:
            found.extend(cut(files[index].read_bytes()))
            if len(found) >= wanted:
                break
        if len(found) < wanted:
            there = len(taken["test"]) + len(taken["train"])
            allowed = f"at most about {there:,} samples in {len(files):,} files"
            raise ConfigError("samples", train + test, allowed, "ask for fewer, or name another folder")
        del found[wanted:]
    return Data(_arrays(taken["train"]), _arrays(taken["test"]))


def source_files(folder: str | Path | None = None) -> list[Path]:
    """The library's .py files by path, without installed packages and tests: the same list on every machine with this
    version of Python."""
    root = Path(folder) if folder is not None else Path(sysconfig.get_path("stdlib"))
    found = []
    for place, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - _LEFT_OUT)  # do not search them: installed packages are many
        paths = (Path(place) / name for name in names if name.endswith(".py"))
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    if not found:
        allowed = "a folder with .py files"
        fix = "use an interpreter whose standard library is plain files, or name a folder of Python source"
        raise ConfigError("folder", str(root), allowed, fix)
    return [path for _, path in sorted(found)]


def cut(text: bytes, *, longest: int = CONTEXT + 1) -> list[bytes]:
    """Whole lines, as many together as fit into `longest` bytes; a longer line is cut. No text is lost, except pieces
    of one byte, which predict nothing.

    >>> cut(b"import os" + bytes([10]) + b"import sys", longest=12)
    [b'import os\\n', b'import sys']
    """
    pieces, start = [], 0
    while start < len(text):
        end = start + longest
        if end < len(text):
            line_end = text.rfind(b"\n", start, end)
            end = end if line_end < 0 else line_end + 1
        pieces.append(text[start:end])
        start = end
    return [piece for piece in pieces if len(piece) > 1]


def _arrays(pieces: list[bytes]) -> Arrays:
    inputs = np.zeros((len(pieces), CONTEXT), dtype=np.int64)
    targets = np.full((len(pieces), CONTEXT), IGNORE, dtype=np.int64)
    for row, piece in enumerate(pieces):
        values = np.frombuffer(piece, dtype=np.uint8)
        inputs[row, : len(values) - 1], targets[row, : len(values) - 1] = values[:-1], values[1:]
    return Arrays(torch.from_numpy(inputs), torch.from_numpy(targets))


def _transformer(seed: int) -> nn.Module:
    with initial_weights(seed):
        return Transformer(tokens=TOKENS, context=CONTEXT)


def _lstm(seed: int) -> nn.Module:
    with initial_weights(seed):
        return Lstm(tokens=TOKENS)
