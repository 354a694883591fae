"""Loops that lose count of their batches end on every rank with one message."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from tests.runtime.check.loops import Job, Loops, data

LOOPS = Loops()
wrong = LOOPS.wrong
pytestmark = pytest.mark.multiproc


@wrong("call controller.step() once for every batch")
def _never_stepped(job: Job) -> None:
    for x, y in job.batches():
        job.loss(x, y).backward()
        job.update()


@wrong("call controller.step() once for every batch")
def _continue_past_step_on_one_rank(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        job.loss(x, y).backward()
        job.update()
        if i == 3 and job.rank == 1:
            continue
        job.step()


@wrong("call controller.step() once for every batch", num_workers=2)
def _stepped_twice_with_workers_on_one_rank(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        job.train(x, y)
        if i == 2 and job.rank == 0:
            job.controller.step()


@wrong("call controller.step() once for every batch", num_workers=2)
def _stepped_before_backward(job: Job) -> None:
    for x, y in job.batches():
        loss = job.loss(x, y)
        job.controller.step()
        loss.backward()
        job.update()


@wrong("call controller.step() once for every batch")
def _last_batch_never_stepped(job: Job) -> None:
    job.wrap()
    for _ in range(2):
        batches = len(job.loader)
        for i, (x, y) in enumerate(job.loader):
            job.loss(x, y).backward()
            job.update()
            if i < batches - 1 and not job.sampler.plan().last:
                job.step()


@wrong("call controller.step() also for a batch that you skip", num_workers=1)
def _dropped_on_one_rank(job: Job) -> None:
    job.wrap()
    batches = iter(job.loader)
    for i, (x, y) in enumerate(batches):
        job.train(*(next(batches) if i == 2 and job.rank == 1 else (x, y)))


@wrong("leave a loop early only after the same optimizer step on all ranks")
def _left_an_epoch_earlier_on_one_rank(job: Job) -> None:
    job.wrap()
    for epoch in range(3):
        job.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(job.loader):
            job.train(x, y)
            if i == 3 and epoch == 0 and job.rank == 1:
                break


@wrong("on all ranks or on none")
def _went_on_after_an_error_on_one_rank(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        try:
            if i == 2 and job.rank == 0:
                raise ValueError("a sample that cannot be read")
            job.loss(x, y).backward()
            job.update()
        except ValueError:
            job.optimizer.zero_grad()
        job.step()


@wrong("in_order=False")
def _out_of_order(job: Job) -> None:
    job.wrap()
    for x, y in DataLoader(data(), batch_sampler=job.sampler, num_workers=2, in_order=False):
        job.train(x, y)


@wrong("DataLoader(dataset, batch_sampler=sampler")
def _sampler_beside_batch_size(job: Job) -> None:
    job.wrap()
    for x, y in DataLoader(data(), sampler=job.sampler, batch_size=4):
        job.train(x, y)


def test_they_end_on_every_rank_with_the_line_to_write() -> None:
    LOOPS.check_wrong(3)
