"""Traces in a real TCPStore: processes see each other's, and training goes on when the store hangs or dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore, TCPStore

from dynamix.policies.stigmergic.field import Decay
from dynamix.runtime.trace_store import StoreField


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))


def stop(pid: int) -> None:
    """Stop a process, and wait until all of its threads have: the signal alone may find one still answering."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        if set(states) == {"T"}:
            return
        time.sleep(0.005)
    raise AssertionError(f"{pid} did not stop")


@pytest.mark.multiproc
def test_a_store_that_hangs_or_dies_never_stops_training(store_server: tuple[int, int]) -> None:
    pid, port = store_server
    mine, other = (StoreField(connect(port), 2, Decay(start=0.0), patience_s=20) for _ in range(2))
    mine.deposit([0], step=1)
    assert mine.read([0], step=1)[0] == pytest.approx(0.1, rel=1e-4)
    other.deposit([0], 2.0, step=1)
    assert other.read([0], step=1)[0] == pytest.approx(0.3, rel=1e-4)

    stop(pid)
    mine.patience_s, started = 0.2, time.perf_counter()
    for step in range(2, 60):
        mine.deposit([1], step=step)
        assert np.isnan(mine.read([0, 1], step=step)).all()
    assert time.perf_counter() - started < 10  # one wait, not one per step

    os.kill(pid, signal.SIGCONT)
    mine.patience_s, deadline = 20, time.monotonic() + 30
    while np.isnan(seen := mine.read([0, 1], step=60)).any() and time.monotonic() < deadline:
        time.sleep(0.05)
    np.testing.assert_allclose(seen[0], 0.3 * 0.95**59, rtol=1e-3)
    assert seen[1] > 1

    os.kill(pid, signal.SIGKILL)
    started = time.perf_counter()
    while mine.alive and time.perf_counter() - started < 30:
        mine.deposit([0], step=61)
        mine.read([0], step=61)
    assert not mine.alive
    assert time.perf_counter() - started < 15  # nobody waits `patience_s` for an answer that cannot come
    assert mine.reason is not None
    assert np.isnan(mine.read([0], step=62)).all()
    mine.close()
    other.close()
    assert not mine._thread.is_alive()


def test_counters_that_exist_are_read_in_one_request() -> None:
    class Counted(HashStore):
        adds = 0

        def add(self, key: str, amount: int) -> int:
            self.adds += 1
            return int(super().add(key, amount))

    field = StoreField(Counted(), 3, Decay(alpha=0.5, start=0.0, beta=1.0), patience_s=20)
    store = field._store  # its own connection
    assert isinstance(store, Counted)
    assert field.read([0, 1, 2], step=0).tolist() == [0, 0, 0]  # makes them
    assert store.adds == 3
    field.deposit([0, 2], [1.0, 3.0], step=0)
    assert field.read([0, 1, 2], step=0).tolist() == [1, 0, 3]
    assert store.adds == 5  # the two deposits
    field.close()


def test_concurrent_deposits_of_many_workers_all_count() -> None:
    store = HashStore()
    fields = [StoreField(store, 1, Decay(alpha=0.05, beta=1.0, start=0.0), patience_s=30) for _ in range(4)]

    def work(field: StoreField) -> None:
        for step in range(1, 51):
            field.deposit([0], step=step)
        field.read([0], step=50)  # after its own deposits

    threads = [threading.Thread(target=work, args=(field,)) for field in fields]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fields[0].read([0], step=50)[0] == pytest.approx(4 * (1 - 0.95**50) / 0.05, rel=1e-4)
    for field in fields:
        field.close()


def test_old_counters_are_removed_and_unknown_deposits_left_out() -> None:
    store = HashStore()
    field = StoreField(store, 1, Decay(alpha=0.5, start=0.0), patience_s=30)
    for step in range(1, 200):
        field.deposit([0], [float("nan") if step % 2 else 1e9], step=step)
    assert field.read([0], step=199)[0] == pytest.approx(64 * 0.1 * 2 / 3, rel=1e-3)
    assert store.num_keys() <= 6
    field.close()
    assert np.isnan(field.read([0], step=200)).all()
