"""`dynamix bench overhead`: job time and processor time over plain DDP, and the cost of a decision; resumable by cell.

A cell is one launch of two real gloo processes, in which all rows train blocks of steps in turn, until A/A's interval
of thread time is narrow. A row's ratio there is the median over its blocks, each over plain DDP's block of the same
round. Launches are what varies, so the interval is Student's t over their ratios. Before them, a cell for each step
time finds a model whose plain step takes about as long on this machine; all its launches train it. Another cell
measures peak memory.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dynamix.errors import ConfigError
from dynamix.events.run_folder import commit
from dynamix.policies import make_policy
from dynamix.window import Floats
from dynamix_lab.harness.processes import in_processes
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Section, Table, number, sections_markdown, with_interval
from dynamix_lab.statistics import mean_interval
from dynamix_lab.suites.overhead.decision_time import (
    BESIDE_MS,
    BESIDE_WINDOWS,
    DECISIONS,
    GOAL_MS,
    MANY,
    WORKERS,
    beside_times,
    decision_times,
)
from dynamix_lab.suites.overhead.memory import memory, memory_table
from dynamix_lab.suites.overhead.ranks import AGAIN, HOOK, INTERVAL, PLAIN, RANKS, Blocks, find_width, time_blocks

SHORT_MS = 5.0  # shorter steps are timed more often, since their blocks are short
BLOCK_S = 2.7  # longest of a block
MOST = 3  # factor on the least number of blocks


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """The settings of one call.

    step_ms     of plain DDP, about; each has its own model
    policies    rows besides plain DDP (twice: the A/A pair) and DDP with a bare Python hook
    launches    of each model
    rounds      least blocks per row and launch; four times as many for short steps
    steps       per block, fewer if they are long; twice as many for short ones
    deciders, workers   policies whose decisions are timed, and for how many workers
    decisions   timed for each
    """

    step_ms: tuple[float, ...] = (2.0, 22.0, 131.0)
    policies: tuple[str, ...] = ("static", "goodput", "dynamix", "stigmergic")
    launches: int = 6
    rounds: int = 6
    steps: int = 50
    deciders: tuple[str, ...] = ("dynamix", "goodput")
    workers: tuple[int, ...] = WORKERS
    decisions: int = DECISIONS

    @classmethod
    def of(cls, *, quick: bool = False, **chosen: Any) -> OverheadPlan:
        """`quick`: two short models, three launches. A value of `chosen` that is None changes nothing."""
        usual: dict[str, Any] = (
            {"step_ms": (2.0, 22.0), "launches": 3, "rounds": 3, "steps": 30, "decisions": 50} if quick else {}
        )
        return cls(**{**usual, **{name: value for name, value in chosen.items() if value is not None}})

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be run, before anything is started."""
        cores = len(os.sched_getaffinity(0))
        if cores < RANKS:
            allowed = f"{RANKS} or more cores, one for each rank"
            raise ConfigError("cores", cores, allowed, "say --decision-only on a machine with one core")
        for name in (*self.policies, *self.deciders):
            make_policy(name)
        for name, values, low, high in (
            ("step_ms", self.step_ms, 0.1, 10_000.0),
            ("workers", self.workers, 1, 100_000),
            ("launches", (self.launches,), 1, 1000),
            ("rounds", (self.rounds,), 1, 1000),
            ("steps", (self.steps,), INTERVAL, 100_000),
            ("decisions", (self.decisions,), 1, 1_000_000),
        ):
            for value in values:
                if not low <= value <= high:
                    raise ConfigError(name, value, f"{low:g} to {high:g}", "correct the argument")

    def blocks(self, step_ms: float, width: int, launch: int) -> Blocks:
        """How one launch of a model is timed. Blocks are whole windows of the controller."""
        short = step_ms < SHORT_MS
        most = int(1e3 * BLOCK_S / step_ms)
        steps = max(INTERVAL, min(self.steps * (2 if short else 1), most) // INTERVAL * INTERVAL)
        rounds = self.rounds * (4 if short else 1)
        warm_up = INTERVAL + INTERVAL // 2  # so that windows close inside blocks
        rows = (PLAIN, AGAIN, HOOK, *self.policies)
        return Blocks(rows, width, warm_up, steps, rounds, MOST * rounds, launch * rounds)


@dataclass(frozen=True)
class OverheadSuite(Suite):
    """More step times, launches and workers can be added to a folder, at the commit with which it was begun."""

    plan: OverheadPlan
    name: str = "overhead"
    grows: ClassVar[frozenset[str]] = frozenset({"step_ms", "launches"})

    def facts(self) -> dict[str, Any]:
        return {"cluster": f"{RANKS} gloo processes, one thread each, loopback", "seeds": [0]}

    def bound_to(self) -> dict[str, Any]:
        return {"commit": commit()}

    def cells(self) -> list[Cell]:
        sizes = [Cell(_size(ms), (ms, None)) for ms in self.plan.step_ms]
        each = [(ms, launch) for launch in range(self.plan.launches) for ms in self.plan.step_ms]
        launches = [Cell(f"{_size(ms)}-{launch}", (ms, launch)) for ms, launch in each]
        return [Cell("decisions"), Cell("memory"), *sizes, *launches]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        if cell.key == "decisions":
            return decisions(self.plan.deciders, workers=self.plan.workers, count=self.plan.decisions)
        if cell.key == "memory":
            return {"memory": memory()}
        (ms, launch) = cell.what
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            if launch is None:
                given = {rank: (rank, store, 1e-3 * ms) for rank in range(RANKS)}
                return {"width": dict(in_processes(find_width, given, RANKS))[0]}
            blocks = self.plan.blocks(ms, context.found[_size(ms)]["width"], launch)
            load, began = os.getloadavg()[0], time.monotonic()
            timed = dict(in_processes(time_blocks, {rank: (rank, store, blocks) for rank in range(RANKS)}, RANKS))
        cpu_s = {name: np.sum([timed[rank]["cpu_s"][name] for rank in timed], axis=0).tolist() for name in blocks.rows}
        about = {"load_average": [round(load, 2), round(os.getloadavg()[0], 2)], "launch_s": time.monotonic() - began}
        return {**about, "steps": blocks.steps, **timed[0], "cpu_s": cpu_s}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        jobs = {}
        for ms in self.plan.step_ms:
            launches = [cells[key] for i in range(self.plan.launches) if (key := f"{_size(ms)}-{i}") in cells]
            if launches:
                jobs[_size(ms)] = {**cells[_size(ms)], **summarise(launches)}
        ratios = {
            f"{size}: {name}/{PLAIN}": row["ratio"]
            for size, job in jobs.items()
            for name, row in job["rows"].items()
            if name != PLAIN
        }
        return {**cells.get("decisions", {}), **cells.get("memory", {}), "jobs": jobs, "ratios": ratios}

    def table(self, result: Mapping[str, Any]) -> str:
        return sections_markdown(sections(result))


def summarise(launches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A model's launches for the result: for each row milliseconds per step, and its ratios to plain DDP.

    step_ms, cpu_ms    medians over all blocks; processor time is that of all threads of both ranks
    call_ms            the same for `controller.step()` on rank 0, by the clock
    thread_over_ms     additional time of rank 0's training thread over plain DDP; intervals as for the ratios
    ratio, cpu_ratio   geometric means over launches of each launch's median over blocks, with Student's t
    """
    names, steps = list(launches[0]["wall_s"]), launches[0]["steps"]
    rows = {}
    for name in names:
        row: dict[str, Any] = {}
        for what, clock, ratio in (("wall_s", "step_ms", "ratio"), ("cpu_s", "cpu_ms", "cpu_ratio")):
            row[clock] = round(float(np.median([1e3 * s / steps for one in launches for s in one[what][name]])), 4)
            row[ratio] = _interval(np.array([np.median(_logs(one[what], name)) for one in launches]))
        over = [np.median(np.array(one["thread_s"][name]) - one["thread_s"][PLAIN]) / steps for one in launches]
        row["thread_over_ms"] = {k: v and round(1e3 * v, 4) for k, v in mean_interval(over).to_dict().items()}
        calls = [1e3 * s / steps for one in launches for s in one["call_s"].get(name, [])]
        row["call_ms"] = round(float(np.median(calls)), 4) if calls else None
        rows[name] = row
    blocks = sum(len(one["wall_s"][PLAIN]) for one in launches)
    loads = [one["load_average"] for one in launches]
    return {"launches": len(launches), "blocks": blocks, "steps": steps, "rows": rows, "load_average": loads}


def _logs(seconds: Mapping[str, Sequence[float]], name: str) -> Floats:
    return np.asarray(np.log(np.array(seconds[name]) / np.array(seconds[PLAIN])))


def _interval(logs: Floats) -> dict[str, float | None]:
    found = mean_interval(logs).to_dict()
    names = {"mean": "median", "low": "low", "high": "high"}
    return {names[key]: None if value is None else round(float(np.exp(value)), 5) for key, value in found.items()}


def decisions(policies: Sequence[str], *, workers: Sequence[int] = WORKERS, count: int = DECISIONS) -> dict[str, Any]:
    """`decision_ms` by policy and number of workers, rank 0's other work, and the goals for processor time."""
    found = {name: {str(w): decision_times(name, workers=w, decisions=count) for w in workers} for name in policies}
    beside = {str(w): beside_times(workers=w, windows=min(count, BESIDE_WINDOWS)) for w in MANY}
    return {"decision_ms": found, "beside_ms": beside, "goal": {"decision_cpu_ms": GOAL_MS, "beside_cpu_ms": BESIDE_MS}}


def sections(result: Mapping[str, Any]) -> list[Section]:
    """A table for each model's rows, and one for decisions."""
    parts = []
    for size, job in result.get("jobs", {}).items():
        rows = [
            [
                name,
                number(row["step_ms"], 3),
                "1" if name == PLAIN else with_interval(row["ratio"]),
                number(row["cpu_ms"], 3),
                "1" if name == PLAIN else with_interval(row["cpu_ratio"]),
                *([_of_thread(row["thread_over_ms"])] if "thread_over_ms" in row else []),
                number(row["call_ms"], 3),
            ]
            for name, row in job["rows"].items()
        ]
        over = f"over {PLAIN} (95 %)"
        head = ["row", "a step, ms", over, "processor, ms a step", over, "`controller.step()`, ms"]
        if "thread_over_ms" in job["rows"][PLAIN]:  # missing in older results
            head.insert(-1, f"rank 0's training thread, ms a step {over}")
        about = f"Two hidden layers of {job['width']}. {job['launches']} launches, {job['blocks']} blocks of "
        about += f"{job['steps']} steps for each row; processor time is of all threads of both ranks."
        parts.append(Section(f"Steps of {size.removesuffix('ms')} ms", text=[about], table=Table(head, rows)))
    if "decision_ms" in result:
        parts.append(Section("A decision", table=decision_table(result)))
    if "memory" in result:
        parts.append(Section("Peak memory of a rank", table=memory_table(result["memory"])))
    if "beside_ms" in result:
        parts.append(Section("Rank 0 beside the decision, a window", table=beside_table(result)))
    return parts


def _of_thread(over_ms: Mapping[str, float | None]) -> str:
    mean, high = over_ms["mean"], over_ms["high"]
    return f"{number(mean, 3)} ± {number(None if mean is None or high is None else high - mean, 3)}"


def decision_table(result: Mapping[str, Any]) -> Table:
    """A row per policy and number of workers."""
    rows = [
        [
            name,
            workers,
            *(number(ms[part], 2) for part in ("cpu", "cpu_p99", "decision", "line")),
            f"{ms['line_bytes'] / 1000:.1f}",
        ]
        for name, by_workers in result["decision_ms"].items()
        for workers, ms in by_workers.items()
    ]
    goal = f"decision and events line, processor ms (goal: {result['goal']['decision_cpu_ms']:g})"
    return Table(["policy", "workers", goal, "99th percentile", "decision", "line", "line, kB"], rows)


def beside_table(result: Mapping[str, Any]) -> Table:
    """A row per number of workers."""
    goal = f"in all, processor ms (goal: {result['goal']['beside_cpu_ms']:g})"
    heads = ["workers", goal, "rows copied", "window", "message", "events line"]
    parts = ("all", "rows", "window", "message", "line")
    rows = [[workers, *(number(ms[part], 2) for part in parts)] for workers, ms in result["beside_ms"].items()]
    return Table(heads, rows)


def _size(step_ms: float) -> str:
    """
    >>> _size(22.0)
    '22ms'
    """
    return f"{step_ms:g}ms"
