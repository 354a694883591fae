"""A policy is shown windows and bounds, and cannot change them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.window import Bounds, Ints, Window
from dynamix_lab.simulator import ClusterEnv, sample_clusters
from tests.union import Script

ARRAYS = [f.name for f in dataclasses.fields(Window)]


class Writes(Script):
    """Answers what is in force, after writing where it was told to."""

    def __init__(self, write: Callable[[Window, Bounds], None]) -> None:
        super().__init__([])
        self.write = write

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        self.write(window, bounds)
        return window.batch_size


def _raise_high(window: Window, bounds: Bounds) -> None:
    bounds.high[...] = 10**6


def _lower_low(window: Window, bounds: Bounds) -> None:
    np.subtract(bounds.low, 1, out=bounds.low)


def _change_size(window: Window, bounds: Bounds) -> None:
    window.batch_size[0] = 10**6


@pytest.mark.parametrize("write", [_raise_high, _lower_low, _change_size])
def test_a_policy_that_writes_fails_and_the_jobs_bounds_are_unharmed(write: Any) -> None:
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = dynamix.Controller(Writes(write), batch_size=8, interval=1, global_batch="adaptive")
    sampler = controller.batch_sampler(data)
    controller.wrap(net, optimizer)
    before = controller.bounds
    allowed = before.low.tolist(), before.high.tolist()

    def train() -> None:
        for x, y in DataLoader(data, batch_sampler=sampler):
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            controller.step()

    with pytest.raises(ValueError, match="read-only"):
        train()
    assert (controller.bounds.low.tolist(), controller.bounds.high.tolist()) == allowed
    assert controller.batch_sizes.tolist() == [8]


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
