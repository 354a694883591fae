"""The start of a job's rank processes on emulated hosts, and what follows them to the end: of peers, and of dynamix's
own policies beside them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.run_folder import RunFolder
from dynamix.policies import make_policy
from dynamix_lab.emulator import Emulation, load_scenario
from dynamix_lab.emulator.cluster import Mechanism
from dynamix_lab.emulator.scenario import check_machine
from dynamix_lab.harness.channel import JobChannel, Listener, Message
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.folder import adopt_events
from dynamix_lab.harness.host import processor_times
from dynamix_lab.harness.reference import references
from dynamix_lab.harness.runs import CENSOR_FACTOR, PolicyRun
from dynamix_lab.harness.scoring import Scorer, WeightSnapshot, by_parameters
from dynamix_lab.installed import how_to_install
from dynamix_lab.tasks import Workload
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS

# A run that static's time cannot bound yet ends here. Static on `paper-like` takes more than 240 s.
PATIENCE_S = 600.0
START_TIMEOUT_S = 120.0
MOST_STEPS = 100_000  # none takes so many before its time is over


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What the runs of a call share.

    scenario  shipped name or file of the emulator's scenario
    seeds     how many; seed, seed + 1, ...
    clock_s   end every run after so many seconds instead of at the target
    quick     a smoke run: little data, few steps, a target anybody reaches
    policies  to run, in this order; "reference" is decided with the scenario file in hand
    mechanism   of the emulation: "auto", "privileged" or "duty-cycle" (no root)
    """

    scenario: str = "demo"
    seeds: int = 1
    seed: int = 0
    quick: bool = False
    policies: tuple[str, ...] = ()
    clock_s: float | None = None
    workload: str = "mnist1d"
    batch_size: int = 128
    interval: int = 5
    lr_rule: str = "adascale"
    disturbance_seed: int = field(default=1000)
    mechanism: Mechanism = "auto"

    def check(self) -> None:
        """Raises `ConfigError` for values that cannot be run, before anything is started."""
        if self.seeds < 1:
            raise ConfigError("seeds", self.seeds, "1 or more", "check the argument")
        if self.clock_s is not None and not 1 <= self.clock_s <= 86_400:
            raise ConfigError("clock", self.clock_s, "1 to 86400 seconds", "check the argument")
        used = sorted(set(range(self.seed, self.seed + self.seeds)) & set(TUNING_SEEDS))
        if not 0 <= self.seed < 2**31 or used:
            allowed = f"0 to 2147483647, except {', '.join(map(str, TUNING_SEEDS))} (the target was fixed on them)"
            raise ConfigError("seed", used[0] if used else self.seed, allowed, "take another seed")
        if self.mechanism not in get_args(Mechanism):
            raise ConfigError("mechanism", self.mechanism, ", ".join(get_args(Mechanism)), "use auto")
        check_machine(load_scenario(self.scenario), len(os.sched_getaffinity(0)))
        for package in ("matplotlib", "mnist1d") if self.workload.startswith("mnist1d") else ("matplotlib",):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(package, "not installed", "installed", how_to_install("bench"))
        for name in self.policies:
            make_policy(name, others=references(self.scenario))

    def train_samples(self) -> int:
        return 2400 if self.quick else 24_000

    def test_samples(self) -> int:
        return 400 if self.quick else 4_000

    def snapshot_samples(self) -> int:
        return 1000 if self.quick else 4000

    def max_steps(self) -> int:
        return 16 if self.quick else 4000 if self.clock_s is None else MOST_STEPS

    def target(self, workload: Workload) -> float:
        """Of its metric. With a clock a workload may have none: then it is 1, and nobody's time to it is said."""
        if self.quick:
            return 0.15
        return 1.0 if self.clock_s is not None and workload.target is None else workload.fixed_target()


def disturbance_seed(settings: LaunchSettings, seed: int) -> int:
    """Apart from the seed of model and data; all runs of one pair share both."""
    return settings.disturbance_seed + seed


class Launch:
    """One start of the rank processes: every policy once, in turn, for one seed."""

    def __init__(
        self,
        settings: LaunchSettings,
        seed: int,
        workload: Workload,
        hosts: Emulation,
        folder: RunFolder,
        display: Display,
        runs: list[PolicyRun],
    ) -> None:
        self.settings, self.seed, self.workload, self.hosts = settings, seed, workload, hosts
        self.folder, self.display, self.runs = folder, display, runs
        self.target = settings.target(workload)
        self._link: JobChannel | None = None
        self._scorer: Scorer | None = None
        self._stopping, self._processor_began = False, processor_times()
        self._by_time = not settings.quick
        self._until_target = self._by_time and settings.clock_s is None

    def run(self) -> None:
        """Start the ranks and follow them to the end. Appends to `runs`."""
        settings = self.settings
        self.display.say(f"seed {self.seed}: making data, starting {self.workload.name} on the emulated hosts")
        data = self.workload.make_data(self.seed, train=settings.train_samples(), test=settings.test_samples())
        with tempfile.TemporaryDirectory(prefix="dynamix-job-") as scratch:
            config = self._config(Path(scratch))
            listener = Listener(config["socket"])
            path = Path(scratch) / "job.json"
            path.write_text(json.dumps(config))
            self._scorer = Scorer(by_parameters(self.workload, data.test), self._scored)
            try:
                self._start_ranks(path)
                self._link = self._accept(listener)
                while self._handle(self._next_message()):
                    self.display.update(self.runs)
                self.hosts.wait(10.0)
            finally:
                self.hosts.terminate(patience_s=1.0)
                self._scorer.close()
                listener.close()
                if self._link is not None:
                    self._link.close()

    def _start_ranks(self, config: Path) -> None:
        """Ranks of another kind that speak the same messages start here too (`dynamix_lab.peers`)."""
        self.hosts.launch([sys.executable, "-m", "dynamix_lab.harness.worker", str(config)])

    def _config(self, scratch: Path) -> dict[str, Any]:
        settings = self.settings
        return {
            "socket": str(scratch / "link"),
            "snapshots": str(scratch),
            "events": str(scratch / "{run}.events.jsonl"),
            "workload": settings.workload,
            "train_samples": settings.train_samples(),
            "test_samples": settings.test_samples(),
            "seed": self.seed,
            "disturbance_seed": disturbance_seed(settings, self.seed),
            "scenario": _absolute(settings.scenario),
            "runs": list(settings.policies),
            "policy_files": {},
            "batch_size": settings.batch_size,
            "interval": settings.interval,
            "lr_rule": settings.lr_rule,
            "snapshot_samples": settings.snapshot_samples(),
            "warm_up_steps": 3 if settings.quick else 20,
            "max_steps": settings.max_steps(),
            "timeout_s": 60,
        }

    def _accept(self, listener: Listener) -> JobChannel:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            link = listener.accept(0.2)
            if link is not None:
                return link
            self._check()
        raise WorkerLostError(f"rank 0 did not call within {START_TIMEOUT_S:.0f} s of its start")

    def _check(self) -> None:
        """Raises `WorkerLostError` with the end of what it wrote when a rank has failed."""
        for rank, code in enumerate(self.hosts.poll()):
            if code:
                errors = self.hosts.run_dir / f"rank{rank}.err"
                lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
                said = lines[-1] if lines else "it wrote nothing"
                raise WorkerLostError(f"rank {rank} ended with {code}: {said} (all of it in {errors})")

    def _next_message(self) -> Message | None:
        assert self._link is not None
        try:
            message = self._link.receive(timeout_s=0.2)
        except WorkerLostError:
            time.sleep(0.5)  # the exit status says more than a closed socket
            self._check()
            raise
        if message is None:
            self._check()
        return message

    def _handle(self, message: Message | None) -> bool:
        """Act on one message; False when the launch is over."""
        if message is None:
            return True
        kind = message.pop("kind")
        if kind == "start":
            self._start(message["run"])
        elif kind == "progress":
            run = self.runs[-1]
            for name, value in message.items():
                setattr(run, name, value)
            if self._by_time and run.time_s > self._limit_s():
                self._stop()
        elif kind == "snapshot":
            assert self._scorer is not None
            self._scorer.add(WeightSnapshot(self.runs[-1].policy, **{**message, "path": Path(message["path"])}))
        elif kind == "finished":
            self._finish(message)
        return bool(kind != "done")

    def _start(self, name: str) -> None:
        assert self._link is not None
        self.runs.append(PolicyRun(name, self.seed, self.target))
        self._stopping, self._processor_began = False, processor_times()
        self.hosts.start_clock()
        self._link.send("go")

    def _finish(self, message: Message) -> None:
        assert self._link is not None
        assert self._scorer is not None
        self.hosts.unthrottle()
        self._scorer.wait()
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
        self._link.send("go")

    def _scored(self, snapshot: WeightSnapshot) -> None:
        """Called by the scorer's thread."""
        run = self.runs[-1]
        run.snapshots.append(snapshot)
        if self._until_target and run.time_to_target_s is not None:
            self._stop()

    def _stop(self) -> None:
        if not self._stopping and self._link is not None:
            self._stopping = True
            self._link.send("stop")

    def _limit_s(self) -> float:
        """When a run that has not arrived is censored: twice static's time, as soon as that is known; or its clock."""
        if self.settings.clock_s is not None:
            return self.settings.clock_s
        for run in self.runs:
            if run.policy == "static" and run.seed == self.seed and run.finished and run.time_to_target_s:
                return CENSOR_FACTOR * run.time_to_target_s
        return PATIENCE_S


def _absolute(source: str | None) -> str | None:
    """A file's path made independent of the working directory; a shipped name stays."""
    return str(Path(source).resolve()) if source is not None and Path(source).is_file() else source
