"""Who has ended, and who is silent: named on every rank, in seconds; and nothing is left of a controller."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiproc


def _used() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _many_controllers(rank: int, controllers: int) -> list[tuple[int, int, int]]:
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    used = []
    for i in range(controllers):
        policy = ("dynamix", "stigmergic")[i % 2]
        controller = dynamix.Controller(policy, batch_size=2, interval=1)
        sampler = controller.batch_sampler(data)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = controller.wrap(DDP(net), optimizer, weighting="loss" if i % 5 == 0 else "hook")
        for x, y in DataLoader(data, batch_sampler=sampler):
            loss = F.cross_entropy(model(x), y)
            (controller.weight(loss, count=float(len(x))) if i % 5 == 0 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
        controller.close()
        controller.close()
        del controller, sampler, net, optimizer, model, loss
        used.append((*_used(), _native_threads()))
    return used


def test_a_hundred_controllers_leave_no_thread_and_no_descriptor() -> None:
    """Python threads, descriptors, threads of the process."""
    for used in run_ranks(_many_controllers, 2, 100, timeout_s=250):
        assert all(last <= early for last, early in zip(used[-1], used[9], strict=True)), used
