"""Loops that do what the plan says, in whichever way, stay silent."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from tests.runtime.check.loops import Job, Loops, data

LOOPS = Loops()
right, right_with = LOOPS.right, LOOPS.right_with
pytestmark = pytest.mark.multiproc


@right
@right_with(num_workers=2)
def _plain(job: Job) -> None:
    for x, y in job.batches(2):
        job.train(x, y)


@right
@right_with(num_workers=2)
@right_with(decides_s=0.03)
def _prefetched_in_a_thread_over_epochs(job: Job) -> None:
    """A thread reads three epochs one after the other, ahead of the loop, which trains on every sample thrice."""
    job.wrap()
    ready: queue.Queue[Any] = queue.Queue(3)

    def read() -> None:
        for _ in range(3):
            for batch in job.loader:
                ready.put(batch)
        ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    seen: list[float] = []
    while (batch := ready.get()) is not None:
        time.sleep(0.002 * (job.steps % 3))
        seen += batch[0][:, 0].tolist()
        job.train(*batch)
    every: list[Any] = [None] * job.controller.world_size
    dist.all_gather_object(every, seen, group=job.group)
    assert sorted(itertools.chain(*every)) == sorted(3 * data().tensors[0][:, 0].tolist())


def _ahead(batches: Iterator[Any]) -> Iterator[Any]:
    now = next(batches)
    for following in batches:
        yield now
        now = following
    yield now


@right
def _read_in_growing_chunks(job: Job) -> None:
    job.wrap()
    for _ in range(2):
        batches, size = iter(job.loader), 1
        while chunk := list(itertools.islice(batches, size)):
            for x, y in chunk:
                job.train(x, y)
            size += 1


@right
def _took_the_next_batch_between_two_passes(job: Job) -> None:
    job.wrap()
    batches = iter(job.loader)
    following = next(batches, None)
    while (now := following) is not None:
        job.loss(*now)
        following = next(batches, None)
        job.train(*now)


@right
def _skipped_backward(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        with torch.no_grad():
            bad = i % 3 == 1
        if not bad:
            job.loss(x, y).backward()
            job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=False)
        job.step()


@right
def _evaluation_in_between(job: Job) -> None:
    job.wrap()
    held_out = DataLoader(data(), batch_size=16)
    for i, (x, y) in enumerate(job.loader):
        job.train(x, y)
        if i % 4 == 0:
            job.ddp.eval()
            with torch.no_grad():
                for vx, vy in held_out:
                    job.loss(vx, vy)
            if job.rank == 0:
                for vx, vy in held_out:
                    F.cross_entropy(job.ddp.module(vx), vy)  # no_grad() forgotten
            job.ddp.train()


@right
def _gradients_on_the_side(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        job.loss(x, y).backward()
        if i % 2:
            torch.autograd.grad(F.cross_entropy(job.net(x), y), list(job.net.parameters()))
        job.update()
        torch.autograd.grad(F.cross_entropy(job.net(x), y), list(job.net.parameters()))
        job.step()


@right
def _peek_on_rank_zero(job: Job) -> None:
    if job.rank == 0:
        x, _ = next(iter(job.loader))
        job.net(x)
    job.ddp = DDP(job.net, process_group=job.group)
    _plain(job)


@right
def _broken_off_one_batch_ahead_of_the_end(job: Job) -> None:
    job.wrap()
    for _ in range(4):
        for x, y in _ahead(iter(job.loader)):
            job.train(x, y)
            if job.sampler.exhausted and job.sampler.issued - job.sampler.consumed == 1:
                break


@right_with(num_workers=2)
def _read_at_once(job: Job) -> None:
    job.wrap()
    for _ in range(2):
        for x, y in list(job.loader):
            job.train(x, y)


@right
def _persistent_workers(job: Job) -> None:
    job.loader = DataLoader(data(), batch_sampler=job.sampler, num_workers=2, persistent_workers=True)
    job.wrap()
    for epoch in range(3):
        for i, (x, y) in enumerate(job.loader):
            job.train(x, y)
            if epoch == 1 and i == 2:
                break


@right_with(num_workers=2)
def _evaluation_with_gradients_after_a_break(job: Job) -> None:
    job.wrap()
    for _ in range(3):
        for i, (x, y) in enumerate(job.loader):
            job.train(x, y)
            if i == 2:
                break
        for vx, vy in DataLoader(data(), batch_size=16):
            job.loss(vx, vy)  # no_grad() forgotten


@right_with(accumulate=2)
def _last_of_an_accumulation_passed_over(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        if i % 4 != 3:
            job.loss(x, y).backward()
        if i % 2:
            job.update()
        job.step()


@right
def _an_optimizer_made_of_others(job: Job) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer

    job.optimizer = ZeroRedundancyOptimizer(
        job.net.parameters(), optimizer_class=torch.optim.SGD, process_group=job.group, lr=0.1
    )
    _plain(job)


@right
def _trained_on_after_close(job: Job) -> None:
    _plain(job)
    job.controller.close()
    assert [*job.loader]  # may be looked at
    job.controller.load_state_dict(job.controller.state_dict())
    model = DDP(job.net, process_group=job.group)
    for x, y in DataLoader(data(), batch_size=16):
        F.cross_entropy(model(x), y).backward()
        job.update()


def test_they_stay_silent() -> None:
    LOOPS.check_right()
