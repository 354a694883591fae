"""The share of processor time and memory that this worker uses, of what it may use.

Containers and schedulers limit a worker by cgroups, and may change the limits while it runs. So limits are read at
every sample, version 1 and 2, from the worker's own group up to the root. The tightest one counts.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path


class HostProbe:
    """Fractions of processor time and of memory.

    cpu      processor seconds of this process and its live multiprocessing children (loader workers) since the previous
             sample, over elapsed seconds times the cores it may use (affinity and cgroup quota)
    memory   used memory over the limit: of the cgroup or of the whole machine, whichever is nearer to its limit
    """

    name = "host"

    def __init__(self, *, cgroups: Cgroups | None = None) -> None:
        self._cgroups = Cgroups.find() if cgroups is None else cgroups
        self._pid = os.getpid()
        self._sampled_at = time.perf_counter()
        self._used = self._cpu_seconds()

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        """(available, why or how)."""
        cgroups = Cgroups.find()
        cores, limit = allowed_cores(cgroups), cgroups.memory_limit_bytes()
        memory = "no cgroup memory limit" if math.isinf(limit) else f"cgroup memory limit {limit / 2**20:.0f} MiB"
        return True, f"{cores:g} cores allowed, {memory}"

    def sample(self) -> dict[str, float]:
        """`cpu` and `memory`, since the previous sample or the probe's construction."""
        now, used = time.perf_counter(), self._cpu_seconds()
        elapsed, self._sampled_at = now - self._sampled_at, now
        # A process not seen before has started since, so all of its time belongs to this interval.
        spent = sum(seconds - self._used.get(pid, 0.0) for pid, seconds in used.items())
        self._used, cores = used, allowed_cores(self._cgroups)
        cpu = min(1.0, max(0.0, spent / (elapsed * cores))) if elapsed > 0 else math.nan
        return {"cpu": cpu, "memory": self._memory()}

    def _cpu_seconds(self) -> dict[int, float]:
        """User and system seconds so far, by process id."""
        seconds = {self._pid: time.process_time()}  # finer than the kernel's ticks in /proc
        for child in multiprocessing.active_children():
            import psutil  # on first use, because importing it takes a tenth of this package's import time

            with contextlib.suppress(psutil.Error):  # ended between listing and reading
                if child.pid is not None:
                    times = psutil.Process(child.pid).cpu_times()
                    seconds[child.pid] = times.user + times.system
        return seconds

    def _memory(self) -> float:
        machine = _machine_memory()
        fractions = [] if math.isnan(machine) else [machine]
        used, limit = self._cgroups.memory_bytes()
        if math.isfinite(limit) and limit > 0:
            fractions.append(used / limit)
        return min(1.0, max(fractions)) if fractions else math.nan


def _machine_memory() -> float:
    """Used fraction of the machine's memory. psutil would parse fifty lines, most of a sample's cost."""
    found = re.match(rb"MemTotal: +(\d+) kB\n.*\nMemAvailable: +(\d+) kB\n", _bytes("/proc/meminfo", 128), re.DOTALL)
    if found:
        return 1.0 - int(found[2]) / int(found[1])
    import psutil

    try:
        machine = psutil.virtual_memory()
    except (OSError, RuntimeError):
        return math.nan
    return 1.0 - float(machine.available) / float(machine.total)


def allowed_cores(cgroups: Cgroups) -> float:
    """Cores this process may use: its affinity, or its cgroup's quota if that is tighter."""
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        cores = float(os.cpu_count() or 1)
    return min(cores, cgroups.cpu_cores())


@dataclass(frozen=True, slots=True)
class Cgroups:
    """This process's control groups for each controller, as folders, its own first; empty if there is none."""

    cpu: tuple[Path, ...] = ()
    memory: tuple[Path, ...] = ()

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> Cgroups:
        """The current groups of this process. Without controllers (not Linux, or not mounted) there is no limit."""
        try:
            groups = (proc / "cgroup").read_text().splitlines()
            mounts = (proc / "mountinfo").read_text().splitlines()
        except OSError:
            return cls()
        places = {"cpu": (), "memory": ()} | _folders(groups, mounts)
        return cls(cpu=places["cpu"], memory=places["memory"])

    def cpu_cores(self) -> float:
        """The tightest quota in cores; infinite if there is none."""
        return min((_quota_cores(folder) for folder in self.cpu), default=math.inf)

    def memory_bytes(self) -> tuple[float, float]:
        """(used, limit) of the group nearest to its limit; page cache that can be dropped does not count as used."""
        limits = [(folder, _memory_limit(folder)) for folder in self.memory]
        groups = [(_memory_used(folder), limit) for folder, limit in limits if math.isfinite(limit)]
        return max(groups, key=lambda group: group[0] / max(group[1], 1.0), default=(math.nan, math.inf))

    def memory_limit_bytes(self) -> float:
        """The tightest limit; infinite if there is none."""
        return min((_memory_limit(folder) for folder in self.memory), default=math.inf)


def _folders(groups: list[str], mounts: list[str]) -> dict[str, tuple[Path, ...]]:
    """Controller -> folders, from the lines of /proc/self/cgroup and /proc/self/mountinfo."""
    # A line reads: 31 23 0:28 ROOT POINT options [tags] - TYPE SOURCE superoptions
    mounted: list[tuple[str, str, str, set[str]]] = []
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):
            mounted.append((kind[0], fields[3], fields[4], set(kind[2].split(","))))
    found: dict[str, tuple[Path, ...]] = {}
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for kind_, root, point, options in mounted:
            if kind_ == "cgroup2" and not controllers:
                # A controller that version 1 mounts belongs to it; version 2 has the others.
                for name in ("cpu", "memory"):
                    found.setdefault(name, _chain(root, Path(point), path))
            elif kind_ == "cgroup":
                for name in {"cpu", "memory"} & set(controllers.split(",")) & options:
                    found[name] = _chain(root, Path(point), path)
    return found


def _chain(root: str, point: Path, path: str) -> tuple[Path, ...]:
    """The group's folder and its parents up to the mount point.

    `path` starts at the hierarchy's root, but a container may see only the part below `root`, mounted at `point`.
    """
    try:
        inside = Path(path).relative_to(root)
    except ValueError:
        inside = Path()
    own = point if ".." in inside.parts else point / inside  # "..": outside this cgroup namespace
    own = own if own.is_dir() else point
    return tuple(folder for folder in (own, *own.parents) if folder == point or point in folder.parents)


def _quota_cores(folder: Path) -> float:
    both = _read(folder, "cpu.max").split()
    quota, period = both if len(both) == 2 else (_read(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    try:
        cores = float(quota) / float(period)
    except (ValueError, ZeroDivisionError):
        return math.inf  # "max", or no such file
    return cores if cores > 0 else math.inf  # version 1 writes -1 for no quota


def _memory_limit(folder: Path) -> float:
    limit = _number(folder, "memory.max", "memory.limit_in_bytes", otherwise=math.inf)
    return limit if limit < 2**60 else math.inf  # version 1 writes a huge number for no limit


def _memory_used(folder: Path) -> float:
    used = _number(folder, "memory.current", "memory.usage_in_bytes", otherwise=math.nan)
    counters = dict(line.split() for line in _read(folder, "memory.stat").splitlines() if line.count(" ") == 1)
    droppable = counters.get("total_inactive_file", counters.get("inactive_file", "0"))
    return used if math.isnan(used) else max(0.0, used - float(droppable))


def _number(folder: Path, *names: str, otherwise: float) -> float:
    """The number in the first file that exists, version 2's before version 1's."""
    try:
        return float(next(filter(None, (_read(folder, name) for name in names)), ""))
    except ValueError:
        return otherwise


def _read(folder: Path, name: str) -> str:
    return _bytes(f"{folder}/{name}").decode().strip()


def _bytes(path: str, most: int = 1 << 16) -> bytes:
    # Plain descriptors, because a sample reads a dozen files and file objects would take most of its time.
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, most)
        finally:
            os.close(descriptor)
    except OSError:
        return b""
