"""Jobs whose gradients are largely zero, or are reduced by top-k; on synthetic data or on the standard library's
source.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD

from dynamix_lab.suites.compression.sparse_models import (
    AttentionBody,
    Experts,
    LstmBody,
    NeuralFilter,
    TiedLanguageModel,
    adapted_transformer,
)
from dynamix_lab.suites.compression.task import CompressionTask
from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.base import initial_weights
from dynamix_lab.tasks.pysource import CONTEXT, TOKENS, source_files
from dynamix_lab.tasks.ratings import make_optimizer as adagrad
from dynamix_lab.tasks.sequence import Transformer

TEXT_BYTES = 3_000_000  # of the standard library's source
UNKNOWN = 0  # the word for all that are not in the vocabulary; counted as the most frequent one
ROWS, WIDTH, OWN = 10_000, 64, 300  # of the swept table; OWN: rows that a worker's batch touches: 3 %, as in the map
KEEP = 0.01  # of a worker's gradient, after top-k: then the union of four to eight workers is about a twentieth
PAIRS = ((2, 1), (2, 2), (4, 4), (4, 8), (4, 8))  # VGG19: number of convolutions, and their width over the first one's
_WORD = re.compile(r"[A-Za-z_]\w*|\d+|[^\w\s]")


def popularity(rng: np.random.Generator, n: int, exponent: float) -> NDArray[np.float64]:
    """Zipf popularity in a random order, as a cumulative sum for searching."""
    weights = (1.0 + rng.permutation(n)) ** -exponent
    summed = np.cumsum(weights)
    return np.asarray(summed / summed[-1])


def filtering(
    seed: int, *, users: int = 1_000_000, items: int = 50_000, factors: int = 8, samples: int = 256
) -> CompressionTask:
    """A million users. One pair in five is a real choice, the others are random negatives."""
    rng = np.random.default_rng(seed)
    chance_user, chance_item = popularity(rng, users, 1.0), popularity(rng, items, 1.0)
    taste = rng.normal(size=(32, 32)) > 0.8  # by groups of users and of items

    def make(model_seed: int, *, sparse: bool = False) -> nn.Module:
        with initial_weights(model_seed):
            return NeuralFilter(users=users, items=items, factors=factors, sparse=sparse)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        drawn = np.random.default_rng([seed, number])
        user = np.searchsorted(chance_user, drawn.random(samples))
        item = np.searchsorted(chance_item, drawn.random(samples))
        taken = taste[user % 32, item % 32].astype(np.float32)
        return torch.from_numpy(np.stack([user, item], 1)), torch.from_numpy(taken)

    sparse = functools.partial(make, sparse=True)
    return CompressionTask("ncf", make, adagrad, F.binary_cross_entropy_with_logits, batch, make_sparse=sparse)


@functools.lru_cache(maxsize=2)
def words_of_source(vocabulary: int, text_bytes: int = TEXT_BYTES) -> NDArray[np.int64]:
    """The standard library's source as numbers of words, by falling frequency; rare words are `UNKNOWN`."""
    found: list[str] = []
    size = 0
    for path in source_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += _WORD.findall(text)
        size += len(text)
        if size > text_bytes:
            break
    ranked = [word for word, _ in Counter(found).most_common(vocabulary - 1)]
    number = {word: place + 1 for place, word in enumerate(ranked)}
    return np.array([number.get(word, UNKNOWN) for word in found], dtype=np.int64)


def tied(
    name: str,
    seed: int,
    *,
    vocabulary: int = 16_384,
    width: int = 64,
    length: int = 32,
    samples: int = 4,
    drawn: int = 128,
    text_bytes: int = TEXT_BYTES,
) -> CompressionTask:
    """Words of the standard library, by an LSTM or a transformer whose embedding is also its output."""
    text = words_of_source(vocabulary, text_bytes)
    body: Callable[[], nn.Module] = functools.partial(LstmBody, width)
    if name == "transformer-tied":
        body = functools.partial(AttentionBody, width, length)

    def make(model_seed: int, *, sparse: bool = False) -> nn.Module:
        with initial_weights(model_seed):
            return TiedLanguageModel(vocabulary, width, length, body, sparse=sparse)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng([seed, number])
        starts = rng.integers(0, len(text) - length - 1, samples)
        words = text[starts[:, None] + np.arange(length + 1)]
        others = (np.exp(rng.random(drawn) * np.log(vocabulary + 1)) - 1).astype(np.int64)  # log-uniform: like Zipf
        others = np.minimum(others, vocabulary - 1)
        inputs = np.concatenate([words, np.broadcast_to(others, (samples, drawn))], 1)
        return torch.from_numpy(inputs), torch.zeros(samples * length, dtype=torch.int64)

    return CompressionTask(
        name, make, adagrad, F.cross_entropy, batch, make_sparse=functools.partial(make, sparse=True)
    )


def experts(
    seed: int, *, experts: int = 128, width: int = 64, hidden: int = 64, classes: int = 48, samples: int = 64
) -> CompressionTask:
    """128 experts, of which a worker's batch needs few: its samples have four classes."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, width)).astype(np.float32)

    def make(model_seed: int) -> nn.Module:
        with initial_weights(model_seed):
            return Experts(experts=experts, width=width, hidden=hidden, classes=classes)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        drawn = np.random.default_rng([seed, number])
        about = drawn.choice(drawn.choice(classes, size=4, replace=False), size=samples)
        x = centres[about] + 0.25 * drawn.normal(size=(samples, width)).astype(np.float32)
        return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(about.astype(np.int64))

    # Slow enough that routes do not change within a cell, so that all ways have the same zeros.
    return CompressionTask("moe", make, functools.partial(SGD, lr=1e-3), F.cross_entropy, batch)


def adapters(seed: int, *, width: int = 128, layers: int = 2, rank: int = 8, samples: int = 2) -> CompressionTask:
    """Adapters of rank 8 on a frozen transformer, trained on the standard library's bytes."""
    workload = make_workload("pysource")
    data = workload.make_data(seed, train=1990, test=10).train

    def make(model_seed: int) -> nn.Module:
        with initial_weights(model_seed):
            return adapted_transformer(tokens=TOKENS, context=CONTEXT, width=width, layers=layers, rank=rank)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        return data.__getitems__(np.random.default_rng([seed, number]).integers(0, len(data), samples).tolist())

    return CompressionTask("lora", make, adagrad, workload.loss, batch)


def swept(
    name: str, seed: int, workers: int, *, rows: int = ROWS, width: int = WIDTH, own: int = OWN
) -> CompressionTask:
    """A table of which each worker touches `own` rows. The percentage in the name is the same rows on all workers, the
    others are on no other worker.
    """
    common = round(own * int(name.removeprefix("rows-")) / 100)

    def make(model_seed: int, *, sparse: bool = False) -> nn.Module:
        with initial_weights(model_seed):
            return _Table(rows, width, sparse=sparse)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        step, rank = divmod(number, workers)
        order = np.random.default_rng([seed, step]).permutation(rows)
        first = common + rank * (own - common)
        touched = np.concatenate([order[:common], order[first : first + own - common]])
        wanted = np.random.default_rng([seed, number, 1]).normal(size=own).astype(np.float32)
        return torch.from_numpy(touched), torch.from_numpy(wanted)

    return CompressionTask(name, make, adagrad, F.mse_loss, batch, make_sparse=functools.partial(make, sparse=True))


def pictures(
    seed: int, *, width: int = 8, side: int = 64, hidden: int = 1024, classes: int = 100, samples: int = 1
) -> CompressionTask:
    """VGG19 (arXiv 1409.1556) on pictures of `side` x `side`. `hidden` wide layers hold most of it, as in the paper."""
    centres = np.random.default_rng(seed).normal(size=(classes, 3, side, side)).astype(np.float32)

    def make(model_seed: int) -> nn.Module:
        layers, channels = list[nn.Module](), 3
        with initial_weights(model_seed):
            for count, times in PAIRS:
                for _ in range(count):
                    convolution = nn.Conv2d(channels, times * width, 3, padding=1)
                    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
                    layers += [convolution, nn.ReLU()]
                    channels = times * width
                layers.append(nn.MaxPool2d(2))
            layers += [nn.Flatten(), nn.Linear(channels * (side // 32) ** 2, hidden), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def batch(number: int) -> tuple[Tensor, Tensor]:
        drawn = np.random.default_rng([seed, number])
        about = drawn.integers(0, classes, samples)
        x = centres[about] + 0.25 * drawn.normal(size=(samples, 3, side, side))
        return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(about)

    return CompressionTask("vgg-topk", make, functools.partial(SGD, lr=1e-3), F.cross_entropy, batch, keep=KEEP)


def next_words(
    seed: int, *, words: int = 3840, width: int = 96, layers: int = 12, length: int = 32, samples: int = 1
) -> CompressionTask:
    """Twelve blocks of a transformer on words of the standard library, with a full softmax."""
    text = words_of_source(words)

    def make(model_seed: int) -> nn.Module:
        with initial_weights(model_seed):
            return Transformer(tokens=words, context=length, width=width, layers=layers, heads=12)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        starts = np.random.default_rng([seed, number]).integers(0, len(text) - length - 1, samples)
        read = torch.from_numpy(text[starts[:, None] + np.arange(length + 1)])
        return read[:, :-1], read[:, 1:]

    return CompressionTask("bert-topk", make, functools.partial(SGD, lr=1e-3), F.cross_entropy, batch, keep=KEEP)


class _Table(nn.Module):
    """The output is the mean of a row; inputs (n,) int64."""

    def __init__(self, rows: int, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=sparse)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.table(rows).mean(1)
        return found


def make_sparse_job(name: str, seed: int, workers: int, **options: Any) -> CompressionTask:
    """One of `jobs.SPARSE_JOBS`."""
    if name in _MAKERS:
        return _MAKERS[name](seed, **options)
    if name.endswith("-tied"):
        return tied(name, seed, **options)
    return swept(name, seed, workers, **options)


_MAKERS: dict[str, Callable[..., CompressionTask]] = {
    "ncf": filtering,
    "ncf-20m": functools.partial(filtering, users=138_493, items=26_744, samples=8192),
    "moe": experts,
    "lora": adapters,
    "vgg-topk": pictures,
    "bert-topk": next_words,
}
