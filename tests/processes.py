"""Runs commands of this machine and brings back what they printed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

Done = subprocess.CompletedProcess[str]
ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # for ranks of this machine
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def call(*arguments: object, timeout_s: float = 120, env: dict[str, str] | None = None, **options: Any) -> Done:
    """`python ARGUMENTS`, however it ends. `env` is put over this process's."""
    command, around = [sys.executable, *map(str, arguments)], {**os.environ, **(env or {})}
    pipes = {"capture_output": True, "text": True, **options}
    return subprocess.run(command, check=False, timeout=timeout_s, env=around, **pipes)


def run(*arguments: object, **options: Any) -> Done:
    """The same, which must end with 0."""
    done = call(*arguments, **options)
    assert done.returncode == 0, (done.stdout or "")[-3000:] + (done.stderr or "")[-3000:]
    return done
