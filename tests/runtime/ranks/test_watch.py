"""The watch of ranks, driven by a clock of the test's: nobody sleeps."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from dynamix.errors import UsageError, WorkerLostError
from dynamix.runtime.ranks.errors import UNTRAINED
from dynamix.runtime.ranks.liveness import LATE_S, SUSPECT_S
from dynamix.runtime.ranks.watch import BESIDE_S, CLOSED, GONE_S, RUNS, WAITS, AbortableWait, RankWatch


class Three:
    """Three ranks over one store; a second goes by where the test says so."""

    def __init__(self) -> None:
        self.now, store = 0.0, HashStore()
        self.every = [RankWatch(store, rank, 3, clock=lambda: self.now, threads=False) for rank in range(3)]
        self.closed = set[int]()

    def close(self, rank: int) -> None:
        """The rank closes its controller: one more beat, with which it says so."""
        self.every[rank].alive.leave(CLOSED)
        self.every[rank].beat()
        self.closed.add(rank)

    def wait(self, wait: Any) -> None:
        """A quarter of a second goes by in `wait`."""
        self.now += 0.25
        for watch in self.every:
            if watch.rank not in self.closed:
                watch.beat()
                watch.listen()
        wait.look()

    def pass_s(self, seconds: int, *, without: int | None = None) -> None:
        """`without` this rank, which stands still."""
        for _ in range(seconds):
            self.now += 1.0
            for awake in (watch for watch in self.every[::-1] if watch.rank not in {without, *self.closed}):
                awake.beat()
                awake.listen()


def test_a_rank_that_stands_still_is_known_to_all_and_accuses_nobody() -> None:
    three = Three()
    three.pass_s(3)
    three.pass_s(int(SUSPECT_S) + 3, without=2)
    assert [sorted(watch.alive.silent) for watch in three.every] == [[2], [2], []]
    three.pass_s(2)
    assert not any(watch.alive.silent for watch in three.every)


def test_the_first_rank_is_missed_by_the_others() -> None:
    three = Three()
    three.pass_s(3)
    three.pass_s(int(SUSPECT_S) + 2, without=0)
    assert [sorted(watch.alive.silent) for watch in three.every] == [[], [0], [0]]
    lost = three.every[1].explain(RuntimeError("closed"), "the ranks could not add")
    assert lost.ranks == (0,)


def test_a_rank_that_never_comes_is_missed_while_controllers_are_made_and_not_after() -> None:
    three = Three()
    three.every[1].all_have_come()
    three.pass_s(int(LATE_S) + 3, without=2)
    three.every[1].require_all_come()
    with pytest.raises(WorkerLostError, match="not all ranks have made a Controller: rank 2 has been silent"):
        three.every[0].require_all_come()


def test_an_error_of_one_rank_reaches_all_and_it_hears_that_they_know() -> None:
    three = Three()
    three.pass_s(2)
    three.every[1].end(UsageError("write this line"))
    three.pass_s(4)
    for rank in (0, 2):
        with pytest.raises(UsageError, match="rank 1 ended the job: write this line"):
            AbortableWait(three.every[rank]).look()
    assert three.every[1].errors.all_know


def _waits(three: Three, rank: int, seconds: int) -> None:
    wait: Any = AbortableWait(three.every[rank])
    for _ in range(4 * seconds):
        three.wait(wait)


def test_who_waits_beside_an_agreement_that_it_did_not_join_is_told_in_seconds() -> None:
    three = Three()
    three.every[0].errors.agreeing("controller.warm_up()")
    with pytest.raises(UsageError, match=r"another rank waits in controller.warm_up\(\), which this rank did not call"):
        _waits(three, 2, int(BESIDE_S) + 2)
    assert BESIDE_S < three.now < BESIDE_S + 2


def test_a_batch_that_one_rank_left_out_is_named_whatever_the_others_wait_in() -> None:
    for meanwhile in (None, "controller.warm_up()"):
        three = Three()
        three.every[0].errors.agreeing(UNTRAINED)
        if meanwhile is not None:
            three.every[2].errors.agreeing(meanwhile)
        with pytest.raises(UsageError, match=r"no forward pass.*: train each batch on all ranks or on none"):
            _waits(three, 2, int(BESIDE_S) + 2)


@pytest.mark.parametrize("closed", range(3))
def test_who_waits_for_a_rank_that_has_closed_its_controller_is_told(closed: int) -> None:
    three = Three()
    three.pass_s(2)
    three.close(closed)
    three.pass_s(8)
    began, waiting = three.now, (closed + 1) % 3
    with pytest.raises(WorkerLostError, match=rf"rank {closed} .* has ended \(its controller was closed\)"):
        _waits(three, waiting, int(GONE_S) + 2)
    assert GONE_S < three.now - began < GONE_S + 2


def test_a_rank_that_left_after_its_part_of_a_long_exchange_is_not_missed() -> None:
    three = Three()
    wait: Any = AbortableWait(three.every[0])
    for quarter in range(4 * 35):  # as long as nearly twice the exchange until one of them is done and leaves
        if quarter == 4 * 18:
            three.close(2)
        three.wait(wait)


def test_a_rank_that_stands_still_after_a_wait_is_not_said_to_wait() -> None:
    for still in range(3):
        three, seen = Three(), list[str]()
        other = three.every[(still + 1) % 3]
        three.pass_s(3)
        three.every[still].hurry(1.5)
        three.pass_s(1)
        other.also_look(lambda places, seen=seen: (seen.append(places), (True, None))[1])  # type: ignore[misc]
        three.pass_s(8, without=still)
        assert WAITS in {places[still] for places in seen[:3]}
        assert {places[still] for places in seen[4:]} == {RUNS}
