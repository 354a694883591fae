"""One run of a peer, or of one of dynamix's policies, followed to its end on emulated hosts."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamix.errors import WorkerLostError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.emulator import Emulation
from dynamix_lab.emulator.scenario import Scenario
from dynamix_lab.harness.channel import JobChannel, Listener, Message
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.folder import adopt_events
from dynamix_lab.harness.host import processor_times
from dynamix_lab.harness.runs import CENSOR_FACTOR, PolicyRun
from dynamix_lab.harness.scoring import Scorer, WeightSnapshot, by_parameters
from dynamix_lab.opponents.launch import check_ranks
from dynamix_lab.peers.kinds import Peer, rate_of, split_name
from dynamix_lab.peers.portable import described
from dynamix_lab.peers.settings import MOST_STEPS, LaunchSettings, disturbance_seed
from dynamix_lab.tasks import Workload

JOBS = Path(__file__).parent / "jobs"
# Ends a run that static's time cannot bound yet. Static on `paper-like` takes more than 240 s.
PATIENCE_S = 600.0
START_S = 240.0  # while four ranks with all their helpers import torch
SILENCE_S = 90.0  # after that; longer than any peer's own timeout
DEATH_S = 20.0


@dataclass(frozen=True, slots=True)
class Contender:
    """What is run: its command, and the settings of its job (`jobs/job.py`).

    learning_rate   None: the workload's
    max_steps       None: as in the settings
    """

    name: str
    total: int
    learning_rate: float | None
    settings: dict[str, Any]
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    max_steps: int | None = None

    @classmethod
    def peer(cls, name: str, python: Path, scenario: Scenario) -> Contender:
        """A peer in its own interpreter."""
        of = Peer.of(name)
        command = [str(python), "-P", "-m", f"{JOBS.name}.{of.environment}"]
        path = {"PYTHONPATH": str(JOBS.parent)}
        return cls(of.name, of.total, of.learning_rate, of.settings(scenario), command, path, MOST_STEPS)

    @classmethod
    def own(cls, name: str, settings: LaunchSettings, seed: int, workload: Workload) -> Contender:
        """A policy of dynamix, optionally with another global batch or learning rate: `dynamix-128-lr0.1`."""
        policy, total = split_name(name.removesuffix("-again"))
        source = Path(settings.scenario)
        told = {
            "policy": policy,
            "scenario": str(source.resolve()) if source.is_file() else settings.scenario,
            "disturbance_seed": disturbance_seed(settings, seed),
            "bounds": [workload.min_batch, workload.max_batch],
            "interval": settings.interval,
            "lr_rule": settings.lr_rule,
        }
        return cls(name, total, rate_of(name), told, [sys.executable, "-m", "dynamix_lab.peers.jobs.own"])


class Launch:
    """One start of a contender's ranks. All use the same messages, so clock, snapshots, scoring, target and censoring
    are equal.

    Raises `WorkerLostError` if a rank fails, or if rank 0 sends nothing for 90 s.
    """

    def __init__(
        self,
        who: Contender,
        settings: LaunchSettings,
        seed: int,
        workload: Workload,
        hosts: Emulation,
        folder: RunFolder,
        display: Display,
        runs: list[PolicyRun],
    ) -> None:
        self.who, self.settings, self.seed, self.workload, self.hosts = who, settings, seed, workload, hosts
        self.folder, self.display, self.runs = folder, display, runs
        self.target = settings.target(workload)
        self._data = workload.make_data(seed, train=settings.train_samples(), test=settings.test_samples())
        self._stopping, self._processor_began = False, processor_times()
        self._heard_s, self._patience_s = time.monotonic(), START_S

    def run(self) -> None:
        """Start the ranks and follow them to the end. Appends to `runs`."""
        self.display.say(f"seed {self.seed}: starting {self.who.name} on the emulated hosts")
        with tempfile.TemporaryDirectory(prefix="dynamix-job-") as scratch:
            config = self.config(Path(scratch))
            path = Path(scratch) / "job.json"
            path.write_text(json.dumps(config))
            listener = Listener(config["socket"])
            scorer = Scorer(by_parameters(self.workload, self._data.test), self._scored)
            self._link: JobChannel | None = None
            try:
                self.hosts.launch([*self.who.command, str(path)], env=self.who.env)
                self._link = self._accept(listener)
                while self._handle(self._next_message(self._link), self._link, scorer):
                    self.display.update(self.runs)
                self.hosts.wait(10.0)
            finally:
                self.hosts.terminate(patience_s=1.0)
                scorer.close()
                listener.close()
                if self._link is not None:
                    self._link.close()

    def config(self, scratch: Path) -> dict[str, Any]:
        """The ranks' settings as JSON. Writes model and data to files in `scratch`."""
        settings, workers, data = self.settings, self.hosts.scenario.workers, self._data.train
        model = self.workload.make_model(self.seed)
        torch.save(model.state_dict(), scratch / "weights.pt")
        np.savez(scratch / "task.npz", inputs=data.inputs.numpy(), targets=data.targets.numpy())
        (scratch / "board").write_bytes(bytes(8 * (1 + 2 * workers)))
        group = self.workload.make_optimizer(model.parameters()).param_groups[0]
        return {
            "socket": str(scratch / "link"),
            "snapshots": str(scratch),
            "seed": self.seed,
            "snapshot_samples": settings.snapshot_samples(),
            "warm_up_steps": 3 if settings.quick else 20,
            "name": self.who.name,
            "global_batch": self.who.total,
            "settings": self.who.settings,
            "learning_rate": group["lr"] if self.who.learning_rate is None else self.who.learning_rate,
            "momentum": group["momentum"],
            "max_steps": settings.max_steps() if settings.quick else self.who.max_steps or settings.max_steps(),
            "data": str(scratch / "task.npz"),
            "layers": described(model),
            "weights": str(scratch / "weights.pt"),
            "loss": self.workload.loss.__name__,
            "board": str(scratch / "board"),
            "meeting": str(scratch / "meeting"),
            "events": str(scratch / "events.jsonl"),
            "about": str(self.hosts.run_dir / "rank0.json"),
        }

    def _accept(self, listener: Listener) -> JobChannel:
        while time.monotonic() - self._heard_s < START_S:
            if (link := listener.accept(0.2)) is not None:
                return link
            check_ranks(self.hosts)
        raise WorkerLostError(f"rank 0 did not call within {START_S:.0f} s of its start")

    def _next_message(self, link: JobChannel) -> Message | None:
        try:
            message = link.receive(timeout_s=0.2)
        except WorkerLostError:
            # The connection ends at a rank's first exception; on a busy machine its exit code comes seconds later.
            deadline = time.monotonic() + DEATH_S
            while time.monotonic() < deadline and not any(self.hosts.poll()):
                time.sleep(0.1)
            check_ranks(self.hosts)
            raise
        now = time.monotonic()
        if message is not None:
            self._heard_s, self._patience_s = now, SILENCE_S
            return message
        check_ranks(self.hosts)
        if now - self._heard_s > self._patience_s:
            raise WorkerLostError(
                f"{self.who.name} said nothing for {self._patience_s:.0f} s; see {self.hosts.run_dir}"
            )
        return None

    def _handle(self, message: Message | None, link: JobChannel, scorer: Scorer) -> bool:
        """Handle one message. Returns False if the launch is over."""
        if message is None:
            return True
        kind = message.pop("kind")
        if kind == "start":
            self.runs.append(PolicyRun(message["run"], self.seed, self.target))
            self._stopping, self._processor_began = False, processor_times()
            self.hosts.start_clock()
            link.send("go")
        elif kind == "progress":
            run = self.runs[-1]
            for name, value in message.items():
                setattr(run, name, value)
            if not self.settings.quick and run.time_s > self._limit_s():
                self._stop()
        elif kind == "snapshot":
            scorer.add(WeightSnapshot(self.runs[-1].policy, **{**message, "path": Path(message["path"])}))
        elif kind == "finished":
            self.hosts.unthrottle()
            scorer.wait()
            self._finish(message)
            link.send("go")
        return bool(kind != "done")

    def _finish(self, message: Message) -> None:
        run = self.runs[-1]
        run.events = adopt_events(self.folder, Path(message.pop("events")), policy=message.pop("run"), seed=self.seed)
        for name, value in message.items():
            setattr(run, name, value)
        run.step, run.finished = len(run.step_ends_s), True
        spent = [now - then for now, then in zip(processor_times(), self._processor_began, strict=True)]
        run.stolen = spent[0] / spent[1] if spent[1] else float("nan")
        reached = run.time_to_target_s
        result = "target not reached" if reached is None else f"target after {reached:.1f} s"
        self.display.say(f"seed {self.seed}, {run.policy}: {result}; {run.step} steps in {run.time_s:.1f} s")

    def _scored(self, snapshot: WeightSnapshot) -> None:
        """Record a score. The scorer's thread calls it."""
        run, settings = self.runs[-1], self.settings
        run.snapshots.append(snapshot)
        if not settings.quick and settings.clock_s is None and run.time_to_target_s is not None:
            self._stop()

    def _stop(self) -> None:
        if not self._stopping and self._link is not None:
            self._stopping = True
            self._link.send("stop")

    def _limit_s(self) -> float:
        """When a run that has not arrived is censored: at twice static's time once that is known, or at its clock."""
        if self.settings.clock_s is not None:
            return self.settings.clock_s
        for run in self.runs:
            if run.policy == "static" and run.seed == self.seed and run.finished and run.time_to_target_s:
                return CENSOR_FACTOR * run.time_to_target_s
        return PATIENCE_S
