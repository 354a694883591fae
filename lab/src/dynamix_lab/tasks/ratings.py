"""ratings: a synthetic recommender. Users rate items; ratings have a low rank, and few items get most of them.

A rating is mean + user + item + <p_u, q_i> + noise with rank 4 and unit-variance parts. Its pair is drawn without
repetition by the Zipf popularity of users and items. So gradients are as in real recommenders: most rows of an
embedding have none in a step. The score is the explained fraction of the test ratings' variance (R2, at least 0); noise
keeps it below `CEILING`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from dynamix_lab.tasks.base import Arrays, Data, Workload, check_sizes, initial_weights

USERS = 1_500
ITEMS = 800
RANK = 4
NOISE = 0.5
MEAN = 3.5
TRAIN_SAMPLES = 120_000
TEST_SAMPLES = 10_000
FACTORS = 8
LEARNING_RATE = 0.3
# Variance of a rating: user 0.25, item 0.25, taste 1, noise 0.25. Popularity changes it a little from seed to seed.
CEILING = 1 - NOISE**2 / (0.25 + 0.25 + 1 + NOISE**2)


def workload(*, sparse: bool = True) -> Workload:
    """Matrix factorisation with `nn.Embedding`s whose gradients are sparse tensors, or dense ones (`sparse=False`)."""

    def make_model(seed: int) -> nn.Module:
        with initial_weights(seed):
            return Factorisation(sparse=sparse)

    return Workload(
        name="ratings" if sparse else "ratings-dense",
        make_data=make_data,
        make_model=make_model,
        make_optimizer=make_optimizer,
        loss=F.mse_loss,
        metric=explained,
        min_batch=8,
        max_batch=2048,
        base_batch=512,
        metric_name="explained variance",
        description=f"{USERS:,} users rate {ITEMS:,} items, embeddings with {'sparse' if sparse else 'dense'} "
        "gradients",
    )


class Factorisation(nn.Module):
    """mean + bias of the user + bias of the item + <factors of the user, factors of the item>; inputs (n, 2) int64."""

    def __init__(self, *, users: int = USERS, items: int = ITEMS, factors: int = FACTORS, sparse: bool = True) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1))
        self.users, self.items = (nn.Embedding(n, factors, sparse=sparse) for n in (users, items))
        self.user_bias, self.item_bias = (nn.Embedding(n, 1, sparse=sparse) for n in (users, items))
        for embedding, deviation in (
            (self.users, 0.1),
            (self.items, 0.1),
            (self.user_bias, 0.0),
            (self.item_bias, 0.0),
        ):
            nn.init.normal_(embedding.weight, std=deviation)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        taste = (self.users(user) * self.items(item)).sum(1)
        rating: Tensor = self.mean + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1) + taste
        return rating


class SparseAdagrad(Adagrad):
    """Adagrad, with which rare rows keep large steps. It tells torch that the sparse tensors it makes of valid ones
    need no check, which would warn."""

    def step(self, closure: Any = None) -> Any:
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return super().step(closure)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Adagrad, lr 0.3: the learning rate is for a global batch of 512."""
    return SparseAdagrad(parameters, lr=LEARNING_RATE)


def explained(predicted: Tensor, ratings: Tensor) -> float:
    """1 - mean squared error / variance of the ratings, at least 0.

    >>> explained(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]))
    1.0
    """
    error = F.mse_loss(predicted, ratings).item()
    return max(0.0, 1 - error / max(float(ratings.var(correction=0)), 1e-12))


@functools.lru_cache(maxsize=2)
def make_data(seed: int, *, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Data:
    """`train` and `test` ratings of different pairs (user, item): inputs (n, 2) int64, targets (n,) float32."""
    check_sizes(train, test, most=USERS * ITEMS // 2)
    rng = np.random.default_rng(seed)
    # Gumbel's trick: the largest keys are draws without repetition, in proportion to the product of popularities.
    keys = _log_popularity(rng, USERS)[:, None] + _log_popularity(rng, ITEMS) + rng.gumbel(size=(USERS, ITEMS))
    drawn = rng.permutation(np.argpartition(-keys.ravel(), train + test)[: train + test])
    user, item = np.unravel_index(drawn, (USERS, ITEMS))
    p, q = rng.normal(size=(USERS, RANK)), rng.normal(size=(ITEMS, RANK)) / np.sqrt(RANK)
    bias_user, bias_item = 0.5 * rng.normal(size=USERS), 0.5 * rng.normal(size=ITEMS)
    rating = MEAN + bias_user[user] + bias_item[item] + (p[user] * q[item]).sum(1) + NOISE * rng.normal(size=len(drawn))
    inputs = torch.from_numpy(np.stack([user, item], 1).astype(np.int64))
    targets = torch.from_numpy(rating.astype(np.float32))
    return Data(Arrays(inputs[:train], targets[:train]), Arrays(inputs[train:], targets[train:]))


def _log_popularity(rng: np.random.Generator, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Zipf with exponent 0.7, in a random order: logarithms, shape (n,)."""
    return -0.7 * np.log(1 + rng.permutation(n))
