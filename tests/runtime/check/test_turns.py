"""Batches trained in another order than dealt: told as soon as their sizes show it; what only looks so stays silent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, classifier
from tests.union import Script

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(90)]
SAMPLES = 300


class Square(nn.Module):
    """Wants time first, and as many times as the first batches have samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(0))


class Turned(nn.Module):
    """Wants time first, and flattens tokens: its inputs are not as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(0)[:, None])


def _swapped(batches: Iterator[Any]) -> Iterator[Any]:
    """Pairs of neighbours, the second one first: what a buffer of the user's own does."""
    for first in batches:
        second = next(batches, None)
        yield from (first,) if second is None else (second, first)


def _behind(batches: Iterator[Any]) -> Iterator[Any]:
    """Each in the turn of the next one: a buffer that hands on what it had before."""
    before = None
    for now in batches:
        yield now if before is None else before
        before = now


def _train(rank: int, how: str) -> str:
    net: nn.Module = Turned() if how == "time first" else Square() if how == "square" else classifier()
    controller = adaptive(Script([[3, 5], [6, 2], [4, 4]]), 4, max_batch_size=8, interval=5)
    job, steps = Training(controller, classes(SAMPLES), net), 0
    try:
        for x, y in {"swapped": _swapped, "behind": _behind}.get(how, iter)(iter(job.loader)):
            if how == "by name":
                logits = job.model(input=x)
            elif how == "twice as long":
                logits = job.model(torch.cat([x, x + 0.01]))[: len(x)]
            elif how == "square":
                logits = job.model(x.expand(4, *x.shape))
            else:
                logits = job.model(x.T if how == "time first" else x)
            F.cross_entropy(logits, y).backward()
            job.finish()
            steps += 1
    except UsageError as error:
        return f"after {steps}: {error}"
    controller.close()
    return "silent"


@pytest.mark.parametrize("how", ["swapped", "behind"])
def test_batches_in_another_order_are_told_once_sizes_differ(how: str) -> None:
    for said in run_ranks(_train, 2, how):
        assert "in the order in which the loader gives them" in said
        assert int(said.split()[1].strip(":")) <= 12


@pytest.mark.parametrize("how", ["plain", "by name", "time first", "square", "twice as long"])
def test_loops_in_order_stay_silent(how: str) -> None:
    assert run_ranks(_train, 2, how) == ["silent"] * 2
