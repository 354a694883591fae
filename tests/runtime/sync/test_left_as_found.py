"""A job that ends where it stands leaves torch's objects as they were; several models under meet="auto"."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import dynamix
from tests.ranks import run_cases, run_ranks
from tests.runtime.jobs import in_turns, wait_for_decisions
from tests.runtime.sync.one_loop import Case, Job, Net, dataset, flat
from tests.union import Script

pytestmark = pytest.mark.multiproc
PIECES = {"micro_batch": 4, "max_batch_size": 64}
USUAL = timedelta(seconds=30)


def _left(case: Case) -> tuple[timedelta, list[bool]]:
    """After a loop that is left at the first piece that is not the last: its timeout, and whether gradients cross."""
    job = Job(case)
    job.wrap()
    for x, y in job.batches():
        loss = job.backward(x, y)
        piece = job.sampler.piece()
        if piece.round.apart or job.controller.optimizer_due:
            job.update()
        if not piece.last:
            break
        job.step(loss)
    dist.barrier()  # all have left it before one closes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.controller.close()
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    states = (module._get_fsdp_state() for module in job.model.modules() if hasattr(module, "_get_fsdp_state"))
    crosses = [group.reduce_grads for state in states if (group := state._fsdp_param_group) is not None]
    return backend.options._timeout, crosses or [job.model.require_backward_grad_sync]


CASES = (
    Case("gradients", options=PIECES, shares=((12, 12),)),
    Case("gradients", options=PIECES, shares=((12, 12),), sharded=True),
    Case("auto", shares=((12, 12),)),
)


def test_a_loop_left_within_a_round_leaves_ddp_fsdp_and_timeouts_as_they_were() -> None:
    for ranks in run_cases(_left, 2, CASES):
        for timeout, crosses in ranks:
            assert timeout == USUAL
            assert all(crosses)


def _second_model_from_round(rank: int, first: int) -> tuple[list[bool], torch.Tensor]:
    """A second model, with buffers, is trained from a round on; in rounds apart on some of the batches only."""
    wait_for_decisions()
    in_turns()
    controller = dynamix.Controller(Script(((12, 4), (10, 6), (14, 2))), 8, interval=2, meet="auto")
    data, ways = dataset(), list[bool]()
    nets = Net("plain"), Net("batchnorm")
    models = [DDP(net) for net in nets]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
    sampler = controller.batch_sampler(data, seed=1)
    for model, optimizer in zip(models, optimizers, strict=True):
        controller.wrap(model, optimizer)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_sampler=sampler):
            piece = sampler.piece()
            second = len(ways) >= first and (piece.number % 2 == 1 or not piece.round.apart)
            for model, optimizer in list(zip(models, optimizers, strict=True))[: 1 + second]:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            controller.step()
            ways += [piece.round.apart] if controller.met else []
    controller.close()
    return ways, torch.cat([flat(nets[0]), torch.cat([p.detach().flatten().double() for p in nets[1].parameters()])])


def test_a_second_model_that_ranks_train_on_unlike_batches_is_served_from_any_round_on() -> None:
    (ways, weights), (_, others) = run_ranks(_second_model_from_round, 2, 7, timeout_s=60)
    assert ways[7:].count(True) > 2
    assert ways[7:].count(False) > 2
    assert torch.equal(weights, others)
