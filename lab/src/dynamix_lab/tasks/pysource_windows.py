"""pysource-windows: windows of equal length of Python source, so that weights by samples are exact.

The text is that of `pysource`, its tokens those of `pysource-pieces`. Test files are the same for all seeds, so that
one target suits all. Half of the training targets are random bytes, so that large batches pay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW, Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.tasks.base import Arrays, Data, Workload, check_sizes, initial_weights
from dynamix_lab.tasks.pysource import byte_accuracy, source_files
from dynamix_lab.tasks.pysource_pieces import TOKENS, tokens
from dynamix_lab.tasks.sequence import Lstm, Transformer
from dynamix_lab.tasks.teacher import randomise

CONTEXT = 16
WIDTH = 32
HEADS = 2
RANDOM_BYTES = 0.5
BETAS = (0.8, 0.95)  # of AdamW: with them a transformer this small can take larger steps
EMBED_SD, POSITION_SD = 1.0, 0.5  # with these initial values a transformer distinguishes tokens and positions at once
TRAIN_SAMPLES = 65_536
TEST_SAMPLES = 4_000
TEST_SEED = 0  # of the order in which test files are chosen
NETS = ("transformer", "lstm")
LEARNING_RATES = {"transformer": 0.032, "lstm": 0.0625}
TARGETS = {"transformer": 0.431, "lstm": 0.455}  # by the rule of docs/design/jobs.md


def workload(net: str = "transformer") -> Workload:
    """Windows of 16 bytes of the standard library, and one block of a transformer or one LSTM layer, 32 wide."""
    if net not in NETS:
        raise ConfigError("net", net, ", ".join(NETS), "check the spelling")

    def make_model(seed: int) -> nn.Module:
        with initial_weights(seed):
            if net == "lstm":
                return Lstm(tokens=TOKENS, width=WIDTH)
            transformer = Transformer(tokens=TOKENS, context=CONTEXT, width=WIDTH, layers=1, heads=HEADS)
            nn.init.normal_(transformer.embed.weight, std=EMBED_SD)
            nn.init.normal_(transformer.position, std=POSITION_SD)
            return transformer

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=LEARNING_RATES[net], betas=BETAS if net == "transformer" else (0.9, 0.999))

    return Workload(
        name="pysource-windows" if net == "transformer" else f"pysource-windows-{net}",
        make_data=make_data,
        make_model=make_model,
        make_optimizer=make_optimizer,
        loss=F.cross_entropy,
        metric=byte_accuracy,
        min_batch=1,
        max_batch=512,
        base_batch=128,
        target=TARGETS[net],
        metric_name="next-byte accuracy",
        description=f"windows of {CONTEXT} bytes of Python's standard library, {net}, {WIDTH} wide",
    )


@functools.lru_cache(maxsize=4)
def make_data(
    seed: int, *, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES, folder: str | Path | None = None
) -> Data:
    """Windows of whole files, in an order drawn by `seed`: inputs and targets (n, 16) int64, one byte apart.

    folder   of Python source; None: the running interpreter's standard library

    Raises `ConfigError` if there is no source, or not enough.
    """
    check_sizes(train, test)
    files = _shuffled(source_files(folder), TEST_SEED)
    held_out = _windows(files, test)
    kept = _windows(_shuffled(list(files), seed), train)
    noisy = kept.targets.clone()
    randomise(noisy.view(-1), RANDOM_BYTES, TOKENS, torch.Generator().manual_seed(seed))
    return Data(Arrays(kept.inputs, noisy), held_out)


def _shuffled(files: list[Path], seed: int) -> Iterator[Path]:
    return iter([files[index] for index in np.random.default_rng(seed).permutation(len(files))])


def _windows(files: Iterator[Path], wanted: int) -> Arrays:
    """`wanted` adjacent windows, from as many files as they need."""
    text = bytearray()
    while len(text) <= wanted * CONTEXT:
        path = next(files, None)
        if path is None:
            allowed = f"at most about {len(text) // CONTEXT:,} windows in these files"
            raise ConfigError("samples", wanted, allowed, "ask for fewer, or name another folder")
        text += path.read_bytes()
    codes = torch.from_numpy(tokens(bytes(text[: wanted * CONTEXT + 1])))
    return Arrays(codes[:-1].view(wanted, CONTEXT), codes[1:].view(wanted, CONTEXT))
