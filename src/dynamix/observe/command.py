"""Runs a user's command to its end, and reports on it meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

from dynamix.errors import ConfigError

Job = subprocess.Popen[bytes]


def check_command(command: Sequence[str], name: str) -> None:
    """Raise `ConfigError` for a command that `dynamix NAME` cannot start, before any file is made."""
    line = f"dynamix {name} -- torchrun --nproc-per-node 4 {' '.join(command) or 'train.py'}"
    if not command:
        raise ConfigError("command", "", "a program and its arguments", f"write {line}")
    if command[0].endswith(".py") and not os.access(command[0], os.X_OK):
        raise ConfigError("command", command[0], "a program, such as torchrun", f"write {line}")
    if shutil.which(command[0]) is None:
        raise ConfigError("command", command[0], "a program that can be started", "check its name")


def run_command(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    every_s: float | None = None,
    tell: Callable[[Job], object] = lambda job: None,
) -> int:
    """Run `command`; returns its exit code, 128 + n for signal n. SIGTERM is passed on to it.

    tell   called every `every_s` seconds meanwhile; never if that is None

    Raises `ConfigError` if the command cannot be started.
    """
    try:
        job = subprocess.Popen(command, env=dict(env))
    except OSError as error:
        raise ConfigError("command", command[0], "a program that can be started", str(error.strerror)) from error
    own = threading.current_thread() is threading.main_thread()  # only the main thread may handle signals
    before = signal.signal(signal.SIGTERM, lambda number, _: job.send_signal(number)) if own else None
    try:
        with job:
            code = _followed(job, every_s, tell)
    finally:
        if own:
            signal.signal(signal.SIGTERM, before)
    return 128 - code if code < 0 else code


def _followed(job: Job, every_s: float | None, tell: Callable[[Job], object]) -> int:
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # from the terminal, which also sent it to the job
            try:
                return job.wait(every_s)
            except subprocess.TimeoutExpired:
                tell(job)
