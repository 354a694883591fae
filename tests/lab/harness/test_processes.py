"""Pieces of a suite in processes of their own: one that is killed ends the others, and all end with who asked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

from dynamix.errors import WorkerLostError
from dynamix_lab.harness.processes import in_processes
from tests.refused import refused


def test_a_piece_that_is_killed_ends_the_others() -> None:
    # The other piece would take longer than a test may.
    refused(WorkerLostError, "killed", list, in_processes(_killed, {"a": (0.0,), "b": (1e3,)}, 2))
    refused(WorkerLostError, "killed", list, in_processes(_killed, {"b": (1e3,), "a": (0.0,)}, 2))
    assert not multiprocessing.active_children()


def _killed(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def test_pieces_end_with_whoever_asked_for_them() -> None:
    pieces = in_processes(time.sleep, {"short": (0.0,), "long": (1e3,)}, 2)
    assert next(pieces) == ("short", None)
    pieces.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
