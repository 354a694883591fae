"""A language model on two real ranks, weighted by bytes: the union batch's gradient, and learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

import dynamix
from dynamix_lab.tasks import as_is, make_workload
from tests.ranks import run_ranks
from tests.union import Script

STEPS, SIZES = 10, (6, 2)


def train(rank: int) -> dict[str, Any]:
    workload = make_workload("pysource")
    data = workload.make_data(0, train=120, test=10)
    net = workload.make_model(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    controller = dynamix.Controller(policy=Script([SIZES]), batch_size=4, interval=2, global_batch="adaptive")
    sampler = controller.batch_sampler(data.train, seed=0)
    model = controller.wrap(DDP(net), optimizer, weighting="loss")
    losses, counts = [], []
    for _, (inputs, targets) in zip(
        range(STEPS), DataLoader(data.train, batch_sampler=sampler, collate_fn=as_is), strict=False
    ):
        loss = workload.loss(model(inputs), targets)
        counts.append((len(targets), workload.divisor(targets)))
        controller.weight(loss, count=counts[-1][1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
        losses.append(loss.item())
    controller.close()
    return {"weights": parameters_to_vector(net.parameters()).detach(), "losses": losses, "counts": counts}


@pytest.mark.multiproc
def test_byte_counts_make_unequal_shares_the_gradient_of_the_union_batch() -> None:
    first, second = run_ranks(train, 2)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    assert first["counts"][-1][0] == SIZES[0]
    assert first["counts"][-1][1] / second["counts"][-1][1] != pytest.approx(SIZES[0] / SIZES[1], rel=1e-3)

    workload = make_workload("pysource")
    data = workload.make_data(0, train=120, test=10)
    net = workload.make_model(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    sampler = dynamix.Controller(policy="static", batch_size=8, global_batch="adaptive").batch_sampler(
        data.train, seed=0
    )
    stream = [i for batch in sampler for i in batch]
    position, alone = 0, []
    for (mine, _), (theirs, _) in zip(first["counts"], second["counts"], strict=True):
        inputs, targets = data.train.__getitems__(stream[position : position + mine + theirs])
        position += mine + theirs
        loss = workload.loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
    torch.testing.assert_close(first["weights"], parameters_to_vector(net.parameters()).detach(), rtol=1e-4, atol=1e-5)
    assert alone[-1] < 0.9 * alone[0]
