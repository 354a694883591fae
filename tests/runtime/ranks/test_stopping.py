"""Ranks stop after the same step, whenever they hear of it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from dynamix.runtime.ranks.stopping import Stopping


def _alive() -> None:
    pass


@pytest.mark.parametrize("seed", range(3))
def test_all_stop_after_the_same_step_however_late_they_hear(seed: int) -> None:
    """Ranks step together, as a barrier makes them; what they hear and tell is late at random, by up to many steps."""
    random = np.random.default_rng(seed)
    workers, ranks = 4, [Stopping() for _ in range(4)]
    barrier, stopped = threading.Barrier(workers), [0] * workers

    def train(rank: int) -> None:
        for step in range(1, 100_000):
            barrier.wait(60)
            if ranks[rank].reached(step, _alive):
                stopped[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(workers)]
    for thread in threads:
        thread.start()
    ranks[int(random.integers(workers))].want()
    beats = [rank.beat() for rank in ranks]
    deadline = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        for rank in random.permutation(workers):
            if random.random() < 0.5:
                beats[rank] = ranks[rank].beat()
            if rank and random.random() < 0.5:
                ranks[rank].follow(ranks[0].proposal())
        beats[0] = ranks[0].beat()
        ranks[0].lead(beats, time.monotonic())
        time.sleep(float(random.random()) * 0.01)
    assert len(set(stopped)) == 1
    assert stopped[0] > 0


def test_waiting_for_an_answer_ends_where_a_rank_is_lost() -> None:
    stopping = Stopping()
    stopping.follow((1, 5, False))

    def lost() -> None:
        raise TimeoutError("nobody answers")

    assert not stopping.reached(4, lost)
    with pytest.raises(TimeoutError):
        stopping.reached(5, lost)
