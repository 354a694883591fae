"""Errors in a thread of the user's that reads ahead reach the loop, with their type."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest

from dynamix.errors import DynamixError
from dynamix.window import Bounds, Window
from tests.ranks import run_ranks
from tests.runtime.check.loops import Job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(90)]


def _read_in_a_thread(rank: int) -> tuple[str, str, int]:
    """The reader's error, the loop's, and after how many steps. The thread hands nothing on but the end."""
    job = Job(rank)
    job.wrap()
    if rank == 0:
        policy: Any = job.controller.policy
        asked, decide = [0], policy.decide

        def fail(window: Window, bounds: Bounds) -> Any:
            asked[0] += 1
            if asked[0] == 2:
                raise ValueError("no such size")
            return decide(window, bounds)

        policy.decide = fail
    ready: queue.Queue[Any] = queue.Queue()
    told = ["", ""]

    def read() -> None:
        try:
            for _ in range(10):
                for batch in job.loader:
                    ready.put(batch)
                    time.sleep(0.01)
        except DynamixError as error:
            told[0] = type(error).__name__
        finally:
            ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        while (batch := ready.get()) is not None:
            job.train(*batch)
            time.sleep(0.04)  # the reader asks for the message first
        job.controller.close()
    except DynamixError as error:
        told[1] = f"{type(error).__name__}: {error}"
    return told[0], told[1], job.steps


def test_what_ends_the_job_in_the_readers_thread_is_raised_in_the_loop() -> None:
    results = run_ranks(_read_in_a_thread, 2, timeout_s=60, group_timeout_s=30)
    assert any(reader for reader, _, _ in results), "no error came to the reader first"
    for _, loop, steps in results:
        assert loop.startswith("DynamixError: the policy failed")
        assert steps < 60
