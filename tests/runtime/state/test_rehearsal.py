"""A rehearsal, such as a search for a learning rate, takes batches, and then training begins as if it had not been."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes
from tests.union import Script

pytestmark = pytest.mark.multiproc
SAMPLES, EPOCHS = 90, 2


def _trained(
    group: Any, rehearsed: int, *, workers: int = 0, persistent: bool = False, scheduled: bool = False
) -> tuple[Tensor, list[list[float]], float]:
    """Parameters, what this rank saw in each epoch, and the last learning rate."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))
    controller = adaptive(Script([[12, 4], [4, 12], [6, 10]]), process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    job = Training(controller, classes(SAMPLES), net, optimizer=optimizer, sampling={"seed": 3})
    own = torch.Generator()  # of seeds for workers: drawn from torch's own, they would shift what dropout draws
    known: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent, "generator": own}
    loader = DataLoader(classes(SAMPLES), batch_sampler=job.sampler, **known)
    if scheduled:
        controller.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5))
    if rehearsed:
        before = copy.deepcopy((net.state_dict(), optimizer.state_dict())), controller.state_dict()
        for number, (x, y) in enumerate(loader, 1):
            optimizer.param_groups[0]["lr"] = 1e-3 * 1.5**number
            job.train(x, y)
            if number == rehearsed:
                break
        net.load_state_dict(before[0][0])
        optimizer.load_state_dict(before[0][1])
        controller.load_state_dict(before[1])
    seen: list[list[float]] = []
    for epoch in range(EPOCHS):
        job.sampler.set_epoch(epoch)
        seen.append([])
        for x, y in loader:
            seen[-1] += x[:, 0].tolist()
            job.train(x, y)
    assert controller.samples_seen == EPOCHS * SAMPLES
    controller.close()
    return job.weights(), seen, optimizer.param_groups[0]["lr"]


def _compared(rank: int, cases: list[tuple[int, dict[str, Any]]]) -> list[tuple[float, bool, bool]]:
    """Of each: how far parameters are from those of a job without a rehearsal, and whether all else is the same."""
    told = []
    for rehearsed, options in cases:
        (mine, seen, rate), (theirs, expected, other) = (
            _trained(dist.new_group(), number, **options) for number in (rehearsed, 0)
        )
        told.append((float((mine - theirs).abs().max()), seen == expected, rate == other))
    return told


def test_an_epoch_begins_anew_with_the_state_from_before() -> None:
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (4, {"workers": 2}),
        (3, {"workers": 2, "persistent": True}),
        (3, {"scheduled": True}),
    ]
    for told in run_ranks(_compared, 2, cases, timeout_s=120):
        for case, (worst, same_samples, same_rate) in zip(cases, told, strict=True):
            assert same_samples, case
            assert same_rate, case
            assert worst < 1e-6, case
