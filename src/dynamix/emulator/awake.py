"""Keeps the machine's processors awake with work of the lowest kind, so that emulated hosts find them warm.

Hosts with a part of a core leave the machine idle between their slices. A virtual machine gives an idle processor
back, and gets it again slower: with cold caches, a low clock, sometimes late, and all of that changes by the minute.
(docs/design/emulator.md has what it did to repeated runs.) So one process per processor turns for nothing, of the
class that runs only when nobody else wants to.

Standard library only, run by path as a process of its own. Ends at end of file, or with its owner.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path


def keep_awake(processor: int) -> None:
    """Turns on `processor` until the parent is gone; at once if this kernel has no such class."""
    parent = os.getppid()
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


def main() -> None:
    """One such child for every processor that this process may use."""
    if not hasattr(os, "SCHED_IDLE"):
        return
    # Where a session is scheduled as one (autogroup), its weight counts, not its processes' class.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    children = []
    for processor in sorted(os.sched_getaffinity(0)):
        child = os.fork()
        if not child:
            with contextlib.suppress(OSError):
                keep_awake(processor)
            os._exit(0)
        children.append(child)
    owner = os.getppid()
    while os.getppid() == owner and not select.select([0], [], [], 1.0)[0]:
        pass  # a forked child of the owner may hold the pipe open for ever
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
