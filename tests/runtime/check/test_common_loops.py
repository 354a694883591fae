"""Twelve loops that training scripts have, under every way of meeting: exact, or ended with the line to write."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.runtime.check import common_loops as loops
from tests.runtime.sync.one_loop import WAYS, Case, Job, Loop, compared, ends_of

pytestmark = pytest.mark.multiproc

COLLECTIVES = (
    loops.logs_every_batch,
    loops.logs_before_its_step,
    loops.logs_in_a_group_of_its_own,
    loops.waits_every_few_batches,
    loops.evaluates_together,
)
COUNTS = (
    loops.saves_every_few_batches,
    loops.leaves_after_so_many_batches,
    loops.stops_early_by_its_own_count,
)
APART = "parameters", "auto"
SOON_S = 10.0


@pytest.mark.parametrize("meet", WAYS)
def test_loops_that_ask_where_all_meet_train_the_same_bits_as_under_piece(meet: str) -> None:
    asked = {name: (loop, Case(meet=meet, optimizer="adamw", epochs=2)) for name, loop in loops.SERVED.items()}
    if meet == "gradients":
        asked |= {loop.__name__: (loop, Case(meet=meet)) for loop in (*COLLECTIVES, *COUNTS)}
        accumulating = Case(meet=meet, options={"accumulate": 2}, within=1e-5)
        asked["accumulates"] = loops.accumulates_as_the_controller_knows, accumulating
    for told in run_ranks(compared, 2, asked, timeout_s=100):
        assert {name: differs for name, (differs, _, _) in told.items() if differs} == {}
        assert [*told] == [*asked]


def _end_soon(loop: Loop, case: Case, words: Sequence[str]) -> None:
    for said, seconds in ends_of(loop, case):
        assert all(word in said for word in words), said
        assert seconds < SOON_S, said


@pytest.mark.parametrize("meet", APART)
@pytest.mark.parametrize("loop", COLLECTIVES, ids=lambda loop: loop.__name__)
def test_collectives_between_meetings_end_all_ranks_with_the_line_to_write(loop: Loop, meet: str) -> None:
    _end_soon(loop, Case(meet=meet), ["if controller.met"])


def test_all_ranks_end_that_wait_in_unlike_collectives_of_the_loops_own() -> None:
    _end_soon(loops.logs_on_unlike_batches, Case(meet="parameters"), ["if controller.met"])


@pytest.mark.parametrize("meet", APART)
@pytest.mark.parametrize("loop", COUNTS, ids=lambda loop: loop.__name__)
def test_what_is_counted_in_batches_ends_all_ranks_with_the_line_to_write(loop: Loop, meet: str) -> None:
    _end_soon(loop, Case(meet=meet), ["controller.checkpoint_due(every="])


@pytest.mark.parametrize(
    ("meet", "words"),
    [
        ("gradients", "accumulate="),
        ("parameters", "every piece has an optimizer step"),
        ("auto", "optimizer.zero_grad()"),
    ],
)
def test_batches_that_accumulate_by_hand_end_all_ranks_with_the_line_to_write(meet: str, words: str) -> None:
    _end_soon(loops.accumulates_by_hand, Case(meet=meet), [words])


def _timeout_s() -> float:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


def _left_between(rank: int) -> tuple[float, float]:
    before, job = _timeout_s(), Job(Case(meet="parameters"))
    job.wrap()
    for x, y in job.batches():
        loss = job.backward(x, y)
        job.update()
        job.step(loss)
        if not job.controller.met:
            break
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the models differ
        job.controller.close()
    return before, _timeout_s()


def test_a_loop_that_is_left_between_meetings_gets_its_groups_back_as_they_were() -> None:
    for before, after in run_ranks(_left_between, 2):
        assert after == before
