"""Samples beside the controller's: they have their own weight, or the job is refused; what is no such thing trains."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.runtime.jobs import order_of
from tests.union import Script, flat_gradient, larger

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]
SAMPLES, OTHERS = 240, 4  # samples of the other loader in each of a rank's batches
SHARES = [[12, 4], [4, 12], [10, 6], [6, 10]]


class Batch:
    """What a rank, or one process for all of them, trains on, and how.

    others      samples that the controller did not deal
    part        of the union's samples of both kinds that are here, each over what the hook weighs by
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, others: Tensor) -> None:
        self.model, self.x, self.y, self.others = model, x, y, others
        self.factor = 1.0  # of the others' loss

    def weigh(self, loss: Tensor, count: int) -> Tensor:
        return loss

    def local(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Share(Batch):
    """A rank's; with `weighs` each loss gets the weight of its samples."""

    controller: dynamix.Controller
    weighs = False

    def weigh(self, loss: Tensor, count: int) -> Tensor:
        return self.controller.weight(loss, count=count) if self.weighs else loss

    def local(self) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync()  # type: ignore[operator, no-any-return]


Way = Callable[[Batch], Tensor]  # makes gradients; the loss that `step` gets


def _invariant(logits: Tensor) -> Tensor:
    """What unlabelled samples are trained by."""
    return logits.softmax(1).square().sum(1).mean()


def _done(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


# ------------------------------------------------------------ others that have a wrong weight unless they are weighed


def apart(of: Batch) -> Tensor:
    with of.local():
        of.weigh(_invariant(of.model(of.others)), len(of.others)).backward()
    mine = F.cross_entropy(of.model(of.x), of.y)
    of.weigh(mine, len(of.x)).backward()
    return mine


def together(of: Batch) -> Tensor:
    logits = of.model(torch.cat([of.x, of.others]))
    mine, others = F.cross_entropy(logits[: len(of.x)], of.y), _invariant(logits[len(of.x) :])
    return _done(of.weigh(mine, len(of.x)) + of.factor * of.weigh(others, len(of.others)))


def one_mean(of: Batch) -> Tensor:
    """As of a buffer that keeps labels."""
    logits, rows = of.model(torch.cat([of.x, of.others])), len(of.x) + len(of.others)
    loss = F.cross_entropy(logits, torch.cat([of.y, of.others.argmax(1) % 3]))
    of.weigh(loss, rows).backward()
    return loss


UNLIKE: tuple[Way, ...] = (apart, together, one_mean)

# ------------------------------------------------------------ loops without others, or with others that weigh nothing


def _padded(of: Batch) -> Tensor:
    """With own samples, to a multiple of eight."""
    return torch.cat([of.x, of.x])[: -(-len(of.x) // 8) * 8]


def padded_and_masked(of: Batch) -> Tensor:
    x = _padded(of)
    losses = F.cross_entropy(of.model(x), torch.cat([of.y, of.y])[: len(x)], reduction="none")
    return _done((losses * (torch.arange(len(x)) < len(of.x))).sum() / len(of.x))


def with_a_dummy(of: Batch) -> Tensor:
    """So that every parameter has a gradient."""
    logits = of.model(torch.cat([of.x, torch.zeros(1, 6)]))
    return _done(F.cross_entropy(logits[:-1], of.y) + 0 * logits[-1:].sum())


def against_negatives(of: Batch) -> Tensor:
    """Each sample has a loss of its own, in which the others are what it is to be told from."""
    rows = of.model(torch.cat([of.x, of.others]))
    mine, others = rows.split([len(of.x), len(of.others)])
    return _done((mine @ others.T).logsumexp(1).mean())


def same_everywhere_apart(of: Batch) -> Tensor:
    with of.local():
        _invariant(of.model(torch.linspace(-1, 1, 24).view(4, 6))).backward()
    return _done(F.cross_entropy(of.model(of.x), of.y))


def in_proportion(of: Batch) -> Tensor:
    """As many others as samples of the controller's."""
    return together(of)


def weighed_by_hand(of: Batch) -> Tensor:
    """It says so, by `step(count=)`."""
    return together(of)


RIGHT: tuple[Way, ...] = (
    padded_and_masked,
    with_a_dummy,
    against_negatives,
    same_everywhere_apart,
    in_proportion,
    weighed_by_hand,
)


def _worst(rank: int, way: Way, *, weighs: bool = False) -> float | str:
    """The largest error of a gradient from that of all samples which the ranks train on; or what ended the job."""
    torch.manual_seed(0)
    x, y, others = torch.randn(SAMPLES, 6), torch.arange(SAMPLES) % 3, torch.randn(SAMPLES, 6)
    net = nn.Linear(6, 3)
    reference, worst, group = copy.deepcopy(net), 0.0, dist.new_group()
    controller = dynamix.Controller(Script(SHARES), 8, interval=1, max_batch_size=16, process_group=group)
    sampler = controller.batch_sampler(TensorDataset(x, y))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = controller.wrap(DDP(net, process_group=group), optimizer, weighting="loss" if weighs else "hook")
    drawn = torch.Generator().manual_seed(rank)
    try:
        for bx, by in DataLoader(TensorDataset(x, y), batch_sampler=sampler):
            plan, many = sampler.plan(), len(bx) if way is in_proportion else OTHERS
            share = Share(model, bx, by, others[torch.randint(SAMPLES, (many,), generator=drawn)])
            share.controller, share.weighs = controller, weighs
            if way is weighed_by_hand:
                share.factor = plan.samples / (len(bx) * 2)
            loss = way(share)
            both: list[Tensor] = [torch.empty(0)] * 2
            dist.all_gather_object(both, share.others, group=group)
            union = order_of(SAMPLES)[plan.start : plan.start + plan.samples]
            reference.load_state_dict(net.state_dict())
            reference.zero_grad()
            way(Batch(reference, x[union], y[union], torch.cat(both)))
            got, want = flat_gradient(net), flat_gradient(reference)
            worst = larger(worst, float((got - want).norm() / want.norm()))
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss, count=len(bx) if way is weighed_by_hand else None)
    except UsageError as error:
        return str(error)
    controller.close()
    return worst


def _all(rank: int) -> tuple[list[float | str], ...]:
    """Of others that are not weighed, of those that are, and of what weighs nothing wrongly."""
    refused, weighed = ([_worst(rank, way, weighs=weighs) for way in UNLIKE] for weighs in (False, True))
    return refused, weighed, [_worst(rank, way) for way in RIGHT]


def test_others_have_their_own_weight_or_are_refused_and_what_weighs_nothing_wrongly_trains() -> None:
    for refused, weighed, right in run_ranks(_all, 2, timeout_s=100):
        assert all("another loader" in str(said) for said in refused), refused
        for way, error in zip((*UNLIKE, *RIGHT), weighed + right, strict=True):
            assert isinstance(error, float), (way.__name__, error)
            assert error < 1e-5 or way is against_negatives, (way.__name__, error)  # each rank draws its own
