"""Lets a job tell the surrounding emulation that its measured part begins.

Processes start without limits, because importing torch on a sixth of a core takes longer than many jobs. A job that
knows when its own set-up ends announces it over a Unix socket, which works across network namespaces:

    from dynamix_lab.emulator import control
    control.request("throttle")       # limits on
    control.request("start-clock")    # limits on, and the disturbances begin again at 0 s
    control.request("unthrottle")     # limits and disturbances off

Each returns when it is in force. Outside an emulation it does nothing and returns False.
"""

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from dynamix.errors import ConfigError, EmulationError

VARIABLE = "DYNAMIX_EMULATOR_CONTROL"
COMMANDS = ("throttle", "unthrottle", "start-clock")


def request(command: str, *, timeout_s: float = 10.0) -> bool:
    """Ask the surrounding emulation. True when done, False outside an emulation. Raises `EmulationError` if refused.

    >>> request("throttle")
    False
    """
    if command not in COMMANDS:
        raise ConfigError("command", command, ", ".join(COMMANDS), "correct the command")
    path = os.environ.get(VARIABLE)
    if not path:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(command.encode() + b"\n")
            answer = connection.recv(4096).decode()
    except OSError as error:
        raise EmulationError(f"the emulation does not answer to {command!r} ({error}); has its owner ended?") from error
    if answer != "ok":
        raise EmulationError(f"the emulation refused {command!r}: {answer or 'no answer'}")
    return True


class ControlServer:
    """Listens on a Unix socket in a private folder and executes requests one after another."""

    def __init__(self, folder: Path, actions: Mapping[str, Callable[[], object]]) -> None:
        self._actions, self._folder = dict(actions), folder
        self._folder.mkdir(mode=0o700)
        self.path = str(self._folder / "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._serve, name="dynamix-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread blocked in accept
        self._thread.join(timeout=5.0)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(2.0)
                connection.sendall(self._answer(connection.makefile().readline().strip()).encode())

    def _answer(self, command: str) -> str:
        if command not in self._actions:
            return f"unknown command {command!r}"
        try:
            self._actions[command]()
        except Exception as error:
            return str(error) or type(error).__name__
        return "ok"
