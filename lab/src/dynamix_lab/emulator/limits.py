"""CPU limits per host: control groups if permitted, else a duty cycle of signals.

A `Limiter` has named groups of processes, each with a number of cores or no limit. All implementations behave alike,
but differ in accuracy.
"""

import contextlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Protocol

from dynamix.errors import EmulationError
from dynamix_lab.emulator import duty, keeper

PERIOD_S = 0.010
_LEAST_QUOTA_S = 0.001  # the kernel refuses less
LEAST_CORES = 0.001  # so that a period is at most one second, the kernel's maximum
_WEIGHT = 16
CGROUP_ROOT = Path("/sys/fs/cgroup")


class Limiter(Protocol):
    """Named groups of processes, and how many cores each may use."""

    mechanism: str

    def attach(self, group: str, pid: int) -> None:
        """Move process `pid` and its later children into `group`."""

    def limit(self, group: str, cores: float | None) -> None:
        """Limit `group` to `cores`. Infinity: as much as it wants, before other jobs. None lifts the limit."""

    def close(self) -> None:
        """Lift every limit and remove what was created. Processes must have ended."""


def quota_and_period_us(cores: float) -> tuple[int, int]:
    """Microseconds of CPU per period. The period is 10 ms, longer only if the quota would fall below 1 ms.

    The minimum is 0.001 core.

    >>> quota_and_period_us(0.17), quota_and_period_us(0.05)
    ((1700, 10000), (1000, 20000))
    """
    cores = max(cores, LEAST_CORES)
    period_s = max(PERIOD_S, _LEAST_QUOTA_S / cores)
    return max(1000, round(cores * period_s * 1e6)), math.ceil(round(period_s * 1e6, 3))


class Cgroup:
    """CPU quotas by control groups `<root>/<instance>/<group>`, version 1 (CFS quota) or 2 (cpu.max)."""

    def __init__(self, root: Path, version: int, instance: str) -> None:
        self.mechanism = f"cgroup-v{version}"
        self._version, self._top = version, root / instance
        self._groups: set[str] = set()
        try:
            self._top.mkdir()
            if version == 2:
                (self._top / "cgroup.subtree_control").write_text("+cpu")
        except OSError as error:
            self.close()
            why = f"cannot make the control group {self._top} ({error.strerror})"
            raise EmulationError(f"{why}; run as root, or ask for mechanism='duty-cycle'") from error

    def attach(self, group: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            (self._folder(group) / "cgroup.procs").write_text(str(pid))

    def limit(self, group: str, cores: float | None) -> None:
        folder = self._folder(group)
        # The whole emulation competes as one group, because with one process's weight another job would slow all hosts.
        # Without limits it must not, because its ranks would starve their own owner.
        weight, usual = ("cpu.weight", 100) if self._version == 2 else ("cpu.shares", 1024)
        (self._top / weight).write_text(str(usual if cores is None else usual * _WEIGHT))
        quota, period = ("max", None) if cores in (None, math.inf) else quota_and_period_us(cores)
        if self._version == 2:
            (folder / "cpu.max").write_text(f"{quota} {period}" if period else "max")
            return
        if period:
            (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota) if period else "-1")

    def close(self) -> None:
        for folder in (*(self._top / group for group in self._groups), self._top):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._groups.clear()

    def _folder(self, group: str) -> Path:
        folder = self._top / group
        if group not in self._groups:
            folder.mkdir(exist_ok=True)
            self._groups.add(group)
        return folder


class DutyCycle:
    """CPU shares by SIGSTOP and SIGCONT from a helper process, without privileges. A group holds process groups."""

    mechanism = "duty-cycle"

    def __init__(self) -> None:
        self._pids: dict[str, set[int]] = {}
        self._cores: dict[str, float | None] = {}
        self._process = start_helper(duty.__file__, str(os.getpid()))

    def attach(self, group: str, pid: int) -> None:
        for others in self._pids.values():
            others.discard(pid)
        self._pids.setdefault(group, set()).add(pid)
        self._say(pid, self._cores.get(group))

    def limit(self, group: str, cores: float | None) -> None:
        cores = None if cores == math.inf else cores
        self._cores[group] = cores
        for pid in self._pids.get(group, ()):
            self._say(pid, cores)

    def close(self) -> None:
        stop_helper(self._process)

    def _say(self, pid: int, cores: float | None) -> None:
        tell_helper(self._process, f"{pid} {cores or 0}", "duty-cycle helper")


def start_helper(script: str, *arguments: str, pass_fds: Sequence[int] = ()) -> Popen[bytes]:
    """Start a process that uses only the standard library and ends when its standard input closes."""
    env = {k: v for k, v in os.environ.items() if k != keeper.MARK}
    line = [sys.executable, "-I", "-S", script, *arguments]
    return Popen(
        line, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, env=env, start_new_session=True, cwd="/", pass_fds=pass_fds
    )


def tell_helper(process: Popen[bytes], line: str, name: str) -> None:
    """Write a line to its standard input. Raises `EmulationError` if it has ended."""
    if process.stdin is None or process.poll() is not None:
        raise EmulationError(f"the {name} has ended; start the emulation again")
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()


def stop_helper(process: Popen[bytes], goodbye: bytes = b"") -> None:
    """Close its standard input, after a last message, and wait for its end."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.write(goodbye)
            process.stdin.close()
    process.wait()


def find_cgroup(mount: Path = CGROUP_ROOT, membership: str | None = None) -> tuple[Path, int] | str:
    """(folder in which control groups with a CPU quota can be created, version), or why there is none.

    `membership` is the text of /proc/self/cgroup. Nothing is made or changed.
    """
    text = Path("/proc/self/cgroup").read_text() if membership is None else membership
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2].strip() for line in text.splitlines()}
    for controllers, path in paths.items():
        if "cpu" in controllers.split(","):
            return _find_v1(mount, controllers, path)
    return _find_v2(mount, paths.get("", "/"))


def _find_v1(mount: Path, controllers: str, path: str) -> tuple[Path, int] | str:
    for top in (mount / "cpu", mount / controllers):
        for folder in (top / path.lstrip("/"), top):
            if (folder / "cpu.cfs_quota_us").exists() or (folder / "cgroup.procs").exists():
                if os.access(folder, os.W_OK):
                    return folder, 1
                return f"no permission to write {folder}: run as root, in containers with --privileged"
    return f"no cpu controller is mounted at {mount}"


def _find_v2(mount: Path, path: str) -> tuple[Path, int] | str:
    """The nearest group above the caller's that delegates the cpu controller: siblings need one."""
    if not (mount / "cgroup.controllers").exists():
        return f"no control groups are mounted at {mount}"
    folder = mount / path.lstrip("/")
    for candidate in (folder, *folder.parents):
        try:
            passes = "cpu" in (candidate / "cgroup.subtree_control").read_text().split()
        except OSError:
            passes = False
        if passes and os.access(candidate, os.W_OK):
            return candidate, 2
        if candidate == mount:
            break
    why = "no control group above this process passes the cpu controller on and may be written"
    return f"{why}: run as root, or start it with: systemd-run --scope -p Delegate=yes"
