"""Trainable parameters that the optimizer steps and DDP does not reduce: ranks must not part by them in silence."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamix
from dynamix.errors import UsageError
from tests.ranks import refusal, run_ranks
from tests.runtime.check.loops import Job, Loops
from tests.runtime.jobs import Training, classes
from tests.union import Script

LOOPS = Loops()
wrong, right, right_with = LOOPS.wrong, LOOPS.right, LOOPS.right_with
pytestmark = pytest.mark.multiproc
REDUCED = "before you call DistributedDataParallel(net)"


def _under(job: Job, **options: Any) -> None:
    """DDP anew, around the model as it is now."""
    job.ddp = DDP(job.net, process_group=job.group, **options)
    job.optimizer = torch.optim.SGD(job.net.parameters(), lr=0.1)


def _ignoring(job: Job, *names: str) -> list[nn.Parameter]:
    DDP._set_params_and_buffers_to_ignore_for_model(job.net, list(names))
    _under(job)
    return [job.net.get_parameter(name) for name in names]


def _shard(job: Job, ignored: set[nn.Parameter] | None = None) -> None:
    fully_shard(job.net, mesh=DeviceMesh.from_group(job.group, "cpu"), ignored_params=ignored)
    job.ddp, job.optimizer = job.net, torch.optim.SGD(job.net.parameters(), lr=0.1)


def _add_weighted(job: Job, parameters: Iterable[nn.Parameter]) -> None:
    """A loop's own reduction, of the mean over all samples."""
    plan = job.sampler.plan()
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad *= int(plan.counts[job.rank]) / plan.samples
        dist.all_reduce(parameter.grad, group=job.group)


@wrong(REDUCED)
@wrong(REDUCED, num_workers=2)
def _unfrozen_later(job: Job) -> None:
    job.net[0].requires_grad_(False)
    _under(job)
    for x, y in job.batches():
        if job.steps == 3:
            job.net[0].requires_grad_(True)
        job.train(x, y)


@wrong(REDUCED)
def _a_layer_replaced_in_the_middle(job: Job) -> None:
    _under(job, find_unused_parameters=True)
    for x, y in job.batches():
        if job.steps == 3:
            torch.manual_seed(3)
            job.net[2] = nn.Linear(5, 3)
            job.optimizer.param_groups[0]["params"][2:] = list(job.net[2].parameters())
        job.train(x, y)


@wrong("2.bias")
def _a_name_that_ddp_ignores_and_momentum(job: Job) -> None:
    _ignoring(job, "2.bias")
    job.optimizer = torch.optim.AdamW(job.net.parameters(), lr=0.01)
    for x, y in job.batches():
        job.train(x, y)


@wrong("of shape [3]")
def _a_parameter_of_no_model(job: Job) -> None:
    scale = nn.Parameter(torch.ones(3))
    for x, y in job.batches():
        if job.steps == 2:
            job.optimizer.add_param_group({"params": [scale]})
        F.cross_entropy(job.ddp(x) * scale, y).backward()
        job.update()
        job.step()


def _unfrozen_with_an_optimizer_of_its_own(job: Job, *, added: bool) -> None:
    job.net[0].requires_grad_(False)
    _under(job)
    own, job.optimizer = (torch.optim.SGD(job.net[layer].parameters(), lr=0.1) for layer in (0, 2))
    for x, y in job.batches():
        if job.steps == 3:
            job.net[0].requires_grad_(True)
            job.controller.wrap(job.ddp, own)
        job.loss(x, y).backward()
        job.update()
        if job.steps >= 3:
            _add_weighted(job, job.net[0].parameters() if added else [])
            own.step()
            own.zero_grad()
        job.step()


@wrong(REDUCED)
def _unfrozen_later_with_an_optimizer_of_its_own(job: Job) -> None:
    _unfrozen_with_an_optimizer_of_its_own(job, added=False)


@right
def _unfrozen_later_and_reduced_by_the_loop(job: Job) -> None:
    _unfrozen_with_an_optimizer_of_its_own(job, added=True)


@wrong(REDUCED, accumulate=2)
def _unfrozen_while_gradients_accumulate(job: Job) -> None:
    job.net[0].requires_grad_(False)
    _under(job)
    for number, (x, y) in enumerate(job.batches()):
        if number == 4:
            job.net[0].requires_grad_(True)
        last = number % 2 == 1
        with contextlib.nullcontext() if last else job.ddp.no_sync():
            job.loss(x, y).backward()
        if last:
            job.update()
        job.step()


@wrong("optimizer.step() of unreduced 0.weight")
def _unfrozen_on_one_rank_alone(job: Job) -> None:
    """Its loop is another one: the rest wait for its gradients, and it for them."""
    job.net[0].requires_grad_(False)
    _under(job)
    for x, y in job.batches():
        if job.steps == 3 and job.rank == 1:
            job.net[0].requires_grad_(True)
        job.train(x, y)


@wrong("before you call fully_shard(net)")
def _a_layer_that_fsdp_leaves_alone(job: Job) -> None:
    _shard(job, ignored={job.net[0].weight})
    job.controller.wrap(job.ddp, job.optimizer, weighting="loss")
    for x, y in job.loader:
        job.controller.weight(job.loss(x, y)).backward()
        job.update()
        job.step()


@right
def _the_loop_reduces_what_ddp_ignores(job: Job) -> None:
    own = _ignoring(job, "2.weight", "2.bias")
    for x, y in job.batches(2):
        job.loss(x, y).backward()
        _add_weighted(job, own)
        job.update()
        job.step()


@right
def _frozen_layers_stay_with_the_optimizer(job: Job) -> None:
    job.net[0].requires_grad_(False)
    _under(job)
    for x, y in job.batches(2):
        job.train(x, y)


@right
def _frozen_and_unfrozen_after_ddp(job: Job) -> None:
    _under(job, find_unused_parameters=True)
    for x, y in job.batches(2):
        job.net[0].requires_grad_(job.steps % 6 < 3)
        job.train(x, y)


@right
def _a_new_parameter_that_is_not_used(job: Job) -> None:
    job.optimizer = torch.optim.SGD(job.net.parameters(), lr=0.1, weight_decay=0.1)
    job.wrap()
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    for x, y in job.loader:
        job.train(x, y)


@right
def _every_rank_has_an_expert_of_its_own(job: Job) -> None:
    _ignoring(job, "2.weight", "2.bias")
    torch.manual_seed(job.rank)
    job.net[2].reset_parameters()
    for x, y in job.batches():
        job.train(x, y)


@right
def _every_rank_has_a_scale_of_its_own_with_an_optimizer_of_its_own(job: Job) -> None:
    scale = nn.Parameter(torch.ones(3))
    own = torch.optim.SGD([scale], lr=0.1)
    for x, y in job.batches():
        F.cross_entropy(job.ddp(x) * scale, y).backward()
        job.update()
        own.step()
        own.zero_grad()
        job.step()


@right
def _values_are_averaged_after_every_step(job: Job) -> None:
    own = _ignoring(job, "2.weight")
    for x, y in job.batches():
        job.train(x, y)
        for parameter in own:
            dist.all_reduce(parameter.data, group=job.group)
            parameter.data /= dist.get_world_size()


@right
def _under_fsdp_with_a_frozen_layer(job: Job) -> None:
    job.net[2].bias.requires_grad_(False)
    _shard(job)
    for x, y in job.batches():
        job.train(x, y)


def test_ranks_that_would_part_end_with_the_line_to_write() -> None:
    LOOPS.check_wrong(2)


def test_those_that_do_not_part_stay_silent() -> None:
    LOOPS.check_right()


def _under_auto(rank: int) -> str:
    """Workers meet over gradients in the first rounds."""
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    controller = dynamix.Controller(Script([[5, 3]]), 4, interval=8, meet="auto", process_group=dist.new_group())
    job = Training(controller, classes(96), net)
    net[0].requires_grad_(True)

    def train() -> None:
        for x, y in job.loader:
            job.train_piece(x, y)

    return refusal(UsageError, train)


def _beside(rank: int) -> list[str]:
    job = Job(rank)
    _under(job, find_unused_parameters=True)
    job.wrap()
    torch.manual_seed(3)
    job.net[2] = nn.Linear(5, 3)
    own, told = torch.optim.SGD(job.net[2].parameters(), lr=0.1), []
    for x, y in job.loader:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job.loss(x, y).backward()
            own.step()
            own.zero_grad()
            job.update()
            job.step()
        told += [str(warning.message) for warning in caught if "controller.wrap()" in str(warning.message)]
    job.controller.close()
    return told


def _under_auto_and_beside(rank: int) -> tuple[str, list[str]]:
    return _under_auto(rank), _beside(rank)


def test_ranks_do_not_part_where_ways_of_meeting_change_or_an_optimizer_is_unknown() -> None:
    for refused, warned in run_ranks(_under_auto_and_beside, 2):
        assert "trains 0.weight, 0.bias, but DDP does not average the gradients" in refused
        (text,) = warned
        assert "(SGD) that was not given to controller.wrap() trains 2.weight, 2.bias" in text
