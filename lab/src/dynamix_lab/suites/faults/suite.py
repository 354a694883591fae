"""`dynamix bench faults`: a job on emulated hosts, a fault, and its consequences.

A cell is one fault of one seed. The job is restarted until it has trained all its samples, as an engineer would do, and
resumes from the newest save that every rank has finished. Then its whole history is checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from scipy import stats

from dynamix.errors import ConfigError, StateError
from dynamix.events.records import read_events
from dynamix_lab.emulator import Emulation
from dynamix_lab.emulator.mechanisms import probe_mechanisms
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Table, document, number
from dynamix_lab.suites.faults.check import ending, faults_of, history
from dynamix_lab.suites.faults.inject import FAULTS, SPEEDS, FaultCase, Injection, drawn, own_disk
from dynamix_lab.suites.faults.job import STOPPED

MARGIN_S = 10.0  # beyond the group's timeout, for all ranks to end
NAMED_S = 10.0  # time for every log to name a silent rank
LONGEST_S = 300.0  # for one start of the job
MOST_RUNS = 3
QUICK = ("kill", "raise", "terminate")
BASELINES = 8  # runs without a fault, with which final losses are compared


@dataclass(frozen=True, slots=True)
class FaultsPlan:
    """Which faults, and how many seeds of each."""

    faults: tuple[str, ...]
    seeds: int
    seed: int = 0
    baselines: int = BASELINES
    quick: bool = False

    @classmethod
    def of(
        cls, *, quick: bool = False, faults: tuple[str, ...] | None = None, seeds: int | None = None, seed: int = 0
    ) -> FaultsPlan:
        """The full plan is 200 faults: 20 of each kind, except kinds that need no seed of their own."""
        every = tuple(name for name in FAULTS if name != "none")
        given = faults or (QUICK if quick else every)
        return cls(given, seeds or (1 if quick else -(-200 // len(given))), seed, 0 if quick else BASELINES, quick)

    def check(self) -> None:
        for name in self.faults:
            if name not in FAULTS or name == "none":
                raise ConfigError("faults", name, ", ".join(n for n in FAULTS if n != "none"), "choose of these")
        if self.seeds < 1:
            raise ConfigError("seeds", self.seeds, "1 or more", "check the argument")


@dataclass
class FaultsSuite(Suite):
    """The suite for the harness."""

    plan: FaultsPlan
    name: str = "faults"
    grows: ClassVar[frozenset[str]] = frozenset({"faults", "seeds", "baselines"})

    def facts(self) -> dict[str, Any]:
        seeds = list(range(self.plan.seed, self.plan.seed + self.plan.seeds))
        missing = self._missing()
        left_out = {name: missing for name in self.plan.faults if FAULTS[name].needs and missing}
        return {"cluster": "emulator", "seeds": seeds, "left_out": left_out}

    def _missing(self) -> str:
        """Why faults that need root are omitted; empty if they are not."""
        found = probe_mechanisms()
        return "; ".join(found[name][1] for name in ("network", "rate", "loss") if not found[name][0])

    def cells(self) -> Sequence[Cell]:
        missing, first = self._missing(), self.plan.seed
        cells = [Cell(f"none-{seed}", ("none", seed)) for seed in range(first, first + self.plan.baselines)]
        names = [name for name in self.plan.faults if not (FAULTS[name].needs and missing)]
        seeds = range(first, first + self.plan.seeds)
        return cells + [Cell(f"{name}-{seed}", (name, seed)) for seed in seeds for name in names]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        name, seed = cell.what
        folder = context.folder.path / "ranks" / cell.key
        return play(drawn(name, seed, quick=self.plan.quick), folder)

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        losses = [cell["loss"] for cell in cells.values() if cell["fault"] == "none" and cell["loss"] is not None]
        spread = _interval(losses)
        by_fault: dict[str, Any] = {}
        for key, cell in cells.items():
            wrong = list(cell["wrong"])
            if spread and cell["loss"] is not None and not spread[0] <= cell["loss"] <= spread[1]:
                wrong.append(f"final loss {cell['loss']:.4f} is outside {spread[0]:.4f} to {spread[1]:.4f}")
            about = by_fault.setdefault(
                cell["fault"], {"cells": 0, "right": 0, "ended_s": [], "said_s": [], "wrong": {}}
            )
            about["cells"] += 1
            about["right"] += not wrong
            about["ended_s"] += [cell["ended_s"]] if cell["ended_s"] is not None else []
            about["said_s"] += cell["said_s"]
            if wrong:
                about["wrong"][key] = wrong
        faults = sum(about["cells"] for name, about in by_fault.items() if name != "none")
        right = sum(about["right"] for name, about in by_fault.items() if name != "none")
        return {"injected": faults, "right": right, "loss_interval": spread, "faults": by_fault}

    def table(self, result: Mapping[str, Any]) -> str:
        wrong = [f"- {key}: {'; '.join(w)}" for about in result["faults"].values() for key, w in about["wrong"].items()]
        left = [f"- left out: {name} ({why})" for name, why in result["left_out"].items()]
        told = f"{result['right']} of {result['injected']} faults left nothing wrong. Times are the longest."
        return document(told, table(result), "\n".join(wrong + left))


def table(result: Mapping[str, Any]) -> Table:
    """A row per kind of fault."""
    heads = ["fault", "what", "injected", "nothing wrong", "ranks ended after, s", "named after, s"]
    rows = []
    for name, about in result["faults"].items():
        ended, said = (max(about[key], default=None) for key in ("ended_s", "said_s"))
        counts = [str(about["cells"]), str(about["right"])]
        rows.append([name, FAULTS[name].says, *counts, number(ended, 1), number(said, 1)])
    return Table(heads, rows)


def _interval(losses: Sequence[float]) -> tuple[float, float] | None:
    """The interval of the loss of one more run without a fault, 99.9 %, by Student's t; None below three runs."""
    n = len(losses)
    if n < 3:
        return None
    mean = sum(losses) / n
    sd = (sum((loss - mean) ** 2 for loss in losses) / (n - 1)) ** 0.5
    half = float(stats.t.ppf(0.9995, n - 1)) * sd * (1 + 1 / n) ** 0.5
    return mean - half, mean + half


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """How one start of the job went.

    codes     exit codes, including the victim's
    fault_at  wall clock time of the fault; None if the job had ended before
    ended_s   from the fault to the end of the last other rank; None if they did not have to end
    hung      ranks that had to be ended by force
    """

    codes: list[int]
    fault_at: float | None
    ended_s: float | None
    hung: list[int]


def play(case: FaultCase, folder: Path) -> dict[str, Any]:
    """Run the case to the end of its job. Returns its outcome. Creates `folder`, with the ranks' output and logs."""
    for name in ("log", "disk"):
        (folder / name).mkdir(parents=True)
    wrong: list[str] = []
    outcomes: list[StartOutcome] = []
    with contextlib.ExitStack() as stack:
        if case.name.startswith("disk"):
            stack.enter_context(own_disk(folder / "disk"))
        cluster = stack.enter_context(Emulation(case.scenario(), seed=case.seed, run_dir=folder))
        for run in range(MOST_RUNS):
            given = dataclasses.asdict(case.job) | {"run": run}
            (folder / "job.json").write_text(json.dumps(given))
            outcomes.append(_start(case if run == 0 else None, cluster, folder, run, case.job.timeout_s))
            if _finished(folder, run):
                break
        else:
            wrong.append(f"not finished after {MOST_RUNS} starts")
        dropped = _events(folder / "disk" / "events.jsonl", wrong)
    first, others = outcomes[0], [rank for rank in range(len(SPEEDS)) if rank != case.victim]
    said_s = _said(case, folder, first, others)
    wrong += _ends(case, folder, outcomes, others)
    if case.fault.silent and first.fault_at is not None:
        late = [rank for rank in others if not any(s <= NAMED_S for s in said_s.get(rank, []))]
        wrong += [f"rank {rank} did not say in {NAMED_S:.0f} s that rank {case.victim} is silent" for rank in late]
    steps, broken = history(folder / "log", len(outcomes), len(SPEEDS))
    loss, failed_saves = ending(folder / "log", len(outcomes))
    wrong += broken + faults_of(case.job, steps)
    return {
        **{"fault": case.name, "seed": case.seed, "victim": case.victim, "at_s": case.at_s, "wrong": wrong},
        **{"starts": len(outcomes), "codes": [o.codes for o in outcomes], "injected": first.fault_at is not None},
        **{"ended_s": first.ended_s, "said_s": [min(s) for s in said_s.values() if s], "steps": len(steps)},
        **{"loss": loss, "failed_saves": failed_saves, "dropped_events": dropped},
    }


def _start(case: FaultCase | None, cluster: Emulation, folder: Path, run: int, timeout_s: float) -> StartOutcome:
    """Start the ranks and follow them; with `case`, inject it."""
    command = [sys.executable, "-m", "dynamix_lab.suites.faults.job", str(folder.resolve())]
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_SHOW_CPP_STACKTRACES": "0"}
    ranks = cluster.launch(command, env=env, name=f"run{run}")
    injection = None if case is None or case.name == "none" else Injection(case, cluster, ranks, folder / "disk")
    began, fault_at, since, over = time.monotonic(), None, 0.0, False
    others = [rank for rank in range(len(ranks)) if case is None or rank != case.victim or not case.fault.ends]
    while None in (codes := cluster.poll()):
        now = time.monotonic()
        if injection is not None and case is not None:
            clock = cluster.time_s()
            if fault_at is None and clock is not None and clock >= case.at_s and case.name not in ("raise", "clock"):
                injection.begin()
                fault_at, since = time.time(), now
            lasts_s = case.fault.lasts_s
            if fault_at is not None and not over and lasts_s is not None and now - since >= lasts_s:
                injection.end()
                over = True
            if case.name == "raise" and fault_at is None and codes[case.victim] is not None:
                fault_at, since = time.time(), now
            over_s = now - since if case.fault.ends and fault_at is not None else 0.0
            if over_s > timeout_s + MARGIN_S or (over_s and all(codes[rank] is not None for rank in others)):
                break
        if now - began > LONGEST_S:
            break
        time.sleep(0.05)
    ended_s = time.monotonic() - since if fault_at is not None and case is not None and case.fault.ends else None
    hung = [rank for rank, code in enumerate(cluster.poll()) if code is None and rank in others]
    if injection is not None and fault_at is not None and not over:
        with contextlib.suppress(OSError):
            injection.end()
    if None in cluster.poll():
        cluster.terminate(patience_s=0.5)
    if case is not None and case.name == "clock":
        fault_at = time.time()
    return StartOutcome(cluster.wait(), fault_at, ended_s, hung)


def _finished(folder: Path, run: int) -> bool:
    """Whether every rank reached the end of the data."""
    logs = [folder / "log" / f"{run}-{rank}.jsonl" for rank in range(len(SPEEDS))]
    ended = all(log.exists() and '"ended": true' in log.read_text() for log in logs)
    return ended and STOPPED not in (folder / f"run{run}.rank0.out").read_text()


def _ends(case: FaultCase, folder: Path, outcomes: Sequence[StartOutcome], others: Sequence[int]) -> list[str]:
    """Errors in how the ranks ended."""
    first, wrong = outcomes[0], []
    for run, outcome in enumerate(outcomes):
        wrong += [f"run {run}: rank {rank} hung" for rank in outcome.hung]
        if (run or not case.fault.ends) and any(outcome.codes):
            wrong.append(f"run {run} ended with {outcome.codes}: {_last_words(folder, run, outcome.codes)}")
    if not case.fault.ends or first.fault_at is None:
        return wrong
    for rank in others:
        text = (folder / f"run0.rank{rank}.err").read_text(errors="replace")
        if not first.codes[rank] and case.name != "none":
            wrong.append(f"rank {rank} ended as if nothing had happened")
        elif "WorkerLostError: " not in text or f"rank {case.victim} (" not in text.rpartition("WorkerLostError: ")[2]:
            wrong.append(f"rank {rank} did not name rank {case.victim}: {_last_words(folder, 0, first.codes, rank)}")
    return wrong


def _said(case: FaultCase, folder: Path, first: StartOutcome, others: Sequence[int]) -> dict[int, list[float]]:
    """Seconds from the fault to every line in which another rank's log calls the victim silent."""
    if first.fault_at is None:
        return {}
    line = re.compile(rf"^(\d+\.\d+) rank {case.victim} \(.*has been silent", re.MULTILINE)
    texts = {rank: (folder / f"run0.rank{rank}.err").read_text(errors="replace") for rank in others}
    return {rank: [round(float(at) - first.fault_at, 2) for at in line.findall(text)] for rank, text in texts.items()}


def _last_words(folder: Path, run: int, codes: Sequence[int | None], rank: int | None = None) -> str:
    failed = [r for r, code in enumerate(codes) if code] if rank is None else [rank]
    text = (folder / f"run{run}.rank{failed[0]}.err").read_text(errors="replace") if failed else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no word"


def _events(path: Path, wrong: list[str]) -> int:
    """The number of dropped lines, as the file itself says."""
    try:
        return max((event.get("dropped", 0) for event in read_events(path)), default=0)
    except StateError as error:
        wrong.append(f"events: {error}")
        return 0
