"""Limits processes to a share of the CPU without privileges, by SIGSTOP and SIGCONT.

Every group of processes has a bucket of CPU time. It fills at the group's share, up to one period. The group's CPU time
is taken out (measured by each process's CPU clock, so waiting costs nothing, as under a real quota). Below zero the
group is stopped, and it continues once the bucket is no longer empty. Overshoot is debt, so the share holds on average
even if signals are late.

It uses the standard library only and runs by path as a separate process, so that the owner's interpreter lock does not
delay it. It reads lines `GROUP_PID CORES` (CORES 0 lifts the limit). At end of file, or with its owner, whose pid is
its argument, it lets everything run and ends.
"""

import contextlib
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

PERIOD_S = 0.010
TICK_S = 0.001
_LOOK_AGAIN_S = 0.25


@dataclass
class ThrottledGroup:
    """The processes of one process group, and its bucket."""

    pid: int
    cores: float
    bucket_s: float = 0.0
    stopped: bool = False
    used_s: dict[int, float] = field(default_factory=dict)

    def tick(self, elapsed_s: float) -> None:
        """Account for `elapsed_s` seconds, and stop or continue the group."""
        spent = 0.0
        for pid, before in list(self.used_s.items()):
            now = _cpu_time_s(pid)
            if now is None:
                del self.used_s[pid]
            else:
                spent += max(0.0, now - before)
                self.used_s[pid] = now
        self.bucket_s = min(self.bucket_s + self.cores * elapsed_s, self.cores * PERIOD_S) - spent
        if self.bucket_s < 0 or self.stopped:
            self.signal(stop=self.bucket_s < 0)  # stop it every time: another process may have continued it

    def signal(self, *, stop: bool) -> None:
        """Stop or continue the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGSTOP if stop else signal.SIGCONT)
        self.stopped = stop


def _cpu_time_s(pid: int) -> float | None:
    try:
        # CPUCLOCK_SCHED of another process: what clock_getcpuclockid(3) returns, in nanoseconds.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


def look_for_members(groups: dict[int, ThrottledGroup]) -> None:
    """Find the processes that joined a group since the last look (workers of a data loader)."""
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError, IndexError):
            group = groups.get(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[2]))
            if group is not None:
                group.used_s.setdefault(pid, _cpu_time_s(pid) or 0.0)


def obey(line: str, groups: dict[int, ThrottledGroup]) -> None:
    """Execute one line of the owner."""
    first, second = line.split()
    pid, cores = int(first), float(second)
    if cores > 0:
        groups.setdefault(pid, ThrottledGroup(pid, cores)).cores = cores
    elif (group := groups.pop(pid, None)) and group.stopped:
        group.signal(stop=False)


def main(owner: int) -> None:
    """Run until standard input or the owner ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(-10)
    groups: dict[int, ThrottledGroup] = {}
    pending, looked, last = b"", 0.0, time.monotonic()
    while os.getppid() == owner:  # no end of file comes if a child that the owner forked holds the pipe open
        if select.select([0], [], [], TICK_S if groups else 1.0)[0]:
            chunk = os.read(0, 65536)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                obey(line.decode(), groups)
            looked = 0.0
        now = time.monotonic()
        if now - looked > _LOOK_AGAIN_S:
            look_for_members(groups)
            looked = now
        for group in groups.values():
            group.tick(now - last)
        last = now
    for group in groups.values():
        group.signal(stop=False)


if __name__ == "__main__":
    main(int(sys.argv[1]))
