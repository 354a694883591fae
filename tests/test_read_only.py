"""A policy is shown windows and bounds, and cannot change them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynamix.window import Bounds, Ints, Window
from dynamix_lab.simulator import ClusterEnv, sample_clusters
from tests.runtime.jobs import Training, adaptive, classes
from tests.union import Script

ARRAYS = [f.name for f in dataclasses.fields(Window)]


WRITES: dict[str, Callable[[Window, Bounds], Any]] = {
    "high": lambda window, bounds: bounds.high.fill(10**6),
    "low": lambda window, bounds: np.subtract(bounds.low, 1, out=bounds.low),
    "size": lambda window, bounds: window.batch_size.fill(10**6),
}


class Writes(Script):
    """Answers what is in force, after writing where it was told to."""

    def __init__(self, where: str) -> None:
        super().__init__([])
        self.where = where

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        WRITES[self.where](window, bounds)
        return window.batch_size


@pytest.mark.parametrize("where", WRITES)
def test_a_policy_that_writes_fails_and_the_jobs_bounds_are_unharmed(where: str) -> None:
    job = Training(adaptive(Writes(where), interval=1), classes(64))
    before = job.controller.bounds
    allowed = before.low.tolist(), before.high.tolist()

    def train() -> None:
        for x, y in job.loader:
            job.train(x, y)

    with pytest.raises(ValueError, match="read-only"):
        train()
    assert (job.controller.bounds.low.tolist(), job.controller.bounds.high.tolist()) == allowed
    assert job.controller.batch_sizes.tolist() == [8]


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_no_array_of_a_window_can_be_written_and_none_is_copied(shape: tuple[int, ...]) -> None:
    sizes, compute = np.full(shape, 8), np.ones(shape)
    for window in (Window.of(sizes, compute=compute), dataclasses.replace(Window.of(sizes), compute=compute)):
        assert not any(getattr(window, name).flags.writeable for name in ARRAYS)
        assert np.shares_memory(window.compute, compute)
    compute[...] = 2.0  # whoever measures goes on with arrays of its own
    sizes[...] = 16


def test_the_bounds_given_stay_the_users_own() -> None:
    high = np.array([32, 64])
    bounds = Bounds.of(2, 1, high)
    assert not any(a.flags.writeable for a in (bounds.low, bounds.high, bounds.total_low, bounds.total_high))
    high[0] = 8
    assert bounds.high.tolist() == [32, 64]
    assert not dataclasses.replace(bounds, high=np.array([8, 8])).high.flags.writeable


def test_what_the_simulator_shows_is_read_only_too() -> None:
    env = ClusterEnv(sample_clusters(2, 3, seed=0), seed=0)
    window = env.step(env.reset().batch_size)
    assert not any(getattr(window, name).flags.writeable for name in ARRAYS)
    with pytest.raises(ValueError, match="read-only"):
        env.bounds.low[...] = 0
