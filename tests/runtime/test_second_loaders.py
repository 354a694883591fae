"""A second loader beside the controller's: what must become of a job whose loop reads one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.runtime.jobs import order_of
from tests.union import Script, flat_gradient, larger

pytestmark = pytest.mark.multiproc
SAMPLES, OTHERS = 96, 4  # samples of the other loader in each of a rank's batches


def _invariant(logits: Tensor) -> Tensor:
    """What unlabelled samples are trained by."""
    return logits.softmax(1).square().sum(1).mean()


def _worst(rank: int, how: str) -> float | str:
    """The largest error of a gradient from that of all samples which the ranks train on; or what ended the job."""
    torch.manual_seed(0)
    x, y, unlabelled = torch.randn(SAMPLES, 6), torch.arange(SAMPLES) % 3, torch.randn(64, 6)
    net = nn.Linear(6, 3)
    reference, worst = copy.deepcopy(net), 0.0
    controller = dynamix.Controller(Script([[12, 4], [4, 12]]), 8, interval=1, max_batch_size=16)
    sampler = controller.batch_sampler(TensorDataset(x, y))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = controller.wrap(DDP(net), optimizer)
    own = DistributedSampler(unlabelled, shuffle=False)
    others = DataLoader(unlabelled, batch_size=OTHERS, sampler=own)
    replayed = torch.Generator().manual_seed(rank)
    try:
        for (bx, by), later in zip(DataLoader(TensorDataset(x, y), batch_sampler=sampler), others, strict=False):
            plan = sampler.plan()
            second = unlabelled[torch.randint(64, (OTHERS,), generator=replayed)] if how == "rehearsed" else later
            if how == "apart":
                with model.no_sync():
                    _invariant(model(second)).backward()
                loss = F.cross_entropy(model(bx), by)
            else:
                logits = model(torch.cat([bx, second]))
                loss = F.cross_entropy(logits[: len(bx)], by) + _invariant(logits[len(bx) :])
            loss.backward()
            both = [torch.empty_like(second) for _ in range(2)]
            dist.all_gather(both, second)
            union = order_of(SAMPLES)[plan.start : plan.start + plan.samples]
            reference.load_state_dict(net.state_dict())
            reference.zero_grad()
            (F.cross_entropy(reference(x[union]), y[union]) + _invariant(reference(torch.cat(both)))).backward()
            got, want = flat_gradient(net), flat_gradient(reference)
            worst = larger(worst, float((got - want).norm() / want.norm()))
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
    except UsageError as error:
        return str(error)
    controller.close()
    return worst


@pytest.mark.timeout(60)
@pytest.mark.xfail(
    strict=True,
    reason="a controller deals one loader, and its one weight goes to every gradient of a step. Several loaders need "
    "shares and a weight each, put on the part of the loss that is theirs",
)
@pytest.mark.parametrize("how", ["apart", "together", "rehearsed"])
def test_a_second_loader_is_weighted_by_its_own_samples_or_refused(how: str) -> None:
    for told in run_ranks(_worst, 2, how, timeout_s=40):
        assert "another loader" in told if isinstance(told, str) else told < 1e-5
