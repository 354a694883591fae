"""How much memory batches take and how much is free, if running out of it raises no error.

A CUDA allocator raises an error, and so does the CPU's under `ulimit -v`. A full control group or machine kills the
process instead: there the memory of a batch must be predicted from smaller ones.
"""

import ctypes
import gc
import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from dynamix.probes.host import Cgroups
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.window import Ints

_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_TEXTS = (*_CPU, "CUDA out of memory", "CUDA error: out of memory", "ALLOC_FAILED", "Cannot allocate memory")
# Memory to leave free: other processes of the group grow, too, and page tables are not counted for any batch.
RESERVE, LEAST_RESERVE_BYTES = 0.05, 16 * 2**20
# Factor on predicted or measured growth: the same batch may take up to a third more at another time, depending on holes
# in the C library's heap (it serves blocks of up to 32 MiB once some were freed). `tests/memory` was killed at 1.1.
_CAUTION = 1.4
_LOST = "a rank was lost while all look what fits. If it ran out of memory, its own output says so"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: CUDA's, the CPU allocator's, or the interpreter's.

    >>> [is_out_of_memory(RuntimeError(text)) for text in ("CUDA out of memory. Tried ...", "mat1 and mat2 shapes ...")]
    [True, False]
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in _TEXTS)


def all_of(value: int, ranks: Ranks) -> Ints:
    """Every rank's value, int64 (W,). A collective call."""
    return np.asarray(ranks.rows(torch.tensor([int(value)]), _LOST)[:, 0])


def release() -> None:
    """Free unused memory: the device's cache, and what the C library holds."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Gauge:
    """Memory that batches of different sizes took, and whether a batch of a given size fits."""

    def __init__(self, device: torch.device, *, cgroups: Cgroups | None = None) -> None:
        self._cgroups = Cgroups.find() if cgroups is None else cgroups
        # Whether exceeding the limit kills the process, and how many processes of this job share the limit.
        self.watched, self.sharers = device.type == "cpu" and Path("/proc/self/statm").exists(), 1
        # (samples, bytes of growth), newest last: peak resident memory less the resident memory before.
        self.points: list[tuple[int, float]] = []

    def identity(self) -> int:
        """A number that is equal for processes under the same limit, and differs for others (positive, below 2^62)."""
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        except OSError:
            machine = str(os.uname().nodename)
        folders = self._cgroups.memory
        limits = [f.stat() for f in folders if math.isfinite(Cgroups(memory=(f,)).memory_limit_bytes())]
        name = f"{machine.strip()} {[(s.st_dev, s.st_ino) for s in limits[:1]]}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2

    def share(self, ranks: Ranks) -> None:
        """Count the ranks that share this rank's limit. A collective call."""
        mine = self.identity()
        self.sharers = int((all_of(mine, ranks) == mine).sum())

    def headroom_bytes(self) -> float:
        """Bytes until the control group or the machine is full, whichever comes first, less the reserve."""
        if not self.watched:
            return math.inf
        import psutil  # here, because it is slow to import

        used, limit = self._cgroups.memory_bytes()
        machine = psutil.virtual_memory()
        rooms = [machine.available - _reserve(float(machine.total))]
        if math.isfinite(limit):
            rooms.append(limit - used - _reserve(limit))
        return float(min(rooms))

    def growth_bytes(self, size: int) -> float:
        """Predicted memory of a batch of `size`, in addition to that held now; NaN before any measurement."""
        if not self.points:
            return math.nan
        last, taken = self.points[-1]
        # Two similar sizes give a poor slope. With only one size, growth in proportion is the safe assumption.
        others = [p for p in self.points if not 2 / 3 < p[0] / last < 3 / 2]
        before, less = others[-1] if others else (0, 0.0)
        slope = min(max((taken - less) / (last - before), 0.25 * taken / last), taken / last)
        return _CAUTION * max(taken + slope * (size - last), 0.0)

    def allows(self, size: int, headroom_bytes: float) -> bool:
        """Whether a batch of `size` is predicted to fit; True before any measurement."""
        return not self.watched or not self.points or self.growth_bytes(size) <= headroom_bytes / self.sharers

    @contextmanager
    def measure(self, size: int) -> Iterator[None]:
        """Measure the memory that a batch of `size` takes inside, unless an error is raised. Slow.

        Inside, a module's forward pass raises `MemoryError` if memory is nearly full, before the process is killed.
        """
        if not self.watched:
            yield
            return

        def look(module: Any, args: Any) -> None:
            if self.headroom_bytes() <= 0:
                raise MemoryError("the control group's or the machine's memory is nearly full")

        before = _resident_bytes()
        _reset_peak()
        handle = register_module_forward_pre_hook(look)
        try:
            yield
        finally:
            handle.remove()
        self.points.append((size, max(_peak_bytes() - before, 0.0)))
        del self.points[:-8]


def _reserve(limit_bytes: float) -> float:
    return max(RESERVE * limit_bytes, LEAST_RESERVE_BYTES)


def _resident_bytes() -> float:
    return float(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def _reset_peak() -> None:
    # If this is forbidden, the peak is that of the whole process: higher, so it is safe.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1024
    return _resident_bytes()
