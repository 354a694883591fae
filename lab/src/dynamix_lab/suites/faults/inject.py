"""The faults, and how each is injected into a running job."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamix.errors import EmulationError
from dynamix_lab.emulator import Emulation
from dynamix_lab.suites.faults.job import FaultsJob

SPEEDS = (1.0, 0.7, 0.4)  # of the hosts
RATE_MBIT_S = 100.0
_DEVICE = {"fixed_ms": 15.0, "per_sample_ms": 0.4}
_DISK = "16m"
_OUTAGE_S = 10.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind.

    says       what is done
    ends       the job must end; without it, it must continue to its end
    silent     other ranks must log that the victim is silent
    lasts_s    duration; None: for ever
    needs      "root" for its own hosts and its own disk
    """

    says: str
    ends: bool = False
    silent: bool = False
    lasts_s: float | None = None
    needs: str = ""


FAULTS = {
    "none": Fault("nothing"),
    "kill": Fault("SIGKILL to a rank", ends=True),
    "stop": Fault("SIGSTOP to a rank, for good", ends=True, silent=True),
    "pause": Fault("SIGSTOP to a rank for 10 s", silent=True, lasts_s=_OUTAGE_S),
    "cable": Fault("a host's link down for 10 s", silent=True, lasts_s=_OUTAGE_S, needs="root"),
    "rate": Fault("a host's link at 1 % of its rate for 15 s, a larger model", lasts_s=15.0, needs="root"),
    "loss": Fault("5 % of a host's packets lost for 15 s", lasts_s=15.0, needs="root"),
    "disk": Fault("disk full under events and saves for 2 s", lasts_s=2.0, needs="root"),
    "disk-kill": Fault("disk full under events and saves, then SIGKILL to a rank", ends=True, needs="root"),
    "clock": Fault("the wall clock of a rank jumps by up to a day"),
    "raise": Fault("an exception in the loop of a rank", ends=True),
    "terminate": Fault("SIGTERM to a rank"),
}


@dataclass(frozen=True, slots=True)
class FaultCase:
    """One drawn fault: the victim and the time, seconds after training began."""

    name: str
    seed: int
    victim: int
    at_s: float
    job: FaultsJob

    @property
    def fault(self) -> Fault:
        return FAULTS[self.name]

    def scenario(self) -> dict[str, Any]:
        """The hosts, and the changes of their links."""
        hosts = [{"cpu": speed} for speed in SPEEDS]
        scenario: dict[str, Any] = {"hosts": hosts, "device": _DEVICE}
        if self.name == "rate":
            scenario["hosts"] = [host | {"rate_mbit_s": RATE_MBIT_S} for host in hosts]
            scenario["schedule"] = self._for_a_while({"rate_mbit_s": RATE_MBIT_S / 100}, {"rate_mbit_s": RATE_MBIT_S})
        if self.name == "loss":
            scenario["schedule"] = self._for_a_while({"loss": 0.05}, {"loss": 0.0})
        return scenario

    def _for_a_while(self, bad: dict[str, float], good: dict[str, float]) -> list[dict[str, Any]]:
        whom, end_s = {"host": self.victim}, self.at_s + (self.fault.lasts_s or 0.0)
        return [{"at_s": self.at_s, **whom, **bad}, {"at_s": end_s, **whom, **good}]


def drawn(name: str, seed: int, *, quick: bool = False) -> FaultCase:
    """The case of a seed. The same arguments give the same case."""
    draw = random.Random(f"{name}/{seed}")
    victim, step = draw.randrange(len(SPEEDS)), draw.randrange(15, 60)
    job = FaultsJob(seed=seed, samples=1200 if quick else 3600)
    if name == "rate":  # with 0.8 MB of gradients a step takes 10 s on such a link
        job = dataclasses.replace(job, width=260, timeout_s=90.0)
    if name == "raise":
        job = dataclasses.replace(job, raises=(step, victim))
    if name == "clock":
        job = dataclasses.replace(job, jumps=(step, victim, draw.choice((-1, 1)) * 10 ** draw.uniform(0, 4.9)))
    return FaultCase(name, seed, victim, round(draw.uniform(0.5, 1.5 if quick else 3.5), 2), job)


class Injection:
    """Injects a case into the ranks of a cluster. `disk` is where they write events and saves."""

    def __init__(
        self, case: FaultCase, cluster: Emulation, ranks: Sequence[subprocess.Popen[bytes]], disk: Path
    ) -> None:
        self.case, self.cluster, self.disk = case, cluster, disk
        self._victim = ranks[case.victim]

    def begin(self) -> None:
        name = self.case.name
        if name.startswith("disk"):
            fill(self.disk)
        if name in ("stop", "pause"):
            self._victim.send_signal(signal.SIGSTOP)
        elif name in ("kill", "disk-kill"):
            self._victim.send_signal(signal.SIGKILL)
        elif name == "terminate":
            self._victim.send_signal(signal.SIGTERM)
        elif name == "cable":
            self.cluster.plug(self.case.victim, plugged=False)

    def end(self) -> None:
        """Undo what can be undone."""
        if self.case.name.startswith("disk"):
            (self.disk / "filler").unlink()
        if self.case.name in ("stop", "pause"):
            self._victim.send_signal(signal.SIGCONT)
        elif self.case.name == "cable":
            self.cluster.plug(self.case.victim, plugged=True)


def fill(disk: Path) -> None:
    """Fill the disk to the last byte."""
    fd = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(fd, bytes(size))
    finally:
        os.close(fd)


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """Inside the context `folder` is a small disk of its own. Needs root. Its files are lost afterwards."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise EmulationError(f"cannot mount a small disk ({done.stderr.strip()}): run as root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
