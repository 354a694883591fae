"""An error of a wrong loop names what is really the cause, on every rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.refused import refused
from tests.runtime.check.loops import Job, Loops, data
from tests.runtime.jobs import classes, classifier

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


@wrong("the backward pass has not reached ['front.weight', 'front.bias'], and DDP waits")
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


@wrong("a layer was replaced after DDP was made")
def _a_layer_that_is_replaced_after_the_optimizer_was_made(job: Job) -> None:
    _branched(job).head = nn.Linear(5, 3)
    _train(job)


@wrong("a layer was replaced after DDP was made")
def _a_head_that_is_replaced_while_training(job: Job) -> None:
    net = _branched(job)
    for x, y in job.batches():
        if job.steps == 3:
            net.head = nn.Linear(5, 3)
            job.optimizer.add_param_group({"params": list(net.head.parameters())})
        job.train(x, y)


@wrong("(A may be all of an epoch)")
def _an_update_at_the_end_of_an_epoch(job: Job) -> None:
    job.wrap()
    for _ in range(3):
        for x, y in job.loader:
            job.loss(x, y).backward()
            job.step()
        job.update()


@wrong("itertools.cycle(loader), or a list of batches, gives what was trained already", num_workers=0)
@wrong("itertools.cycle(loader), or a list of batches, gives what was trained already", num_workers=2)
def _a_loader_in_a_cycle(job: Job) -> None:
    job.wrap()
    for x, y in itertools.islice(itertools.cycle(job.loader), 40):
        job.train(x, y)


@wrong("itertools.cycle(loader), or a list of batches, gives what was trained already")
def _a_list_of_batches(job: Job) -> None:
    job.wrap()
    kept = list(job.loader)
    for _ in range(2):
        for x, y in kept:
            job.train(x, y)


@wrong("train each batch before its controller.step(), in as many updates as you like")
def _one_batch_again_and_again(job: Job) -> None:
    job.wrap()
    x, y = next(iter(job.loader))
    for _ in range(10):
        job.train(x, y)


@wrong("A closure (L-BFGS, a line search) returns the same loss on every rank")
def _a_line_search_on_each_ranks_own_loss(job: Job) -> None:
    job.optimizer = torch.optim.LBFGS(job.net.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    for x, y in job.batches(3):
        job.train_in_closure(x, y)


def _train_plainly(job: Job, batches: Any) -> None:
    job.wrap()
    for x, y in batches:
        F.cross_entropy(job.ddp(x), y).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.controller.step()


FOREIGN = "the loop's batches do not come from this controller"


@wrong(FOREIGN)
def _a_loader_of_the_users_own(job: Job) -> None:
    _train_plainly(job, DataLoader(data(), batch_size=4, shuffle=True))


@wrong(FOREIGN)
def _a_loader_with_torchs_sampler(job: Job) -> None:
    _train_plainly(job, DataLoader(data(), batch_size=4, sampler=DistributedSampler(data())))


@wrong(FOREIGN)
def _one_batch_of_the_data_set(job: Job) -> None:
    _train_plainly(job, [data()[:4]] * 3)


@wrong("the model was given to an earlier controller: train on with a new DistributedDataParallel around its module")
def _the_model_of_an_earlier_controller(job: Job) -> None:
    job.wrap()
    job.controller.close()
    again = dynamix.Controller("static", 4, process_group=job.group)
    with contextlib.closing(again):
        again.wrap(job.ddp, job.optimizer)


@pytest.mark.multiproc
def test_they_end_on_every_rank_with_their_cause() -> None:
    LOOPS.check_wrong(2)


def test_a_cycle_is_named_without_ranks_too() -> None:
    net, dataset = classifier(), classes(24)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = dynamix.Controller("static", 8)
    loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset))
    controller.wrap(net, optimizer)

    def train() -> None:
        for x, y in itertools.cycle(loader):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step()

    refused(UsageError, r"itertools\.cycle\(loader\) and a list of batches give what was trained already", train)
    assert controller.samples_seen == 24
    controller.close()


def _closed(rank: int) -> list[int]:
    """The samples that a closed controller's loader gives this rank, and its state afterwards."""
    net, dataset = classifier(), classes(24)
    controller = dynamix.Controller("static", 4)
    loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset))
    model, optimizer = DDP(net), torch.optim.SGD(net.parameters(), lr=0.1)
    controller.wrap(model, optimizer)
    for _ in range(2):  # first trained, then looked at
        seen = []
        for x, y in loader:
            seen.append(len(x))
            if controller.samples_seen < 24:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                controller.step()
        controller.close()
    controller.load_state_dict(controller.state_dict())
    return seen


@pytest.mark.multiproc
def test_a_closed_controllers_loader_and_state_may_be_used() -> None:
    assert run_ranks(_closed, 2) == [[4, 4, 4]] * 2
