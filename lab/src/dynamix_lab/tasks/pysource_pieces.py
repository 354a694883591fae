"""pysource-pieces: short pieces of Python source with log-normal lengths, so that step times depend on the data.

A sample's cost is its number of bytes (`Workload.costs`), and a batch is cut to its longest sample. The text is that of
`pysource`; its bytes become 98 tokens. The net is Bengio's of 2003: the six previous bytes predict the next one. No
transformer is as cheap: with one layer, 32 wide, 64 samples take six times as long.

The loss is the sum over bytes, divided by the number of samples and by the usual length of one. So it is a mean over
samples, exact under weights by samples, and a longer sample counts for more, as in a mean over bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from dynamix.errors import ConfigError
from dynamix.window import Floats
from dynamix_lab.tasks.base import Arrays, Data, Workload, check_sizes, initial_weights
from dynamix_lab.tasks.pysource import IGNORE, byte_accuracy, source_files

LONGEST = 32  # most bytes predicted per sample
MEDIAN_BYTES = 6.0
SIGMA = 0.7  # of the logarithm of a length
USUAL_BYTES = 7.6  # the mean of such lengths, limited to LONGEST
TOKENS = 98  # padding, 95 printable characters, the end of a line, anything else
TRAIN_SAMPLES = 65_536
TEST_SAMPLES = 1_000
LEARNING_RATE = 0.5
MOMENTUM = 0.9
ADAMW_RATE = 0.01
BEFORE = 6  # bytes that a prediction sees
EMBEDDING = 8
HIDDEN = 64


def workload(*, adamw: bool = False) -> Workload:
    """Pieces of the standard library's source and a perceptron over the six previous bytes; SGD, or AdamW."""
    return Workload(
        name="pysource-pieces-adamw" if adamw else "pysource-pieces",
        make_data=make_data,
        make_model=make_model,
        make_optimizer=functools.partial(AdamW, lr=ADAMW_RATE) if adamw else make_optimizer,
        loss=loss,
        metric=byte_accuracy,
        min_batch=1,
        max_batch=512,
        base_batch=256,
        metric_name="next-byte accuracy",
        costs=costs,
        description="pieces of Python's standard library of log-normal length, perceptron over six bytes",
    )


class BytesBefore(nn.Module):
    """The next byte from the previous ones (Bengio et al., JMLR 2003): (n, length) tokens to (n, 98, length) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, EMBEDDING, padding_idx=0)
        self.hidden = nn.Linear(BEFORE * EMBEDDING, HIDDEN)
        self.out = nn.Linear(HIDDEN, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (BEFORE - 1, 0))
        seen = self.embed(padded.unfold(1, BEFORE, 1)).flatten(2)
        logits: Tensor = self.out(F.relu(self.hidden(seen)))
        return logits.transpose(1, 2)


class Sequences(Arrays):
    """Sequences of different length, padded at the end. A batch is cut to its longest.

    targets   (n, longest) int64; `IGNORE` after the end of a sequence
    """

    def __getitems__(self, indices: object) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitems__(indices)  # type: ignore[arg-type]
        longest = int((targets != IGNORE).any(0).sum())
        return inputs[:, :longest], targets[:, :longest]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy (nats) summed over the existing bytes, over samples times `USUAL_BYTES`."""
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") / (len(targets) * USUAL_BYTES)


def costs(data: Arrays) -> Floats:
    """Bytes that each sample predicts, shape (n,).

    >>> costs(Arrays(torch.zeros(2, 3), torch.tensor([[7, 8, IGNORE], [9, IGNORE, IGNORE]])))
    array([2., 1.])
    """
    bytes_there: Floats = (data.targets != IGNORE).sum(1).numpy().astype(np.float64)
    return bytes_there


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD, lr 0.5, momentum 0.9: the learning rate is for a global batch of 256."""
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def make_model(seed: int) -> nn.Module:
    """10,214 parameters; see `BytesBefore`."""
    with initial_weights(seed):
        return BytesBefore()


@functools.lru_cache(maxsize=2)
def make_data(seed: int, *, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Data:
    """`train` and `test` pieces from different files, in an order and with cuts drawn by `seed`.

    Raises `ConfigError` if there is no source, or not enough.
    """
    check_sizes(train, test)
    rng = np.random.default_rng(seed)
    files = source_files()
    order = iter(rng.permutation(len(files)))
    most = int(sum(path.stat().st_size for path in files) / (1.2 * USUAL_BYTES))
    if train + test > most:
        raise ConfigError("samples", train + test, f"at most {most:,} to train and to test together", "ask for fewer")
    held_out, rest = (_pieces(rng, wanted, (files[i] for i in order)) for wanted in (test, train))
    return Data(rest, held_out)


def _pieces(rng: np.random.Generator, wanted: int, files: Iterator[Path]) -> Sequences:
    """`wanted` pieces, from as many files as they need."""
    lengths = _lengths(rng, wanted)
    needed, text = int(lengths.sum()) + wanted, bytearray()
    while len(text) < needed:
        text += next(files).read_bytes()
    return _cut(tokens(bytes(text)), lengths)


def _lengths(rng: np.random.Generator, n: int) -> NDArray[np.int64]:
    return np.clip(np.round(MEDIAN_BYTES * np.exp(SIGMA * rng.normal(size=n))), 1, LONGEST).astype(np.int64)


def tokens(text: bytes) -> NDArray[np.int64]:
    values = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    known = (values >= 32) & (values < 127)
    return np.where(known, values - 31, np.where(values == ord("\n"), 96, 97))


def _cut(tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Sequences:
    """Pieces one after another. The first byte of each has no previous bytes and is only read."""
    starts = np.concatenate([[0], np.cumsum(lengths + 1)[:-1]])
    column = np.arange(LONGEST)
    there = column < lengths[:, None]
    place = np.where(there, starts[:, None] + column, 0)
    inputs, targets = np.where(there, tokens[place], 0), np.where(there, tokens[place + 1], IGNORE)
    return Sequences(torch.from_numpy(inputs), torch.from_numpy(targets))
