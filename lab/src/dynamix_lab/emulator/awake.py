"""Keeps the machine's processors awake with work of the lowest priority, so that emulated hosts find them warm.

Hosts with a part of a core leave the machine idle between their slices. A virtual machine returns an idle processor,
and may get it again slower (cold caches, a low clock) or late, which varies by the minute (docs/design/emulator.md
explains more). So one process per processor spins, in the scheduling class that runs only if no other process wants to.

It uses the standard library only and runs by path as a separate process. Its argument is its owner's pid. It ends with
its owner, at a byte, or at end of file.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path


def is_virtual(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine is virtual. On a real one spinning heats it, and may slow a sibling core."""
    try:
        return " hypervisor" in cpuinfo.read_text()
    except OSError:
        return False


def turn(processor: int, helper: int) -> None:
    """Keep `processor` busy while `helper` is the parent. Raises `OSError` if the class or processor is refused."""
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == helper:
        for _ in range(100_000):
            pass


def main(owner: int) -> None:
    """Start one such child for every processor that this process may use."""
    helper, children = os.getpid(), []
    _weigh_least()
    for processor in sorted(os.sched_getaffinity(0)):
        children.append(os.fork())
        if not children[-1]:
            with contextlib.suppress(OSError):
                turn(processor, helper)
            os._exit(0)
    while os.getppid() == owner and not select.select([0], [], [], 1.0)[0]:
        pass  # no end of file comes if a child that the owner forked holds the pipe open
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _weigh_least() -> None:
    """Lower the session's weight. With autogroup that weight counts, not the class of its processes."""
    for _ in range(20):
        try:
            Path("/proc/self/autogroup").write_text("19")
            return
        except BlockingIOError:  # the kernel allows one change in 0.1 s, for all users together
            time.sleep(0.15)
        except OSError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
