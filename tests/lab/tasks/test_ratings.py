from __future__ import annotations

import numpy as np
import torch

from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.ratings import CEILING, explained, make_data


def test_pairs_are_rated_once_and_few_items_get_most_ratings() -> None:
    data = make_data(0, train=20_000, test=2_000)
    pairs = torch.cat([data.train.inputs, data.test.inputs])
    assert len(torch.unique(pairs, dim=0)) == 22_000
    of_item = np.sort(np.bincount(pairs[:, 1].numpy()))[::-1]
    assert of_item[:80].sum() > 0.25 * of_item.sum(), "a tenth of the items has more than a quarter of the ratings"


def test_sparse_and_dense_gradients_are_the_same_step() -> None:
    data = make_data(0, train=2_000, test=100)
    models = []
    for name in ("ratings", "ratings-dense"):
        workload = make_workload(name)
        model = workload.make_model(0)
        optimizer = workload.make_optimizer(model.parameters())
        for step in range(3):
            inputs, targets = data.train.__getitems__(range(64 * step, 64 * step + 64))
            workload.loss(model(inputs), targets).backward()
            assert model.users.weight.grad.is_sparse == (name == "ratings")
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    for sparse, dense in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(sparse, dense)


def test_the_score_is_the_explained_share_of_the_variance() -> None:
    ratings = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert explained(torch.full((4,), 3.0), ratings) == 0
    assert explained(torch.full((4,), -50.0), ratings) == 0
    assert 0.9 < explained(ratings + 0.1, ratings) < 1
    assert 0.8 < CEILING < 0.9
