"""Live runs of opponents on emulated hosts: ranks are started once and make one run after another."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from dynamix.errors import WorkerLostError
from dynamix_lab.emulator import Emulation
from dynamix_lab.emulator.devices import DeviceSteps, too_many_overruns
from dynamix_lab.harness.channel import JobChannel, Listener
from dynamix_lab.harness.runs import file_name
from dynamix_lab.opponents.runs import RunLimits, TrialRun
from dynamix_lab.opponents.trial import Trial

START_TIMEOUT_S, SILENCE_S = 120.0, 120.0
LOST_S = 1.0  # time that a rank has to end after its connection is lost
TIMEOUT_S = 60  # for the ranks' process group


@dataclass(frozen=True, slots=True)
class LiveJob:
    """The settings that all runs of one launch share.

    workload, seed     of data, weights and sample order
    scenario           name or file, for the reference
    disturbance_seed   of the scenario's disturbances
    limits             of each run; targets do not end it
    fastest            the rank that trains if one worker trains alone
    """

    workload: str
    seed: int
    scenario: str
    disturbance_seed: int
    limits: RunLimits
    fastest: int = 0


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run as its launch recorded it.

    name     of the run: its row, or "static-again"
    devices  each host's device steps in it; empty for hosts without a device
    """

    name: str
    run: TrialRun
    devices: tuple[DeviceSteps, ...]

    @property
    def overrun(self) -> bool:
        """Whether the machine was too slow for the devices, so that the run is no measurement."""
        return bool(self.devices) and too_many_overruns(self.devices)


class LiveRanks:
    """Started ranks of a job on `hosts`, which make one run after another until they are closed.

    A context manager. Raises `WorkerLostError` if a rank fails, or if no rank sends anything for two minutes. No
    process is left running.
    """

    def __init__(self, hosts: Emulation, job: LiveJob) -> None:
        self._hosts = hosts
        self._stack = contextlib.ExitStack()
        self._links: list[JobChannel] = []
        self._runs = 0  # runs begun
        with contextlib.ExitStack() as starting:
            folder = Path(starting.enter_context(tempfile.TemporaryDirectory(prefix="dynamix-live-")))
            config = {
                "socket": str(folder / "link"),
                "events": str(hosts.run_dir),
                "timeout_s": TIMEOUT_S,
                **{
                    name: getattr(job, name) for name in ("workload", "seed", "scenario", "disturbance_seed", "fastest")
                },
                "limits": asdict(job.limits),
            }
            path = folder / "config.json"
            path.write_text(json.dumps(config))
            starting.callback(self._hang_up)
            listener = Listener(config["socket"], backlog=hosts.scenario.workers)
            starting.callback(listener.close)
            starting.callback(hosts.terminate, patience_s=1.0)
            hosts.launch([sys.executable, "-m", "dynamix_lab.opponents.rank", str(path)])
            self._accept(listener)
            self._stack = starting.pop_all()

    def run(self, name: str, trial: Trial) -> LiveRun:
        """Make one run on all ranks; `name` is used for its files."""
        self._runs += 1
        self.events(name).unlink(missing_ok=True)  # left by an interrupted run
        try:
            for link in self._links:
                link.send("run", number=self._runs, events=self.events(name).name, trial=trial.to_dict())
            return self._followed(name)
        except (WorkerLostError, OSError):
            time.sleep(LOST_S)  # lets a failing rank write its reason
            check_ranks(self._hosts)
            raise

    def events(self, name: str) -> Path:
        """The file to which the run of this name writes its policy's decisions, if it has a policy."""
        return self._hosts.run_dir / f"{file_name(name)}.events.jsonl"

    def _followed(self, name: str) -> LiveRun:
        heard = time.monotonic()
        while True:
            if not any(link.buffered for link in self._links):
                select.select(self._links, [], [], 0.2)
            for link in self._links:
                if (message := link.receive(timeout_s=0)) is None:
                    continue
                heard, kind = time.monotonic(), message.pop("kind")
                if message.pop("run", self._runs) != self._runs:
                    continue  # last messages of the previous run
                if kind == "start":
                    self._hosts.start_clock()
                    link.send("go")
                elif kind == "finished":
                    made = self._finished(name, message)
                    link.send("go")
                    return made
            check_ranks(self._hosts)
            if time.monotonic() - heard > SILENCE_S:
                raise WorkerLostError(f"nothing was heard of any rank for {SILENCE_S:.0f} s; see {self._hosts.run_dir}")

    def _finished(self, name: str, message: Mapping[str, Any]) -> LiveRun:
        devices = tuple(self._hosts.overruns())
        self._hosts.unthrottle()
        return LiveRun(name, TrialRun.from_dict(message["result"]), devices)

    def _accept(self, listener: Listener) -> None:
        """Accept a connection of every rank."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self._links) < self._hosts.scenario.workers:
            if (link := listener.accept(0.2)) is not None:
                self._links.append(link)
            check_ranks(self._hosts)
            if time.monotonic() > deadline:
                raise WorkerLostError(f"not all ranks called within {START_TIMEOUT_S:.0f} s of their start")

    def _hang_up(self) -> None:
        for link in self._links:
            link.close()

    def close(self) -> None:
        """End the ranks."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_ranks(hosts: Emulation) -> None:
    """Raise `WorkerLostError` with the end of its output if a rank has failed."""
    for rank, code in enumerate(hosts.poll()):
        if code:
            errors = hosts.run_dir / f"rank{rank}.err"
            lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
            said = lines[-1] if lines else "it wrote nothing"
            raise WorkerLostError(f"rank {rank} ended with {code}: {said} (all of it in {errors})")


def paced(make: Callable[[int], LiveRun], *, repeats: int) -> LiveRun:
    """Make a run, and repeat it at most `repeats` times if its devices overran. `make` gets the attempt's number."""
    run = make(0)
    for attempt in range(1, repeats + 1):
        if not run.overrun:
            break
        run = make(attempt)
    return run
