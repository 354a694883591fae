"""Models, optimizers and process groups that do not belong together end on every rank with one message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.runtime.check.loops import Job, Loops

LOOPS = Loops()
wrong = LOOPS.wrong
pytestmark = pytest.mark.multiproc


@wrong("once for each model")
def _a_list_of_optimizers(job: Job) -> None:
    parts = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (job.net[0], job.net[2])]
    job.controller.wrap(job.ddp, parts)  # type: ignore[arg-type]


@wrong("make the optimizer from model.parameters()")
def _the_optimizer_of_another_model(job: Job) -> None:
    job.controller.wrap(job.ddp, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@wrong("once for each model")
def _a_second_model_behind_the_optimizer(job: Job) -> None:
    second = DDP(nn.Linear(3, 3), process_group=job.group)
    job.controller.wrap(job.ddp, torch.optim.SGD([*job.net.parameters(), *second.parameters()], lr=0.1))


@wrong("once for each model")
def _a_second_model_with_its_own_optimizer(job: Job) -> None:
    job.wrap()
    second = DDP(nn.Linear(3, 3), process_group=job.group)
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    for x, y in job.loader:
        job.loss(x, y).backward()
        second(torch.ones(len(x), 3)).sum().backward()
        job.update()
        other.step()
        job.step()


@wrong("Controller(process_group=group)")
def _a_foreign_process_group(job: Job) -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    job.controller.wrap(DDP(job.net, process_group=groups[job.rank]), job.optimizer)


@pytest.mark.parametrize("workers", [2, 3])
def test_they_end_on_every_rank_with_the_line_to_write(workers: int) -> None:
    LOOPS.check_wrong(workers)
