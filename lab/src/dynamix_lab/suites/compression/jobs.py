"""What `dynamix bench compression` trains: four jobs whose gradients are zero in different ways.

ratings      embeddings of 30,000 users and 10,000 items, 64 wide, dense gradients: 2.6 million parameters, 10.4 MB. A
             worker's 128 ratings touch at most 256 of its 40,000 rows, so more than 99 % of them get no gradient on a
             worker, and about 97 % (4 workers) or 95 % (8) on none. The bundled `ratings` has 2,300 rows of 8 and would
             fit into a few packets; model, popularity and optimizer are its own
lstm         `pysource-lstm` as bundled: bytes, so its embedding has 256 rows, and nearly nothing is zero
transformer  `pysource` as bundled: the same
vgg19        `mnist1d-vgg19` as bundled; no zeros of its own. The lossless ways get 1 % of it, by top-k with error
             feedback
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.base import initial_weights
from dynamix_lab.tasks.ratings import MEAN, NOISE, RANK, Factorisation
from dynamix_lab.tasks.ratings import make_optimizer as adagrad

JOBS = ("ratings", "lstm", "transformer", "vgg19")
SPARSEST = "ratings"
USERS, ITEMS, FACTORS = 30_000, 10_000, 64
POPULARITY = 0.7  # Zipf exponent, as in the bundled workload
_BUNDLED = {"lstm": ("pysource-lstm", 8), "transformer": ("pysource", 8), "vgg19": ("mnist1d-vgg19", 16)}
AFTER_TOPK = {"vgg19": 0.01}  # share that top-k with error feedback leaves for the lossless ways
_SAMPLES = 1990


@dataclass(frozen=True)
class CompressionTask:
    """make_model(seed), make_optimizer(parameters), loss(outputs, targets), and batch(number), the same for the same
    number.

    keep   share of the gradient that top-k with error feedback leaves for the lossless ways; None: they get all of it
    """

    name: str
    make_model: Callable[[int], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    keep: float | None = None
    make_sparse: Callable[[int], nn.Module] | None = None  # the model with sparse gradients, where it has embeddings


def make_job(name: str, seed: int, **options: Any) -> CompressionTask:
    """One of `JOBS`; `options` (users, items, factors, samples) make `ratings` smaller, for tests."""
    if name == "ratings":
        return _ratings(seed, **options)
    if name not in _BUNDLED:
        raise ConfigError("workload", name, ", ".join(JOBS), "check the spelling")
    bundled, samples = _BUNDLED[name]
    workload = make_workload(bundled)
    data = workload.make_data(seed, train=_SAMPLES, test=10).train

    def batch(number: int) -> tuple[Tensor, Tensor]:
        return data.__getitems__(np.random.default_rng([seed, number]).integers(0, len(data), samples).tolist())

    return CompressionTask(
        name, workload.make_model, workload.make_optimizer, workload.loss, batch, AFTER_TOPK.get(name)
    )


def _ratings(
    seed: int, *, users: int = USERS, items: int = ITEMS, factors: int = FACTORS, samples: int = 128
) -> CompressionTask:
    """The bundled workload's formula for a rating, drawn as it is needed instead of from a table of all pairs."""
    rng = np.random.default_rng(seed)
    chance_user, chance_item = _cumulative(rng, users), _cumulative(rng, items)
    p, q = rng.normal(size=(users, RANK)), rng.normal(size=(items, RANK)) / np.sqrt(RANK)
    bias_user, bias_item = 0.5 * rng.normal(size=users), 0.5 * rng.normal(size=items)

    def make_model(model_seed: int, *, sparse: bool = False) -> nn.Module:
        with initial_weights(model_seed):
            return Factorisation(users=users, items=items, factors=factors, sparse=sparse)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        drawn = np.random.default_rng([seed, number])
        user = np.searchsorted(chance_user, drawn.random(samples))
        item = np.searchsorted(chance_item, drawn.random(samples))
        taste = (p[user] * q[item]).sum(1) + NOISE * drawn.normal(size=samples)
        rating = MEAN + bias_user[user] + bias_item[item] + taste
        return torch.from_numpy(np.stack([user, item], 1)), torch.from_numpy(rating.astype(np.float32))

    sparse = functools.partial(make_model, sparse=True)
    return CompressionTask("ratings", make_model, adagrad, F.mse_loss, batch, make_sparse=sparse)


def _cumulative(rng: np.random.Generator, n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Zipf popularity in a random order, summed up, to search in."""
    weights = (1.0 + rng.permutation(n)) ** -POPULARITY
    summed = np.cumsum(weights)
    return np.asarray(summed / summed[-1])
