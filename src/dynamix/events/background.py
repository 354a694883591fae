"""Events of a training job: written by their own thread, and never a reason to end the job."""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import stat
import threading
from pathlib import Path
from typing import Any

from dynamix.errors import StateError
from dynamix.events import records
from dynamix.events.records import EVENTS_VARIABLE, cut_unfinished, line_of, require_events, thin

BACKLOG = 1_000  # lines that may wait for a slow disk; further ones are dropped
_log = logging.getLogger("dynamix")


class BackgroundLog:
    """`EventLog` for a training job: `write` returns at once, a thread appends the lines in order.

    A record that cannot be written (disk full, no permission, no such value in JSON) is dropped, counted in `dropped`
    and reported once in the log. Later lines are tried again, and the first one that is written carries `dropped`, the
    count so far. A file or folder that was removed is made again. A file of more than `MOST_BYTES` is thinned. The
    thread starts with the first line.

    >>> log = BackgroundLog("/proc/no/such/folder/events.jsonl")
    >>> log.write(window_index=0)
    >>> log.close(), log.dropped
    (True, 1)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._told = 0  # the value of `dropped` in the last line that had it
        self._warned = False
        self._fd = -1
        self._most_bytes = records.MOST_BYTES
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(BACKLOG)
        self._thread: threading.Thread | None = None

    def write(self, /, **fields: Any) -> None:
        """Append one event, soon. The fields must not be changed afterwards."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="dynamix-events", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(fields)
        except queue.Full:
            self._drop("the disk is too slow")

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write queued lines and end the thread; False if that takes longer. `write` may be called again later."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        thread.join(timeout_s)
        return not thread.is_alive()

    def _serve(self) -> None:
        while (fields := self._lines.get()) is not None:
            try:
                self._append(fields)
            except Exception as error:  # training goes on, whatever the error
                self._drop(str(error) or type(error).__name__)
        self._shut()

    def _append(self, fields: dict[str, Any]) -> None:
        if self.dropped > self._told:
            fields = fields | {"dropped": self.dropped}
        line = line_of(fields)
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            self._shut()  # the file was removed, so lines written to it would be lost
        if self._fd < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut_unfinished(self.path)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                self._claim()
        before = os.fstat(self._fd).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, before)  # otherwise the next line would follow half a line
            raise
        self._told = fields.get("dropped", self._told)
        if before + len(line) > self._most_bytes and stat.S_ISREG(os.fstat(self._fd).st_mode):
            self._thin()

    def _claim(self) -> None:
        """Lock the file while this process writes it, which tells another job that it is in use. Both go on.

        Workers of a loader, which are forked, do not inherit a lock of this kind. If this process opens and closes the
        file elsewhere, the lock is gone, and only the warning is lost.
        """
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "their lines are mixed, and cannot be told apart. Give each job a file of its own"
            _log.warning("dynamix: another job writes %s, too: %s", self.path, fix)
        except OSError:  # a file system without locks
            return

    def _thin(self) -> None:
        try:
            thin(self.path, records.MOST_BYTES)
            self._most_bytes = records.MOST_BYTES
        except (OSError, StateError) as error:  # for example no room for a second file: retry at twice the length
            self._most_bytes *= 2
            _log.warning("dynamix: old windows cannot be removed from %s (%s), so it grows", self.path, error)
        self._shut()

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self._warned:
            self._warned = True
            _log.warning("dynamix: training goes on, but lines are dropped: %s cannot be written (%s)", self.path, why)

    def _shut(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def background_log(path: str | os.PathLike[str] | None) -> BackgroundLog | None:
    """The log of a job's events: in the file of DYNAMIX_EVENTS, else in `path`, else None. As `require_events`."""
    outside = os.environ.get(EVENTS_VARIABLE)
    if not (chosen := outside or path):
        return None
    require_events(Path(chosen), EVENTS_VARIABLE if outside else "events")
    return BackgroundLog(chosen)
