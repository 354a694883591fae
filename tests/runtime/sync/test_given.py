"""Losses that carry their weights: exact as they are, and an error where they do not do what `wrap` was told."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import UsageError
from dynamix.runtime.facts.losses import WeightTest
from dynamix.window import Window
from tests.integrations.jobs import SHARES
from tests.ranks import refusal, run_cases, run_ranks
from tests.runtime.jobs import adaptive, classes, classifier, furthest, order_of
from tests.union import Script, larger

pytestmark = pytest.mark.multiproc
SAMPLES = 400


def _job(accumulate: int, weighting: str, answers: list[list[int]], **options: Any) -> Any:
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,))
    net = nn.Linear(6, 3)
    given = {"max_batch_size": 32, "accumulate": accumulate, "lr_rule": "none", "process_group": dist.new_group()}
    controller = adaptive(Script(answers, accumulate), 8, **given)
    loader = controller.loader(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = controller.wrap(DDP(net, process_group=controller.group), optimizer, weighting=weighting)
    return controller, loader, model, optimizer, (x, y)


def _given(accumulate: int) -> float:
    answers = SHARES["grow"][2] + SHARES["shrink"][2]
    made = _job(accumulate, "given", answers, placeholder=lambda batch: [batch[0], 0 * batch[1] - 100])
    controller, loader, model, optimizer, (x, y) = made
    whole, worst, order = nn.Linear(6, 3), 0.0, order_of(SAMPLES)
    for bx, by in loader:
        piece = loader.cut.piece()
        with controller.piece():
            total = piece.round.counts.sum()
            loss = F.cross_entropy(model(bx), by, reduction="sum") / total * 2
            loss.backward()
        if piece.last:
            end = piece.plan.start + int(piece.plan.counts.sum())
            union = order[end - int(total) : end]
            whole.load_state_dict(model.module.state_dict())
            want = torch.autograd.grad(F.cross_entropy(whole(x[union]), y[union]), list(whole.parameters()))
            worst = larger(worst, furthest(model, want))
            optimizer.step()
            optimizer.zero_grad()
        controller.step(loss=loss)
    assert controller.samples_seen == SAMPLES
    controller.close()
    return worst


def test_weights_in_the_loss_are_left_as_they_are() -> None:
    assert max(map(max, run_cases(_given, 2, [1, 2]))) < 1e-6


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return self.body(x)


def _passed_counts() -> None:
    net, group = _Counts(), dist.new_group()
    controller = dynamix.Controller("static", 8, process_group=group)
    loader = controller.loader(DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=8))
    model = controller.wrap(DDP(net, process_group=group), torch.optim.SGD(net.parameters(), lr=0.1))
    (x,) = next(iter(loader))
    model(x, num_items_in_batch=torch.tensor(16))


def _placeholders() -> None:
    """In the last step of the epoch a rank has no samples."""
    net, group = classifier(), dist.new_group()
    controller = dynamix.Controller("static", 8, min_batch_size=1, process_group=group)
    loader = controller.loader(DataLoader(classes(19), batch_size=8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = controller.wrap(DDP(net, process_group=group), optimizer, weighting="given")
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()


def _weighted(loss: Tensor, controller: Any, loader: Any) -> Tensor:
    piece = loader.cut.piece()
    return loss * piece.samples * 2 / piece.round.samples


def _told(rank: int) -> list[str]:
    """What each pair of a weighting and a kind of loss leads to; a model that is passed counts; and placeholders."""
    told = []
    for weighting in ("hook", "given"):
        for carries in (False, True):
            uneven = [[12, 4], [4, 12], [14, 6], [5, 16]]
            controller, loader, model, optimizer, _ = _job(1, weighting, uneven, placeholder=lambda batch: batch)
            told.append(refusal(UsageError, _train, controller, loader, model, optimizer, carries=carries))
    return [*told, refusal(UsageError, _passed_counts), refusal(UsageError, _placeholders)]


def _train(controller: Any, loader: Any, model: Any, optimizer: Any, *, carries: bool) -> None:
    for x, y in itertools.chain(*[loader] * 6):
        loss = F.cross_entropy(model(x), y)
        loss = _weighted(loss, controller, loader) if carries else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)


def test_a_loss_that_is_weighted_twice_or_never_or_of_nothing_ends_the_job() -> None:
    for told in run_ranks(_told, 2):
        assert told[0] == told[3] == "accepted"
        assert "weighted already" in told[1]
        assert "wrap(..., weighting='given')" in told[1]
        assert "leave weighting= out" in told[2]
        assert "weighting='given'" in told[4]
        assert "placeholder=" in told[5]  # somebody must know what does not count


def test_losses_that_carry_weights_fit_no_other_way_of_weighting() -> None:
    controller = dynamix.Controller("static", 8)
    loader = controller.loader(DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=8))
    net = nn.Linear(6, 3)
    controller.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1), weighting="given")
    next(iter(loader))
    with pytest.raises(UsageError, match="twice"):
        controller.weight(net(torch.randn(2, 6)).sum())


def test_a_loss_that_grows_with_the_batch_by_itself_is_not_taken_for_a_weighted_one() -> None:
    test = WeightTest(given=False)
    for _ in range(40):
        test.look(Window.of([6, 2], loss=np.log([6.0, 2.0])))
    assert test.wrong is None
