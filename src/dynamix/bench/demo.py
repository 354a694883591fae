"""`dynamix demo`: one real training job on an emulated uneven cluster, under one policy after the other."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from dynamix.bench.display import Display, end_table, policy_lines, ratio_lines
from dynamix.bench.link import Link, Listener, Message
from dynamix.bench.reference import reference_total
from dynamix.bench.report import write_report
from dynamix.bench.runs import AGAIN, CENSOR_FACTOR, Run, load_runs, save_runs, summarise
from dynamix.bench.scoring import Scorer, Snapshot
from dynamix.bench.statistics import balanced_order
from dynamix.emulator import Emulation, Scenario, host_speeds, load_scenario
from dynamix.emulator.cluster import Mechanism
from dynamix.emulator.scenario import check_machine
from dynamix.errors import ConfigError, WorkerLostError
from dynamix.policies import make_policy
from dynamix.policies.learned import PRETRAINED
from dynamix.telemetry.events import SCHEMA
from dynamix.telemetry.run_folder import RunFolder, commit, machine, processor_times
from dynamix.workloads import Workload, make_workload
from dynamix.workloads.mnist1d import TUNING_SEEDS

POLICIES = ("reference", "static", "dbs", "dynamix")
# A run that static's time cannot bound yet ends here; nothing measured so far comes near.
PATIENCE_S = 240.0
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What one call of the demo does.

    scenario  shipped name or file of the emulator's scenario
    seeds     how many pairs; seed, seed + 1, ...
    steps     end every run after so many steps instead of at the target
    quick     a smoke run: little data, few steps, a target anybody reaches
    policies  to compare; "reference" is decided with the scenario file in hand
    policy    file of a learned policy, or a name, to use for "dynamix" instead of the shipped one
    again     run static twice (the A/A pair) for a single seed too; several seeds always do
    mechanism   of the emulation: "auto", "privileged" or "duty-cycle" (no root)
    command   how results name what was called
    """

    scenario: str = "demo"
    seeds: int = 1
    seed: int = 0
    steps: int | None = None
    quick: bool = False
    policies: tuple[str, ...] = POLICIES
    policy: str | None = None
    again: bool = False
    workload: str = "mnist1d"
    batch_size: int = 128
    interval: int = 5
    lr_rule: str = "adascale"
    disturbance_seed: int = field(default=1000)
    mechanism: Mechanism = "auto"
    command: str = "demo"

    def check(self) -> None:
        """Raises `ConfigError` for values that cannot be run, before anything is started."""
        for name, value in {"seeds": self.seeds, "steps": 1 if self.steps is None else self.steps}.items():
            if value < 1:
                raise ConfigError(name, value, "1 or more", "check the argument")
        used = sorted(set(range(self.seed, self.seed + self.seeds)) & set(TUNING_SEEDS))
        if not 0 <= self.seed < 2**31 or used:
            allowed = f"0 to 2147483647, except {', '.join(map(str, TUNING_SEEDS))} (the target was fixed on them)"
            raise ConfigError("seed", used[0] if used else self.seed, allowed, "take another seed")
        if self.mechanism not in get_args(Mechanism):
            raise ConfigError("mechanism", self.mechanism, ", ".join(get_args(Mechanism)), "use auto")
        check_machine(load_scenario(self.scenario), len(os.sched_getaffinity(0)))
        for package in ("matplotlib", self.workload):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(package, "not installed", "installed", 'pip install "dynamix-train[demo]"')
        for name in self.policies:
            if name.startswith("reference"):
                reference_total(name)
            else:
                make_policy(self.policy if name == "dynamix" and self.policy else name)

    def order(self, seed: int) -> list[str]:
        """Random balanced order of this seed's runs; with several pairs static runs twice (the A/A pair).

        A single seed compares nothing that a drift of the machine could not explain, so there the order is the plain
        one: static first, whose time bounds the others.
        """
        names = list(self.policies)
        paired = self.seeds > 1 or self.again
        if not paired and "reference" not in names:
            return names
        if paired and "static" in names:
            names.append(AGAIN)
        return balanced_order(names, seed)

    def train_samples(self) -> int:
        return 2400 if self.quick else 24_000

    def test_samples(self) -> int:
        return 400 if self.quick else 4_000

    def max_steps(self) -> int:
        return self.steps or (16 if self.quick else 4000)

    def target(self, workload: Workload) -> float:
        return 0.15 if self.quick else workload.fixed_target()


def run_demo(settings: Settings, folder: RunFolder, *, display: Display | None = None) -> tuple[dict[str, Any], bool]:
    """Run all policies for all seeds; returns result.json and whether every run reached its end.

    Writes run.json, events.jsonl, result.json and report.html to `folder`. Seeds that `folder` has finished already
    are not run again. When interrupted, what is finished is summarised before `KeyboardInterrupt` goes on. Raises
    `DynamixError`s of bad settings, of the emulator, or of a lost worker; nothing is left running.
    """
    settings.check()
    scenario, workload = load_scenario(settings.scenario), make_workload(settings.workload)
    target = settings.target(workload)
    display = display or Display(target=target)
    torch.set_num_threads(1)
    seeds = range(settings.seed, settings.seed + settings.seeds)
    facts = _facts(settings, scenario, target)
    finished = _finished(settings, folder, facts)
    for seed in finished:
        display.say(f"seed {seed}: finished earlier, in {folder.path}")
    runs = [run for of_seed in finished.values() for run in of_seed]
    facts["mechanisms"] = folder.read_run().get("mechanisms", {})
    try:
        with display.live():
            for seed in seeds:
                if seed in finished:
                    continue
                ranks, mine = folder.path / "ranks" / str(seed), len(runs)
                of_seed = disturbance_seed(settings, seed)
                with Emulation(scenario, seed=of_seed, run_dir=ranks, mechanism=settings.mechanism) as hosts:
                    facts["mechanisms"] = hosts.mechanisms
                    folder.write_run(**facts)
                    Launch(settings, seed, workload, hosts, folder, display, runs).run()
                save_runs(_saved(folder, seed), runs[mine:], _must_agree(facts))
    except KeyboardInterrupt:
        whole = [run for run in runs if _saved(folder, run.seed).exists()]
        if whole:
            _conclude(settings, scenario, whole, {**facts, "interrupted": True}, folder, display)
            display.say(f"interrupted: go on with --resume --out {folder.path}")
        raise
    result = _conclude(settings, scenario, runs, facts, folder, display)
    fixed = settings.steps is not None or settings.quick
    return result, all(run.finished and (fixed or run.time_to_target_s is not None) for run in runs)


def _conclude(
    settings: Settings,
    scenario: Scenario,
    runs: list[Run],
    facts: dict[str, Any],
    folder: RunFolder,
    display: Display,
) -> dict[str, Any]:
    """Write result.json and report.html of `runs`, and say what they hold."""
    shown = (*POLICIES, AGAIN)
    runs.sort(key=lambda run: (run.seed, shown.index(run.policy) if run.policy in shown else len(shown)))
    result = {**facts, "commit": commit(), "machine": machine(), **summarise(runs)}
    if "dynamix" in result["policies"]:
        result["policies"]["dynamix"]["policy"] = facts["settings"]["policy"]
    folder.write_result(result)
    write_report(folder.path / "report.html", runs, result, moves=lambda run: moves(scenario, run, settings))
    _say_end(display, runs, result, folder)
    return result


def _saved(folder: RunFolder, seed: int) -> Path:
    return folder.path / "finished" / f"{seed}.json"


def _must_agree(facts: dict[str, Any]) -> dict[str, Any]:
    """What runs of one call must have in common; more seeds may be added to those that are there."""
    names = ("schema", "scenario_sha256", "workload", "target", "settings")
    return {"commit": commit(), "machine": machine(), **{name: facts[name] for name in names}}


def _finished(settings: Settings, folder: RunFolder, facts: dict[str, Any]) -> dict[int, list[Run]]:
    """Seed -> runs that an earlier call left in `folder`; events of seeds it did not finish are dropped."""
    seeds = [s for s in range(settings.seed, settings.seed + settings.seeds) if _saved(folder, s).exists()]
    events = folder.keep_events(lambda event: event["seed"] in seeds)
    return {seed: load_runs(_saved(folder, seed), events, _must_agree(facts)) for seed in seeds}


def _facts(settings: Settings, scenario: Scenario, target: float) -> dict[str, Any]:
    seeds = range(settings.seed, settings.seed + settings.seeds)
    return {
        "schema": SCHEMA,
        "command": settings.command
        + (" --quick" if settings.quick else "")
        + (f" --steps {settings.steps}" if settings.steps else ""),
        "cluster": "emulator",
        "scenario": scenario.name,
        "scenario_sha256": scenario.sha256,
        "workload": settings.workload,
        "target": target,
        "seeds": list(seeds),
        "order": {str(seed): settings.order(seed) for seed in seeds},
        "settings": {
            "batch_size": settings.batch_size,
            "interval": settings.interval,
            "lr_rule": settings.lr_rule,
            "policies": sorted(settings.order(settings.seed)),
            "mechanism": settings.mechanism,
            "policy": _policy_file(settings.policy) if "dynamix" in settings.policies else None,
        },
    }


def _policy_file(policy: str | None) -> dict[str, str]:
    """Which policy really ran as "dynamix": the shipped file, another file (with its hash), or the one of a name."""
    path = PRETRAINED if policy in (None, "dynamix") else Path(str(policy))
    named = {"name": "shipped" if path == PRETRAINED else str(policy)}
    return {**named, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} if path.is_file() else named


def _say_end(display: Display, runs: Sequence[Run], result: dict[str, Any], folder: RunFolder) -> None:
    for line in [*policy_lines(result), *ratio_lines(result["ratios"])]:
        display.say(line)
    display.console.print(end_table(runs, target=result["target"]))
    a_a = result["a_a"]
    if a_a is not None and not a_a["within"]:
        off = f"{100 * (a_a['median'] - 1):+.1f} %, more than {100 * a_a['limit']:.0f} %"
        display.say(f"A/A: static against itself is off by {off}: repeat the call whole, on a machine left alone")
    display.say(f"report: {folder.path / 'report.html'}")


def moves(scenario: Scenario, run: Run, settings: Settings) -> list[tuple[float, int]]:
    """(time_s, host) of every time a host became slower while `run` went on."""
    found, before = [], host_speeds(scenario, 0.0, disturbance_seed(settings, run.seed))
    for tick in range(1, int(run.time_s * 10) + 1):
        now = host_speeds(scenario, tick / 10, disturbance_seed(settings, run.seed))
        found += [(tick / 10, host) for host in range(len(now)) if now[host] < before[host] - 1e-9]
        before = now
    return found


def disturbance_seed(settings: Settings, seed: int) -> int:
    """Apart from the seed of model and data; all runs of one pair share both."""
    return settings.disturbance_seed + seed


class Launch:
    """One start of the rank processes: every policy once, in turn, for one seed."""

    def __init__(
        self,
        settings: Settings,
        seed: int,
        workload: Workload,
        hosts: Emulation,
        folder: RunFolder,
        display: Display,
        runs: list[Run],
    ) -> None:
        self.settings, self.seed, self.workload, self.hosts = settings, seed, workload, hosts
        self.folder, self.display, self.runs = folder, display, runs
        self.target = settings.target(workload)
        self._link: Link | None = None
        self._scorer: Scorer | None = None
        self._stopping, self._processor_began = False, processor_times()
        self._until_target = settings.steps is None and not settings.quick

    def run(self) -> None:
        """Start the ranks and follow them to the end. Appends to `runs`."""
        settings = self.settings
        self.display.say(f"seed {self.seed}: making data, starting {self.workload.name} on the emulated hosts")
        data = self.workload.make_data(self.seed, train=settings.train_samples(), test=settings.test_samples())
        with tempfile.TemporaryDirectory(prefix="dynamix-demo-") as scratch:
            config = self._config(Path(scratch))
            listener = Listener(config["socket"])
            path = Path(scratch) / "demo.json"
            path.write_text(json.dumps(config))
            self._scorer = Scorer(self.workload, data.test, self._scored)
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
        """Ranks of another kind that speak the same messages start here too (`dynamix.bench.peers`)."""
        self.hosts.launch([sys.executable, "-m", "dynamix.bench.demo_worker", str(config)])

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
            "runs": settings.order(self.seed),
            "policy_files": {"dynamix": _absolute(settings.policy)} if settings.policy else {},
            "batch_size": settings.batch_size,
            "interval": settings.interval,
            "lr_rule": settings.lr_rule,
            "snapshot_samples": 1000 if settings.quick else 4000,
            "warm_up_steps": 3 if settings.quick else 20,
            "max_steps": settings.max_steps(),
            "timeout_s": 60,
        }

    def _accept(self, listener: Listener) -> Link:
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
            if self._until_target and run.time_s > self._limit_s():
                self._stop()
        elif kind == "snapshot":
            assert self._scorer is not None
            self._scorer.add(Snapshot(self.runs[-1].policy, **{**message, "path": Path(message["path"])}))
        elif kind == "finished":
            self._finish(message)
        return bool(kind != "done")

    def _start(self, name: str) -> None:
        assert self._link is not None
        self.runs.append(Run(name, self.seed, self.target))
        self._stopping, self._processor_began = False, processor_times()
        self.hosts.start_clock()
        self._link.send("go")

    def _finish(self, message: Message) -> None:
        assert self._link is not None
        assert self._scorer is not None
        self.hosts.unthrottle()
        self._scorer.wait()
        run = self.runs[-1]
        run.events = self.folder.adopt_events(Path(message.pop("events")), policy=message.pop("run"), seed=self.seed)
        for name, value in message.items():
            setattr(run, name, value)
        run.step, run.finished = len(run.step_ends_s), True
        spent = [now - then for now, then in zip(processor_times(), self._processor_began, strict=True)]
        run.stolen = spent[0] / spent[1] if spent[1] else float("nan")
        reached = run.time_to_target_s
        result = "target not reached" if reached is None else f"target after {reached:.1f} s"
        self.display.say(f"seed {self.seed}, {run.policy}: {result}; {run.step} steps in {run.time_s:.1f} s")
        self._link.send("go")

    def _scored(self, snapshot: Snapshot) -> None:
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
        """When a run that has not arrived is censored: twice static's time, as soon as that is known."""
        for run in self.runs:
            if run.policy == "static" and run.seed == self.seed and run.finished and run.time_to_target_s:
                return CENSOR_FACTOR * run.time_to_target_s
        return PATIENCE_S


def _absolute(source: str | None) -> str | None:
    """A file's path made independent of the working directory; a shipped name stays."""
    return str(Path(source).resolve()) if source is not None and Path(source).is_file() else source
