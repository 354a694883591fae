"""JSON messages, one per line, over a Unix socket between a job's parent and its ranks, across network namespaces."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

from dynamix.errors import WorkerLostError

Message = dict[str, Any]


class JobChannel:
    """One end of the connection. Any thread may call `send`, but only one `receive`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, path: str | Path) -> JobChannel:
        """Connect the worker's end."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(path))
        return cls(connection)

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Keep it small: a full socket buffer blocks."""
        with self._lock:
            self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message, or None after `timeout_s`. Raises `WorkerLostError` if the other end is closed."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            try:
                chunk = self._socket.recv(65536)
            except ConnectionError as error:
                raise WorkerLostError(f"rank 0 and its parent lost their connection ({error})") from error
            if not chunk:
                raise WorkerLostError("rank 0 and its parent lost their connection: one of them ended early")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message

    @property
    def buffered(self) -> bool:
        """Whether a whole message has already been read from the socket, so that no `select` reports it."""
        return b"\n" in self._buffer

    def fileno(self) -> int:
        """The file descriptor of the socket, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class Listener:
    """The parent's end, before ranks have connected.

    backlog   how many may connect at once
    """

    def __init__(self, path: str | Path, *, backlog: int = 1) -> None:
        self.path = Path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(backlog)

    def accept(self, timeout_s: float) -> JobChannel | None:
        """The channel of the next rank that connects, or None after `timeout_s`."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        return JobChannel(self._socket.accept()[0])

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)
