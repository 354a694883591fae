"""A thread of a channel's own, so that no training step waits for what decides."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger("dynamix")


class InTurn:
    """Runs what it is given, one after the other. The thread begins with the first."""

    def __init__(self, name: str) -> None:
        self._name, self._thread = name, None
        self._given: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    _thread: threading.Thread | None

    def run(self, work: Callable[[], None]) -> None:
        """Let `work` run once all before it has."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._given.put(work)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; False if it is busy even after `timeout_s`."""
        done = threading.Event()
        if self._thread is not None:
            self._given.put(done.set)
        return self._thread is None or done.wait(timeout_s)

    def end(self, timeout_s: float) -> None:
        """Drain, and end the thread, if it is not busy even then."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._given.put(None)
            thread.join(timeout_s)

    def _serve(self) -> None:
        while (work := self._given.get()) is not None:
            write_down(work)
            del work  # or an idle thread would hold a process group's work


def write_down(write: Callable[[], None]) -> None:
    """What follows a decision: the answer is out, and training goes on by it, whatever becomes of this."""
    try:
        write()
    except Exception:
        _log.warning("what follows a decision has failed; training goes on", exc_info=True)
