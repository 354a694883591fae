"""Corners found by reading: what ranks must agree on, what a resume must respect, what evaluation must not break."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.events.records import read_events
from tests.ranks import run_ranks
from tests.union import Script


def _data(n: int = 240) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def _rank_zero_saves(rank: int) -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = dynamix.Controller("static", batch_size=4, interval=3, global_batch="adaptive")
    loader = DataLoader(_data(1000), batch_sampler=controller.batch_sampler(_data(1000)))
    model = controller.wrap(DDP(net), optimizer, hook=fp16_compress_hook)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        if rank == 0:
            controller.state_dict()  # settles what is pending, on this rank alone
    controller.close()
    return net.weight.detach().clone()


@pytest.mark.multiproc
def test_a_checkpoint_on_rank_zero_alone_changes_nothing() -> None:
    first, second = run_ranks(_rank_zero_saves, 2)
    assert torch.equal(first, second)


def _slow_to_arrive(rank: int, events: str) -> list[int]:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = dynamix.Controller("dbs", batch_size=20, max_batch_size=60, events=events, global_batch="adaptive")
    sampler = controller.batch_sampler(_data())
    model = controller.wrap(DDP(net), optimizer)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(_data(), batch_sampler=sampler):
            if rank == 1:
                time.sleep(0.01)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1:
                time.sleep(0.15)  # longer than rank 0's patience with its policy
            controller.step()
    controller.close()
    return controller.batch_sizes.tolist()


@pytest.mark.multiproc
def test_patience_is_for_the_policy_not_for_the_slowest_rank(tmp_path: Path) -> None:
    events = str(tmp_path / "events.jsonl")
    sizes = run_ranks(_slow_to_arrive, 2, events)
    assert sizes[0] == sizes[1] != [20, 20]
    # One may be a pause of the machine; if the slow rank used up the policy's patience, all would be late.
    assert len([e for e in read_events(events) if e["decision"] == "late"]) <= 1


def _evaluates(rank: int) -> bool:
    net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = dynamix.Controller(Script([[2, 14]]), batch_size=8, interval=2, global_batch="adaptive")
    sampler = controller.batch_sampler(_data())
    model = controller.wrap(DDP(net), optimizer, batchnorm="weighted")
    controller.warm_up(lambda: model(torch.zeros(2, 6)).sum().backward())
    for x, y in DataLoader(_data(), batch_sampler=sampler):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    model.eval()
    with torch.no_grad():
        finite = bool(torch.isfinite(model(_data().tensors[0][:5])).all())
    controller.close()
    return finite


@pytest.mark.multiproc
def test_weighted_buffers_survive_warm_up_and_evaluation() -> None:
    assert all(run_ranks(_evaluates, 2))


def test_single_process_accumulation_with_an_unequal_tail() -> None:
    torch.manual_seed(0)
    x, y = _data(103).tensors
    x = x.double()
    net = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = dynamix.Controller("static", batch_size=10, accumulate=2, global_batch="adaptive")
    sampler = controller.batch_sampler(range(103))
    model = controller.wrap(net, optimizer)
    order = torch.randperm(103, generator=torch.Generator().manual_seed(0))
    seen = []

    def compare(*_: Any) -> None:
        plan = sampler.plan()
        end = plan.start + int(plan.counts.sum())
        union = order[end - int(plan.group.sum()) : end]
        want = torch.autograd.grad(F.cross_entropy(net(x[union]), y[union]), list(net.parameters()))
        seen.append(max(float((p.grad - w).abs().max()) for p, w in zip(net.parameters(), want, strict=True)))

    optimizer.register_step_pre_hook(compare)  # after the controller's own
    for batch in sampler:
        (F.cross_entropy(model(x[batch]), y[batch]) / 2).backward()
        if sampler.plan().micro == 1:
            optimizer.step()
            optimizer.zero_grad()
        controller.step()
    assert len(seen) == 5  # the last one carries the three samples that are too few for a step
    assert np.max(seen) < 1e-12


def test_bounds_changed_before_a_resume_hold_at_once(tmp_path: Path) -> None:
    def make(most: int) -> tuple[dynamix.Controller, Any]:
        controller = dynamix.Controller(
            Script([[64]]), batch_size=16, max_batch_size=most, interval=2, global_batch="adaptive"
        )
        return controller, controller.batch_sampler(_data())

    def train(controller: dynamix.Controller, sampler: Any) -> None:
        net = nn.Linear(6, 3)
        model = controller.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for batch in sampler:
            F.cross_entropy(model(_data().tensors[0][batch]), _data().tensors[1][batch]).backward()
            net.zero_grad()
            controller.step()

    controller, sampler = make(64)
    train(controller, sampler)
    assert controller.batch_sizes.tolist() == [64]
    torch.save(controller.state_dict(), tmp_path / "state.pt")
    resumed, _ = make(32)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))  # weights_only is torch's default
    assert resumed.batch_sizes.tolist() == [32]


def test_the_global_step_never_outgrows_the_data_set() -> None:
    net = nn.Linear(6, 3)
    controller = dynamix.Controller(
        Script([[4000], [20]]), batch_size=16, max_batch_size=4000, interval=1, global_batch="adaptive"
    )
    sampler = controller.batch_sampler(_data())
    model = controller.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    sizes = []
    for _ in range(6):
        for batch in sampler:
            F.cross_entropy(model(_data().tensors[0][batch]), _data().tensors[1][batch]).backward()
            net.zero_grad()
            controller.step()
            sizes.append(int(controller.batch_sizes[0]))
    assert max(sizes) == 240
    assert sizes.count(20) >= 2, "adaptation stopped for good"
    assert np.isfinite(controller.samples_seen)
