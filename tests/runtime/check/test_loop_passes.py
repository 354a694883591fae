"""Loops whose gradients cross ranks too often, too rarely or too late end on every rank with one message."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from tests.runtime.check.loops import Job, Loops

LOOPS = Loops()
wrong = LOOPS.wrong
pytestmark = pytest.mark.multiproc


@wrong("Controller(accumulate=A)")
def _accumulated_under_no_sync_undeclared(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        with contextlib.nullcontext() if i % 2 else job.ddp.no_sync():
            job.loss(x, y).backward()
        if i % 2:
            job.update()
        job.step()


@wrong("Run the last batch of a step without no_sync()")
def _never_synchronised(job: Job) -> None:
    for x, y in job.batches():
        with job.ddp.no_sync():
            job.loss(x, y).backward()
        job.update()
        job.step()


@wrong("without the DDP module")
def _past_the_ddp_module_on_one_rank(job: Job) -> None:
    for x, y in job.batches():
        if job.rank == 1 and job.steps == 2:
            F.cross_entropy(job.ddp.module(x), y).backward()
            job.update()
            job.step()
        else:
            job.train(x, y)


@wrong("Run the last batch of a step without no_sync()", accumulate=2)
def _synchronised_first_and_local_last(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        with job.ddp.no_sync() if i % 2 else contextlib.nullcontext():
            job.loss(x, y).backward()
        if i % 2:
            job.update()
        job.step()


@wrong("batches not trained is 0 on ranks 0, 2, 1 on rank 1", accumulate=2)
def _passed_over_on_one_rank_and_not_the_last_of_a_step(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        if i == 2 and job.rank == 1:
            job.step()
            continue
        with contextlib.nullcontext() if i % 2 else job.ddp.no_sync():
            job.loss(x, y).backward()
        if i % 2:
            job.update()
        job.step()


@wrong("or a second time")
def _two_losses_of_one_forward(job: Job) -> None:
    for x, y in job.batches():
        logits = job.ddp(x)
        F.cross_entropy(logits, y).backward(retain_graph=True)
        logits.square().mean().backward()
        job.update()
        job.step()


@wrong("loss.backward() through the DDP module")
def _gradients_set_by_hand(job: Job) -> None:
    job.wrap()
    parameters = list(job.net.parameters())
    for x, y in job.loader:
        for parameter, gradient in zip(parameters, torch.autograd.grad(job.loss(x, y), parameters), strict=True):
            parameter.grad = gradient
        job.update()
        job.step()


# ------------------------------------------------------------ a second update of a batch


@wrong("Run the last batch of a step without no_sync()")
def _a_second_update_that_stays_local(job: Job) -> None:
    for x, y in job.batches():
        job.loss(x, y).backward()
        job.update()
        with job.ddp.no_sync():
            job.loss(x, y).backward()
        job.update()
        job.step()


@wrong("without the DDP module")
def _a_second_update_past_the_ddp_module_on_one_rank(job: Job) -> None:
    for x, y in job.batches():
        job.loss(x, y).backward()
        job.update()
        F.cross_entropy(job.ddp.module(x) if job.rank == 1 and job.steps == 2 else job.ddp(x), y).backward()
        job.update()
        job.step()


@wrong("loss.backward() through the DDP module")
def _a_second_update_by_hand(job: Job) -> None:
    job.wrap()
    parameters = list(job.net.parameters())
    for x, y in job.loader:
        job.loss(x, y).backward()
        job.optimizer.step()
        for parameter, gradient in zip(parameters, torch.autograd.grad(job.loss(x, y), parameters), strict=True):
            parameter.grad.copy_(gradient)  # type: ignore[union-attr]
        job.update()
        job.step()


@wrong("on all ranks or on none")
def _updates_broken_off_on_one_rank(job: Job) -> None:
    for x, y in job.batches(2):
        for update in range(3):
            if job.rank == 1 and job.steps == 2 and update:  # as where a loss of one rank's own says so
                break
            job.loss(x, y).backward()
            job.update()
        job.step()


@wrong("accumulate=2", accumulate=2)
def _optimizer_at_every_batch_of_an_accumulation(job: Job) -> None:
    for x, y in job.batches():
        job.train(x, y)


@wrong("call controller.step() once for every batch", accumulate=2)
def _step_once_for_an_accumulation(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches()):
        with contextlib.nullcontext() if i % 2 else job.ddp.no_sync():
            job.loss(x, y).backward()
        if i % 2:
            job.update()
            job.step()


@wrong("Use controller.weight(loss, count=...)", buffers=True)
def _other_count_on_one_rank_with_buffers(job: Job) -> None:
    for x, y in job.batches():
        job.loss(x, y).backward()
        job.update()
        job.step(count=len(x) - (job.rank == 1 and job.steps == 2))


def test_they_end_on_every_rank_with_the_line_to_write() -> None:
    LOOPS.check_wrong(3)
