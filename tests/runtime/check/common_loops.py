"""Loops that training scripts have: each is served in every way of meeting, or ends on all ranks with what to write."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.runtime.sync.one_loop import Job


def total(value: float | Tensor, group: Any = None) -> float:
    """The sum over ranks."""
    summed = torch.as_tensor(float(value))
    dist.all_reduce(summed, group=group)
    return float(summed)


def _each(job: Job, after: Callable[[int, Tensor], Any]) -> None:
    """Train, and after each batch call `after` with the number of batches so far and its loss; true: leave the loop."""
    job.wrap()
    for number, (x, y) in enumerate(job.batches(), 1):
        loss = job.backward(x, y)
        job.update()
        job.step(loss)
        if after(number, loss):
            return


# ------------------------------------------------------------ served


def logs_where_all_meet(job: Job) -> None:
    _each(job, lambda number, loss: job.controller.met and job.keep(total(loss.detach())))


def evaluates_alone(job: Job) -> None:
    _each(job, lambda number, loss: number % 5 == 0 and job.keep(job.evaluate()))


def evaluates_where_due(job: Job) -> None:
    def look(number: int, loss: Tensor) -> None:
        if job.controller.checkpoint_due(every=5):
            job.keep(total(job.evaluate()))

    _each(job, look)


def stops_early_where_all_meet(job: Job) -> None:
    best, since = [float("inf")], [0]

    def look(number: int, loss: Tensor) -> bool:
        if job.controller.met:
            value = total(job.evaluate())
            since[0] = 0 if value < 0.999 * best[0] else since[0] + 1
            best[0] = min(best[0], value)
        return job.controller.met and (since[0] >= 2 or len(job.seen.apart) >= 20)

    _each(job, look)


def saves_where_due(job: Job) -> None:
    def save(number: int, loss: Tensor) -> None:
        if job.controller.checkpoint_due(every=5):
            _save(job)

    _each(job, save)


def saves_in_the_background(job: Job) -> None:
    """Its own thread talks to the other ranks while the loop trains on."""
    from torch.distributed.checkpoint import async_save

    group, under_way = dist.new_group(), list[Any]()

    def save(number: int, loss: Tensor) -> None:
        if job.controller.checkpoint_due(every=5):
            for before in under_way:
                before.result()
            saved = async_save(job.net.state_dict(), checkpoint_id=Path(folder, str(number)), process_group=group)
            under_way[:] = [saved]

    with tempfile.TemporaryDirectory() as folder:
        _each(job, save)
        under_way[0].result()


def leaves_where_due(job: Job) -> None:
    _each(job, lambda number, loss: job.controller.checkpoint_due(every=12))


SERVED = {
    loop.__name__: loop
    for loop in (
        logs_where_all_meet,
        evaluates_alone,
        evaluates_where_due,
        stops_early_where_all_meet,
        saves_where_due,
        saves_in_the_background,
        leaves_where_due,
    )
}


def _save(job: Job) -> None:
    parts = (job.net.state_dict(), job.optimizer.state_dict(), job.controller.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        torch.save(copy.deepcopy(parts), Path(folder, "state.pt"))


# ------------------------------------------------------------ served over gradients, where all ranks take like steps


def logs_every_batch(job: Job) -> None:
    _each(job, lambda number, loss: job.keep(total(loss.detach())))


def logs_before_its_step(job: Job) -> None:
    job.wrap()
    for x, y in job.batches():
        loss = job.backward(x, y)
        job.update()
        job.keep(total(loss.detach()))
        job.step(loss)


def logs_in_a_group_of_its_own(job: Job) -> None:
    group = dist.new_group()
    _each(job, lambda number, loss: job.keep(total(loss.detach(), group)))


def waits_every_few_batches(job: Job) -> None:
    _each(job, lambda number, loss: dist.barrier() if number % 7 == 0 else None)


def logs_on_unlike_batches(job: Job) -> None:
    """All ranks come to wait in collectives that are not of one batch."""
    every = 2 + dist.get_rank()
    _each(job, lambda number, loss: number % every == 0 and job.keep(total(loss.detach())))


def saves_every_few_batches(job: Job) -> None:
    _each(job, lambda number, loss: _save(job) if number % 5 == 0 else None)


def leaves_after_so_many_batches(job: Job) -> None:
    _each(job, lambda number, loss: number == 31)


def stops_early_by_its_own_count(job: Job) -> None:
    _each(job, lambda number, loss: number >= 25 and number % 5 == 0 and total(loss.detach()) > 0)


# ------------------------------------------------------------ gradient accumulation


def accumulates_by_hand(job: Job) -> None:
    job.wrap()
    for number, (x, y) in enumerate(job.batches(), 1):
        loss = job.loss(x, y)
        (loss / 2).backward()
        if number % 2 == 0:
            job.update()
        job.step(loss)
