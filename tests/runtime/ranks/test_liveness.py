"""Who has ended, and who is silent: named on every rank, in seconds; and nothing is left of a controller."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import dynamix
from dynamix.errors import WorkerLostError
from dynamix.runtime.ranks.liveness import SILENT_S
from dynamix.runtime.ranks.process_groups import _kept
from dynamix.runtime.ranks.watch import RankWatch
from tests.ranks import Ok, run_ranks
from tests.runtime.jobs import Training, adaptive, classes

pytestmark = pytest.mark.multiproc


def _used() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _many_controllers(rank: int, controllers: int) -> list[tuple[int, int, int]]:
    used = []
    for i in range(controllers):
        job = Training(
            adaptive(("dynamix", "stigmergic")[i % 2], 2, interval=1),
            classes(16),
            weighting="loss" if i % 5 == 0 else "hook",
        )
        for x, y in job.loader:
            loss = job.loss(x, y)
            (job.controller.weight(loss, count=float(len(x))) if i % 5 == 0 else loss).backward()
            job.finish(loss=loss)
        job.controller.close()
        job.controller.close()
        del job, loss
        used.append((*_used(), _native_threads()))
    assert not _kept
    return used


def test_many_controllers_leave_no_thread_and_no_descriptor() -> None:
    """Python threads, descriptors, threads of the process."""
    for used in run_ranks(_many_controllers, 2, 14, timeout_s=200):
        early = map(max, zip(*used[3:8], strict=True))  # a thread of the system's may take a while to end
        late = map(min, zip(*used[-3:], strict=True))
        assert all(last <= most for last, most in zip(late, early, strict=True)), used


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))


def _train(rank: int, fault: str, buffers: bool) -> dict[str, Any]:
    """Trains until something ends it: `fault` of rank 1 (of rank 0: `fault` with a 0), at step 10."""
    log = _Lines()
    logging.getLogger("dynamix").addHandler(log)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if buffers else nn.ReLU(), nn.Linear(8, 3))
    job = Training(adaptive("static", 2, interval=5), classes(600 if fault == "pause" else 4000), net)
    error: Exception | None = None
    steps, last = 0, time.monotonic()
    faulty = rank == (0 if fault.endswith("0") else 1)
    try:
        for x, y in job.loader:
            job.train(x, y)
            steps, last = steps + 1, time.monotonic()
            time.sleep(0.02)
            if job.controller.stopping:
                break
            if steps == 10 and faulty:
                _suffer(job.controller, fault)
    except (WorkerLostError, ValueError) as caught:
        error = caught
        job.controller.close()  # here it sees the error
    else:
        job.controller.close()
    ended_s = time.monotonic() - last
    return {"error": error, "steps": steps, "ended_s": ended_s, "log": [(t - last, line) for t, line in log.lines]}


def _suffer(controller: dynamix.Controller, fault: str) -> None:
    if fault.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.startswith("raise"):
        raise ValueError("a bug in the loop")
    elif fault == "terminate":
        signal.signal(signal.SIGTERM, lambda *_: controller.request_stop())
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault == "pause":
        later = f"import os, signal, time; time.sleep({SILENT_S + 2}); os.kill({os.getpid()}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-c", later])
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(("fault", "buffers"), [("kill0", True), ("raise", False)])
def test_every_rank_names_the_one_that_ended(fault: str, buffers: bool) -> None:
    lost = 0 if fault.endswith("0") else 1
    outcomes = run_ranks(_train, 3, fault, buffers, timeout_s=100, group_timeout_s=30, expect_failure=True)
    for rank, outcome in enumerate(outcomes):
        if rank == lost:
            assert fault.startswith("raise") or outcome == "died with exit code -9"
            continue
        assert isinstance(outcome, Ok), outcome
        error = outcome.value["error"]
        assert isinstance(error, WorkerLostError), outcome.value
        assert error.ranks == (lost,)
        assert f"rank {lost} (" in str(error)
        assert socket.gethostname() in str(error)
        assert "has been silent for" in str(error) or "ValueError: a bug in the loop" in str(error)
        assert ("a bug in the loop" in str(error)) == fault.startswith("raise"), error
        assert outcome.value["ended_s"] < 40


def test_a_rank_that_stands_still_is_named_in_every_log_and_training_goes_on() -> None:
    ended = run_ranks(_train, 3, "pause", False, timeout_s=150, group_timeout_s=60)
    for rank, one in enumerate(ended):
        assert one["error"] is None
        assert one["steps"] == ended[0]["steps"] > 60
        lines = [line for _, line in one["log"]]
        if rank != 1:
            assert any(line.startswith("dynamix: rank 1 (") and "has been silent for" in line for line in lines), lines
            assert any(line.startswith("dynamix: rank 1 (") and "answers again" in line for line in lines), lines


def test_one_rank_asked_to_stop_stops_all_after_the_same_step() -> None:
    ended = run_ranks(_train, 3, "terminate", False, timeout_s=100)
    assert len({one["steps"] for one in ended}) == 1
    assert 10 < ended[0]["steps"] < 600, "nobody stopped"
    assert all(one["error"] is None for one in ended)


class _Cable:
    """Leads to a store on this machine through a port of its own."""

    def __init__(self, port: int) -> None:
        self._far, self._ends = port, list[socket.socket]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._on(self._serve)

    def pull(self, *, for_good: bool = False) -> None:
        """Break every connection through it."""
        if for_good:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            self._server.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._far))
                self._ends += [near, far]
                self._on(self._pass_on, near, far)
                self._on(self._pass_on, far, near)

    def _on(self, work: Any, *given: Any) -> None:
        threading.Thread(target=work, args=given, daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError), one:
            while some := one.recv(4096):
                other.sendall(some)
            other.shutdown(socket.SHUT_RDWR)


def _heard(one: RankWatch, seconds: float) -> list[int]:
    """How many beats of rank 0 `one` had read, every half a second."""
    return [(time.sleep(0.5), one.alive.news)[1] for _ in range(int(2 * seconds))]


@pytest.mark.timeout(60)
def test_a_broken_connection_to_the_store_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cable = _Cable(store.port)
    first = RankWatch(store, 0, 2)
    second = RankWatch(dist.TCPStore("127.0.0.1", cable.port, is_master=False), 1, 2)
    first.all_have_come()
    second.all_have_come()
    try:
        _heard(second, 1.5)
        cable.pull()
        heard = _heard(second, 4.0)
        assert heard[-1] > heard[4], heard
        assert not first.alive.silent
        assert not second.alive.silent
        assert not first.alive.left
        assert not caplog.records
        cable.pull(for_good=True)
        _heard(second, 1.0)
    finally:
        began = time.monotonic()
        second.leave()
        assert time.monotonic() - began < 3
        first.leave()
    assert not caplog.records


def test_a_single_process_stops_at_its_next_step() -> None:
    job = Training(dynamix.Controller("static", batch_size=4, global_batch="adaptive"), classes(40))
    stopped = []
    for x, y in job.loader:
        if len(stopped) == 3:
            job.controller.request_stop()
        job.train(x, y)
        stopped.append(job.controller.stopping)
    assert stopped == [False] * 3 + [True] * 7
