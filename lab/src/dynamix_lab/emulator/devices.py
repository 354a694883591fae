"""Hosts that compute at the speed of a given device: the file that emulation and ranks share, and step counts.

The owner writes the present speed of each host into a mapped file. Ranks (`pacing`) write there how many passes they
made and how many ended late. So the counts survive a rank, however it ends.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamix.errors import ConfigError
from dynamix.startup.sitecustomize import called_environment
from dynamix.telemetry.sources import MOST_OVERRUNS
from dynamix_lab.emulator.pacing import pacer
from dynamix_lab.emulator.scenario import Device


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """The steps of one rank's device.

    steps      passes (a forward and its backward) with pacing in force
    overruns   how many of them ended late, by more than 1 ms and 2 %, because of their real work
    overrun_s  the seconds by which they were late, summed
    """

    steps: int = 0
    overruns: int = 0
    overrun_s: float = 0.0


def too_many_overruns(ranks: Sequence[DeviceSteps], *, most: float = MOST_OVERRUNS) -> bool:
    """Whether the machine was too slow for the devices: on some rank a larger part than `most` of the steps overran.

    >>> too_many_overruns([DeviceSteps(100, 1, 0.01), DeviceSteps(100)])
    False
    >>> too_many_overruns([DeviceSteps(100, 2, 0.01), DeviceSteps(100)])
    True
    """
    return any(rank.overruns > most * rank.steps for rank in ranks)


def batch_cost(cost: float) -> None:
    """Set the cost of the next batch, in units of the device's `per_cost_ms`. Call it before every forward.

    Without a call, a batch costs as many units as the model's first integer input has elements (tokens). Does nothing
    outside an emulation of device hosts. Raises `ConfigError` unless `cost` is finite and at least 0.

    >>> batch_cost(812.0)
    """
    if not (math.isfinite(cost) and cost >= 0):
        raise ConfigError("cost", cost, "a finite number, 0 or more", "pass the batch's summed cost")
    running = getattr(sys.modules.get("dynamix_startup_pacer"), "current", None)
    if running is not None:
        running.told_cost = float(cost)


class SharedDevices:
    """The owner's side of the mapped file. The owner must remove it; counts stay readable after that."""

    def __init__(self, path: Path, hosts: int, device: Device) -> None:
        self._path, self._hosts, self._device = path, hosts, device
        path.write_bytes(bytes(8 * pacer.SLOTS * hosts))
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self._before = self._counts()

    def environment(self, host: int, given: Mapping[str, str]) -> dict[str, str]:
        """The environment with which Python paces a rank on `host`. The rank's own variables, `given`, are kept.

        It names the pacer by path, because the rank's interpreter may not have dynamix.
        """
        device = self._device
        parts = [self._path, host, device.fixed_ms, device.per_sample_ms, device.per_cost_ms]
        return called_environment({**given, pacer.VARIABLE: "\n".join(map(str, parts))}, f"{pacer.__file__}:start")

    def set_speeds(self, speeds: Sequence[float] | None) -> None:
        """Set the relative speed of every host. None: no pacing."""
        for host in range(self._hosts):
            self._numbers[host * pacer.SLOTS + pacer.SPEED] = speeds[host] if speeds else 0.0

    def count_from_now(self) -> None:
        """Restart `steps` at 0."""
        self._before = self._counts()

    def steps(self) -> list[DeviceSteps]:
        """The steps by host."""
        pairs = zip(self._counts(), self._before, strict=True)
        return [DeviceSteps(now[0] - old[0], now[1] - old[1], now[2] - old[2]) for now, old in pairs]

    def _counts(self) -> list[tuple[int, int, float]]:
        records = [self._numbers[host * pacer.SLOTS : (host + 1) * pacer.SLOTS] for host in range(self._hosts)]
        return [(int(r[pacer.STEPS]), int(r[pacer.OVERRUNS]), float(r[pacer.OVERRUN_S])) for r in records]
