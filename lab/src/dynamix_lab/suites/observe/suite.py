"""`dynamix bench observe`: injected slow ranks, what pays, promised gains, thread time; resumable by cell."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dynamix.errors import ConfigError
from dynamix_lab.harness.processes import in_processes
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Section, Table, number, sections_markdown
from dynamix_lab.statistics import mean_interval
from dynamix_lab.suites.observe.cases import Case, draw_cases, run_case
from dynamix_lab.suites.observe.gains import PLACES, run_place
from dynamix_lab.suites.observe.overhead import time_observed
from dynamix_lab.suites.observe.pays import JOBS, run_job

KINDS = ("cases", "pays", "gains", "overhead")
LEAST_OFF, MOST_OFF = -0.10, 0.05  # a promised gain over the reached one, less 1
MOST_OVERHEAD = 0.005
WIDTH = 900  # of the model whose steps take some 20 ms of processor time
LAUNCHES = 8


@dataclass(frozen=True, slots=True)
class ObservePlan:
    """The settings of one call.

    kinds     from `KINDS`
    cases     injected slow ranks
    policy    with which a promise of balance is compared
    blocks    pairs of blocks for the overhead, in all launches together; `steps` per block
    """

    kinds: tuple[str, ...] = KINDS
    cases: int = 20
    seed: int = 22
    policy: str = "lb_bsp"
    blocks: int = 800
    steps: int = 10
    width: int = WIDTH

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be run."""
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ConfigError("only", self.kinds, ", ".join(KINDS), "name some of these, separated by commas")
        for name, value in (("cases", self.cases), ("blocks", self.blocks), ("steps", self.steps)):
            if not 1 <= value <= 100_000:
                raise ConfigError(name, value, "1 to 100,000", "correct the argument")


@dataclass(frozen=True)
class ObserveSuite(Suite):
    """`dynamix bench observe`. Kinds can be added to a folder."""

    plan: ObservePlan
    name: str = "observe"
    grows: ClassVar[frozenset[str]] = frozenset({"kinds"})

    def facts(self) -> dict[str, Any]:
        where = "gloo processes over loopback; emulator for links and devices"
        return {"cluster": "emulator", "mechanisms": {"where": where}, "seeds": [self.plan.seed]}

    def cells(self) -> list[Cell]:
        found: list[Cell] = []
        if "cases" in self.plan.kinds:
            cases = draw_cases(self.plan.cases, self.plan.seed)
            found += [Cell(f"case-{i:02d}-{case.part}", ("case", case)) for i, case in enumerate(cases)]
        if "pays" in self.plan.kinds:
            found += [Cell(f"pays-{name}", ("pays", name)) for name in JOBS]
        if "gains" in self.plan.kinds:
            found += [Cell(f"gain-{name}", ("gain", name)) for name in PLACES]
        if "overhead" in self.plan.kinds:
            found += [Cell(f"overhead-{i}", ("overhead", i)) for i in range(LAUNCHES)]
        return found

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        kind, what = cell.what
        with tempfile.TemporaryDirectory() as folder:
            if kind == "case":
                case: Case = what
                about = {"wanted": [case.slow, case.part], "ranks": case.ranks, "sleep_s": case.sleep_s}
                return {**about, **run_case(case, Path(folder)), "load_average": os.getloadavg()[0]}
            if kind in ("gain", "pays"):
                run = run_place if kind == "gain" else run_job
                return {**run(what, self.plan.policy, Path(folder)), "load_average": os.getloadavg()[0]}
            blocks = -(-self.plan.blocks // LAUNCHES)
            given = {r: (r, str(Path(folder) / "store"), self.plan.width, blocks, self.plan.steps) for r in range(2)}
            return dict(in_processes(time_observed, given, 2))[0]

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        cases = {key: cell for key, cell in cells.items() if key.startswith("case-")}
        places = {key.removeprefix("gain-"): cell for key, cell in cells.items() if key.startswith("gain-")}
        launches = [cell for key, cell in cells.items() if key.startswith("overhead-")]
        found: dict[str, Any] = {"cases": cases, "named": sum(cell["right"] for cell in cases.values())}
        found["pays"] = {key.removeprefix("pays-"): cell for key, cell in cells.items() if key.startswith("pays-")}
        found["gains"] = {
            name: {**cell, "within": bool(LEAST_OFF <= cell["off"] <= MOST_OFF)} for name, cell in places.items()
        }
        return {**found, "overhead": overhead(launches) if launches else None}

    def table(self, result: Mapping[str, Any]) -> str:
        return sections_markdown(sections(result))


def overhead(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Thread time of observed blocks over that of others: the middle half of all pairs, and between launches."""
    pairs = [(one["off"][i], one["on"][i]) for one in launches for i in range(len(one["off"]))]
    off, on = np.array(pairs).T
    more = on / off - 1
    trimmed = np.sort(more)[len(more) // 4 : len(more) - len(more) // 4]
    by_launch = [float(np.median(np.array(one["on"]) / np.array(one["off"])) - 1) for one in launches]
    interval = mean_interval(by_launch)
    return {
        "blocks": len(pairs),
        "thread_ms_a_block": float(1e3 * np.median(off)),
        "added": float(trimmed.mean()),
        "added_by_launch": by_launch,
        "low": interval.low,
        "high": interval.high,
        "within": bool(trimmed.mean() <= MOST_OVERHEAD),
    }


def sections(result: Mapping[str, Any]) -> list[Section]:
    """A section for each kind that ran."""
    found = []
    if cases := result["cases"]:
        rows = [
            [key, str(case["ranks"]), "rank {}, {}".format(*case["wanted"]), f"rank {case['rank']}, {case['part']}"]
            for key, case in cases.items()
        ]
        title = f"{result['named']} of {len(cases)} slow ranks were named with their part"
        found.append(Section(title, table=Table(["case", "ranks", "slow", "named"], rows)))
    if jobs := result.get("pays"):  # older results have none
        found.append(_pays(jobs))
    if gains := result["gains"]:
        rows = [
            [
                name,
                number(g["promised"], 3),
                f"{number(g['low'], 3)} to {number(g['high'], 3)}",
                number(g["reached"], 3),
                f"{g['off']:+.1%}",
                "yes" if g["within"] else "NO",
            ]
            for name, g in gains.items()
        ]
        header = ["place", "promised", "80 % sure", "reached", "off", f"within {LEAST_OFF:+.0%}, {MOST_OFF:+.0%}"]
        found.append(Section("Balance, as promised and as reached", table=Table(header, rows)))
    if cost := result["overhead"]:
        whose = "the training thread" if "thread_ms_a_block" in cost else "all threads"  # for older results
        block_ms = cost.get("thread_ms_a_block", cost.get("cpu_ms_a_block"))
        row = [str(cost["blocks"]), number(block_ms, 1), f"{cost['added']:+.2%}"]
        row.append(f"{cost['low']:+.2%} to {cost['high']:+.2%}")
        header = ["pairs of blocks", "processor ms a block", "added by observing", "over launches"]
        found.append(Section(f"Processor time of {whose}", table=Table(header, [row])))
    return found


def _pays(jobs: Mapping[str, Any]) -> Section:
    def cell(job: Mapping[str, Any], way: str) -> str:
        gain, reached = job["promised"][way], job["reached"].get(way)
        said = "–" if gain is None else f"{gain['median']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"
        return f"{said}; {'–' if reached is None else f'{reached:.2f}'}"

    ways = ("alone", "without", "balance")
    rows = [
        [name, job["said"] or "–", *(cell(job, way) for way in ways), "yes" if job["right"] else "NO"]
        for name, job in jobs.items()
    ]
    right, alone = (
        sum(job[key] == value for job in jobs.values()) for key, value in (("right", True), ("pays", False))
    )
    title = f"Whether distributing pays was said right of {right} of {len(jobs)} jobs; in {alone} one worker is as fast"
    heads = ["one alone: promised; reached", "without the slowest", "balance"]
    return Section(title, table=Table(["job", "named", *heads, "right"], rows))
