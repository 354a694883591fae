"""Loops that training scripts have, under every way of meeting: exact, or ended with the line to write."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dynamix.runtime.sync import stray
from tests.ranks import run_ranks
from tests.runtime.check import common_loops as loops
from tests.runtime.sync.one_loop import WAYS, Case, Loop, compared, ended

pytestmark = pytest.mark.multiproc

# What is wrong where workers step apart, and how they meet where it is tried.
COLLECTIVES = (
    (loops.logs_every_batch, "auto"),
    (loops.logs_before_its_step, "parameters"),
    (loops.logs_in_a_group_of_its_own, "auto"),
    (loops.waits_every_few_batches, "parameters"),
    (loops.logs_on_unlike_batches, "parameters"),
)
COUNTS = (
    (loops.saves_every_few_batches, "parameters"),
    (loops.leaves_after_so_many_batches, "auto"),
    (loops.stops_early_by_its_own_count, "parameters"),
)
SOON_S = 8.0


@pytest.mark.parametrize("meet", WAYS)
def test_loops_that_ask_where_all_meet_train_the_same_bits_as_under_piece(meet: str) -> None:
    asked = {name: (loop, Case(meet=meet, optimizer="adamw", epochs=1)) for name, loop in loops.SERVED.items()}
    if meet == "gradients":
        asked |= {loop.__name__: (loop, Case(meet=meet, epochs=2)) for loop, _ in (*COLLECTIVES[:-1], *COUNTS)}
    for told in run_ranks(compared, 2, asked, timeout_s=100):
        assert {name: differs for name, (differs, _, _) in told.items() if differs} == {}
        assert [*told] == [*asked]


def _ended(rank: int, loop: Loop, case: Case) -> tuple[str, float]:
    stray.BESIDE_S = 1.5  # of ranks that are in unlike collectives none comes late here
    return ended(rank, loop, case)


def _end_soon(loop: Loop, case: Case, words: Sequence[str]) -> None:
    for said, seconds in run_ranks(_ended, 2, loop, case, timeout_s=40):
        assert all(word in said for word in words), said
        assert seconds < SOON_S, said


@pytest.mark.parametrize(("loop", "meet"), COLLECTIVES)
def test_collectives_between_meetings_end_all_ranks_with_the_line_to_write(loop: Loop, meet: str) -> None:
    _end_soon(loop, Case(meet=meet), ["if controller.met"])


@pytest.mark.parametrize(("loop", "meet"), COUNTS)
def test_what_is_counted_in_batches_ends_all_ranks_with_the_line_to_write(loop: Loop, meet: str) -> None:
    _end_soon(loop, Case(meet=meet), ["controller.checkpoint_due(every="])


@pytest.mark.parametrize(
    ("meet", "words"),
    [
        ("gradients", "accumulate="),
        ("parameters", "with meet='parameters' call optimizer.step()"),
        ("auto", "optimizer.zero_grad()"),
    ],
)
def test_batches_that_accumulate_by_hand_end_all_ranks_with_the_line_to_write(meet: str, words: str) -> None:
    _end_soon(loops.accumulates_by_hand, Case(meet=meet), [words])
