"""The watch of a loop's own collectives beside everything else that a process does."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch.distributed as dist

from dynamix.runtime.ranks.watch import RUNS
from dynamix.runtime.sync.stray import StrayCollectives
from tests.ranks import run_ranks


class Cycle:
    """Garbage that starts a thread when it is collected, as a controller that was never closed does."""

    def __init__(self) -> None:
        self.itself = self
        weakref.finalize(self, lambda: threading.Thread(target=str).start())


def _watched_among_garbage(rank: int) -> bool:
    stray, before = StrayCollectives(dist.group.WORLD), gc.get_threshold()
    gc.set_threshold(1)
    for _ in range(2000):
        Cycle()
        stray.look_beside(RUNS)
    gc.set_threshold(*before)
    gc.disable()
    stray.look_beside(RUNS)
    return gc.isenabled()


@pytest.mark.multiproc
def test_it_does_not_hang_if_garbage_starts_threads_and_leaves_the_collector_as_it_was() -> None:
    assert run_ranks(_watched_among_garbage, 1, timeout_s=40) == [False]
