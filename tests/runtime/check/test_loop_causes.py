"""An error of a wrong loop names what is really the cause, on every rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import dynamix
from dynamix.errors import UsageError
from tests.refused import refused
from tests.runtime.check.loops import Job, Loops, data
from tests.runtime.jobs import Training, classes

LOOPS = Loops()
wrong = LOOPS.wrong


class Branched(nn.Module):
    """A layer in front of two others that is used, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.uses: Callable[[], bool] = lambda: True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(self.front(x) if self.uses() else x))
        return self.head(hidden)  # type: ignore[no-any-return]


def _branched(job: Job, uses: Callable[[], bool] = lambda: True, **ddp: Any) -> Branched:
    job.net = net = Branched()
    net.uses = uses
    job.ddp = DDP(net, process_group=job.group, **ddp)
    job.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net


def _train(job: Job) -> None:
    for x, y in job.batches(3):
        job.train(x, y)


@wrong("the backward pass did not reach ['front.weight', 'front.bias'], and DDP waits")
def _a_layer_that_is_never_used(job: Job) -> None:
    _branched(job, lambda: False)
    _train(job)


@wrong("DDP(net, find_unused_parameters=True)")
def _a_layer_that_is_not_used_later_with_many_buckets(job: Job) -> None:
    _branched(job, lambda: job.steps < 3, bucket_cap_mb=1e-5)
    _train(job)


@wrong("['front.weight', 'front.bias']")
def _a_layer_that_one_rank_does_not_use(job: Job) -> None:
    _branched(job, lambda: job.rank == 0)
    _train(job)


@wrong("and no static_graph=True")
def _a_layer_that_is_not_used_later_in_a_static_graph(job: Job) -> None:
    _branched(job, lambda: job.steps < 3, static_graph=True)
    _train(job)


@wrong("or it left out parameters that DDP waits for")
def _a_layer_that_is_not_used_later_with_gradients_set_to_zero(job: Job) -> None:
    net = _branched(job, lambda: job.steps < 3)
    job.optimizer = torch.optim.SGD([*net.body.parameters(), *net.head.parameters()], lr=0.1)
    for x, y in job.batches():
        job.loss(x, y).backward()
        job.optimizer.step()
        net.zero_grad(set_to_none=False)
        job.step()


@wrong("a layer was replaced after DDP was made")
def _a_layer_that_is_replaced_before_the_optimizer_is_made(job: Job) -> None:
    net = _branched(job)
    net.front = nn.Linear(6, 6)
    job.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _train(job)


@wrong("(A may be all of an epoch)")
def _an_update_at_the_end_of_an_epoch(job: Job) -> None:
    job.wrap()
    for _ in range(3):
        for x, y in job.loader:
            job.loss(x, y).backward()
            job.step()
        job.update()


@wrong("itertools.cycle(loader), or a list of batches, repeats old batches", num_workers=2)
def _a_loader_in_a_cycle(job: Job) -> None:
    job.wrap()
    for x, y in itertools.islice(itertools.cycle(job.loader), 40):
        job.train(x, y)


@wrong("train each batch before you call controller.step() for it")
def _one_batch_again_and_again(job: Job) -> None:
    job.wrap()
    x, y = next(iter(job.loader))
    for _ in range(10):
        job.train(x, y)


@wrong("A closure (L-BFGS, a line search) must return the same loss on every rank")
def _a_line_search_on_each_ranks_own_loss(job: Job) -> None:
    job.optimizer = torch.optim.LBFGS(job.net.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    for x, y in job.batches(3):
        job.train_in_closure(x, y)


FOREIGN = "the loop's batches do not come from this controller"


@wrong(FOREIGN)
def _a_loader_of_the_users_own(job: Job) -> None:
    job.wrap()
    for x, y in DataLoader(data(), batch_size=4, shuffle=True):
        job.train(x, y)


@wrong("the model was given to an earlier controller: make a new DistributedDataParallel of its module")
def _the_model_of_an_earlier_controller(job: Job) -> None:
    job.wrap()
    job.controller.close()
    again = dynamix.Controller("static", 4, process_group=job.group)
    with contextlib.closing(again):
        again.wrap(job.ddp, job.optimizer)


# ------------------------------------------------------------ what does not belong together


@wrong("once for each model")
def _a_list_of_optimizers(job: Job) -> None:
    parts = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (job.net[0], job.net[2])]
    job.controller.wrap(job.ddp, parts)  # type: ignore[arg-type]


@wrong("got a DistributedDataParallel where an optimizer belongs")
def _the_arguments_in_the_other_order(job: Job) -> None:
    job.controller.wrap(job.optimizer, job.ddp)  # type: ignore[arg-type]


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


@pytest.mark.multiproc
def test_they_end_on_every_rank_with_their_cause() -> None:
    LOOPS.check_wrong(2)


def test_a_cycle_is_named_without_ranks_too() -> None:
    job = Training(dynamix.Controller("static", 8), classes(24))

    def train() -> None:
        for x, y in itertools.cycle(job.loader):
            job.train(x, y)

    refused(UsageError, r"itertools\.cycle\(loader\) and a list of batches repeat old batches", train)
    assert job.controller.samples_seen == 24
    job.controller.close()
