"""A rank that runs out of memory in the user's own loop ends all ranks, and each says what to write."""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynamix
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, classes

FULL = "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."
APART = {"meet": "parameters", "micro_batch": 4}


@dataclass(frozen=True)
class Case:
    """In which pass of which rank memory runs out.

    closes   the loop closes the controller whatever happens
    """

    within: str
    rank: int = 1
    cuda: bool = False
    buffers: bool = False
    closes: bool = False
    apart: bool = False


CASES = [
    Case("forward"),
    Case("backward"),
    Case("forward", buffers=True, closes=True),
    Case("backward", rank=0, cuda=True),
    Case("backward", apart=True),
]


def _ended(rank: int, case: Case) -> tuple[str, float, float]:
    """What this rank says in the end, and when; and when its memory ran out, 0 if it did not."""
    between = nn.BatchNorm1d(8) if case.buffers else nn.ReLU()
    net = nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 3))
    options: dict[str, Any] = {"interval": 5, "process_group": dist.new_group(), **(APART if case.apart else {})}
    controller, step, at_s = dynamix.Controller("static", 24, **options), 0, 0.0
    job = Training(controller, classes(4000), net)

    def full(*_: Any) -> None:
        nonlocal at_s
        if step == 6 and rank == case.rank:
            at_s = time.time()
            raise torch.OutOfMemoryError("CUDA out of memory.") if case.cuda else RuntimeError(FULL)

    def full_backward(module: Any, given: Any, output: torch.Tensor) -> None:
        output.register_hook(full)

    if case.within == "forward":
        net[1].register_forward_pre_hook(full)
    else:
        net[1].register_forward_hook(full_backward)
    said = "accepted"
    try:
        try:
            for step, (x, y) in enumerate(job.loader):  # noqa: B007
                job.train_piece(x, y)
        finally:
            if case.closes:
                controller.close()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        said = "".join(traceback.format_exception_only(error))
    return said, time.time(), at_s


def _all_ended(rank: int) -> list[tuple[str, float, float]]:
    return [_ended(rank, case) for case in CASES]


@pytest.mark.multiproc
def test_all_ranks_end_soon_and_name_the_rank_its_batch_and_the_line() -> None:
    for case, *ranks in zip(CASES, *run_ranks(_all_ended, 2), strict=True):
        samples = 4 if case.apart else 24
        at_s = ranks[case.rank][2]
        for said, end_s, _ in ranks:
            assert f"rank {case.rank} ran out of memory in a pass of {samples} samples" in said, (case, said)
            assert "controller.find_limits(step_fn, example)" in said
            assert f"Controller(micro_batch={samples // 2})" in said
            assert 0 < end_s - at_s < 10, case
        assert "WorkerLostError" not in ranks[case.rank][0]
