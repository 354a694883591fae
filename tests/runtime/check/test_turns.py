"""Batches trained in another order than dealt: told as soon as their sizes show it; what only looks so stays silent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, classifier
from tests.union import Script

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(90)]
SAMPLES = 200


class OverTime(nn.Module):
    """Wants time first. With `tokens` it flattens them, and its inputs are not as long as the batch."""

    def __init__(self, *, tokens: bool = False) -> None:
        super().__init__()
        self.tokens, self.layer = tokens, nn.Linear(1 if tokens else 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        return self.layer(mean[:, None] if self.tokens else mean)


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


def _train(how: str) -> str:
    square, tokens = how == "square", how == "time first"
    net = OverTime(tokens=tokens) if square or tokens else classifier()
    group = dist.new_group()
    controller = adaptive(Script([[3, 5], [6, 2], [4, 4]]), 4, max_batch_size=8, interval=5, process_group=group)
    job, steps = Training(controller, classes(SAMPLES), net), 0
    try:
        for x, y in {"swapped": _swapped, "behind": _behind}.get(how, iter)(iter(job.loader)):
            if how == "by name":
                logits = job.model(input=x)
            elif how == "twice as long":
                logits = job.model(torch.cat([x, x + 0.01]))[: len(x)]
            elif square:  # as many times as the first batches have samples
                logits = job.model(x.expand(4, *x.shape))
            else:
                logits = job.model(x.T if tokens else x)
            F.cross_entropy(logits, y).backward()
            job.finish()
            steps += 1
    except UsageError as error:
        return f"after {steps}: {error}"
    controller.close()
    return "silent"


IN_ORDER = ("plain", "by name", "time first", "square", "twice as long")
IN_ANOTHER = ("swapped", "behind")


def _all(rank: int) -> dict[str, str]:
    return {how: _train(how) for how in (*IN_ORDER, *IN_ANOTHER)}


def test_batches_in_another_order_are_told_once_sizes_differ_and_loops_in_order_stay_silent() -> None:
    for told in run_ranks(_all, 2):
        assert {how: told[how] for how in IN_ORDER} == dict.fromkeys(IN_ORDER, "silent")
        for how in IN_ANOTHER:
            assert "in the order in which the loader gives them" in told[how]
            assert int(told[how].split()[1].strip(":")) <= 12
