"""The jobs of `dynamix bench compression`: their gradients have zeros in different patterns.

ratings      embeddings of 30,000 users and 10,000 items, 64 wide, dense gradients: 2.6 million parameters, 10.4 MB. A
             worker's 128 ratings touch at most 256 of its 40,000 rows, so over 99 % of them have no gradient on a
             worker, and about 97 % (4 workers) or 95 % (8) on any. The bundled `ratings` has 2,300 rows of 8 and would
             fit into a few packets; model, popularity and optimizer are the same
ncf          collaborative filtering: 1,000,000 users and 50,000 items by Zipf's law, 8 wide, a perceptron: 33.6 MB
ncf-20m      the same with the users and items of MovieLens-20M, and batches of 8,192 pairs: 5.3 MB, of which four to
             eight workers touch 12 to 19 % (Zipf's law); arXiv 2402.07529 has 16 %
lstm-tied, transformer-tied   words of the standard library, 16,384 rows of 64 that are input and output, sampled
             softmax: 4.2 MB, and a dense body in addition to the table
moe          128 experts, of which a batch needs few: 4.2 MB; experts without a sample have no gradient
lora         adapters of rank 8 on a frozen transformer: 0.1 MB without zeros. The base is not exchanged at all
vgg-topk     the layers of VGG19, convolutions an eighth as wide, on synthetic pictures: 6.9 MB. Top-k with error
             feedback leaves 1 % of it on each worker, and all ways exchange this part
bert-topk    twelve blocks of a transformer, words and width an eighth of BERT-base's, on next words of the standard
             library: 8.3 MB, the same top-k. BERT predicts masked words bidirectionally; its gradient has that shape
rows-0, rows-50, rows-100   a table of 10,000 rows of 64, of which each worker touches 300. This percentage of them is
             the same rows on all workers, the others are on no other worker
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamix.errors import ConfigError
from dynamix_lab.suites.compression.sparse_jobs import make_sparse_job, popularity
from dynamix_lab.suites.compression.task import CompressionTask
from dynamix_lab.tasks.base import initial_weights
from dynamix_lab.tasks.ratings import MEAN, NOISE, RANK, Factorisation
from dynamix_lab.tasks.ratings import make_optimizer as adagrad

SWEPT = ("rows-0", "rows-50", "rows-100")
SPARSE_JOBS = ("ncf", "ncf-20m", "lstm-tied", "transformer-tied", "moe", "lora", "vgg-topk", "bert-topk", *SWEPT)
JOBS = ("ratings", *SPARSE_JOBS)
SPARSEST = "ratings"
EMBEDDINGS = ("ratings", "ncf", "ncf-20m", "lstm-tied", "transformer-tied", *SWEPT)  # may be sparse
LARGE = ("ncf",)  # not on links below 1 Gbit/s, where a dense step takes seconds
USERS, ITEMS, FACTORS = 30_000, 10_000, 64
POPULARITY = 0.7  # Zipf exponent, as in the bundled workload


def make_job(name: str, seed: int, *, workers: int = 1, **options: Any) -> CompressionTask:
    """One of `JOBS` for so many workers. `options` (users, items, factors, samples of `ratings`) make it smaller, for
    tests.
    """
    if name == "ratings":
        return _ratings(seed, **options)
    if name in SPARSE_JOBS:
        return make_sparse_job(name, seed, workers, **options)
    raise ConfigError("workload", name, ", ".join(JOBS), "check the spelling")


def _ratings(
    seed: int, *, users: int = USERS, items: int = ITEMS, factors: int = FACTORS, samples: int = 128
) -> CompressionTask:
    """The bundled workload's formula for a rating, drawn when needed instead of from a table of all pairs."""
    rng = np.random.default_rng(seed)
    chance_user, chance_item = (popularity(rng, n, POPULARITY) for n in (users, items))
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
