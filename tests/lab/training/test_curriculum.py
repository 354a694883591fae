"""Training clusters: possible ones, unlike each other, and none of the families that are tests."""

from __future__ import annotations

import numpy as np
import pytest

from dynamix_lab.simulator import ClusterEnv, bounds_of
from dynamix_lab.training.curriculum import training_clusters


@pytest.mark.parametrize("workers", [1, 2, 8, 128])
def test_every_cluster_runs_and_can_be_allocated(workers: int) -> None:
    for seed in range(4):
        clusters = training_clusters(6, workers, seed)
        bounds = bounds_of(clusters)
        assert (bounds.low <= bounds.high).all()
        window = ClusterEnv(clusters, seed=seed).reset()
        assert (window.batch_size <= bounds.high).all()
        assert np.isfinite(window.step).all()
        assert clusters.curve is None or (clusters.curve < 0).all()  # measured curves belong to a test family


def test_one_seed_gives_one_world_and_another_seed_another() -> None:
    one, again, other = (training_clusters(4, 4, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.alpha, again.alpha)
    assert (one.alpha != other.alpha).any()


def test_harder_worlds_are_disturbed_more_often() -> None:
    easy, hard = (
        sum((training_clusters(64, 4, seed, hardness=h).cliff_slope > 0).any(-1).sum() for seed in range(4))
        for h in (0.2, 1.0)
    )
    assert hard > 2 * easy
