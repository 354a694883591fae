"""`dynamix bench cost --against REV`: what decisions and training rounds cost beside what they cost under REV.

The two revisions take turns, each time in a fresh process, so that a machine that others use too slows both alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamix.errors import ConfigError
from dynamix.events.run_folder import commit
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Table
from dynamix_lab.statistics import paired_ratio
from dynamix_lab.suites.decisions.suite import SOURCE, DecisionsPlan, asked, source_of

PROGRAM = "dynamix_lab.suites.decisions.cost"
GOAL = 1.05


@dataclass(frozen=True, slots=True)
class CostPlan:
    """against: what git calls a revision of this repository; rounds: turns of each of the two."""

    against: str
    rounds: int = 8

    def check(self) -> None:
        """Raises `ConfigError` where there is no such revision, or nothing to do."""
        DecisionsPlan(self.against).check()
        if self.rounds < 2:
            raise ConfigError("rounds", self.rounds, "2 or more", "8, say: an interval needs pairs")


@dataclass(frozen=True)
class CostSuite(Suite):
    """A cell a turn: there, here, here, there, and so on."""

    plan: CostPlan
    name: str = "cost"

    def facts(self) -> dict[str, Any]:
        about = {"cluster": "one process, one thread", "seeds": [7], "target": f"at most {GOAL} of before"}
        return {**about, "against": DecisionsPlan(self.plan.against).revision()}

    def bound_to(self) -> dict[str, Any]:
        return {"commit": commit()}

    def cells(self) -> list[Cell]:
        turns = [("there", "here") if i % 2 == 0 else ("here", "there") for i in range(self.plan.rounds)]
        return [Cell(f"{i}-{which}") for i, turn in enumerate(turns) for which in turn]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        errors = context.folder.path / f"{cell.key}.err"
        if cell.key.endswith("-here"):
            return asked(PROGRAM, [], SOURCE, errors)
        with source_of(DecisionsPlan(self.plan.against).revision()) as source:
            return asked(PROGRAM, [], source, errors)

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        return found if len(found) == 2 * self.plan.rounds else {}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        def each(which: str) -> list[dict[str, float]]:
            turns = [cells[f"{i}-{which}"] for i in range(self.plan.rounds)]
            return [{**turn["decision_ms"], "training round": 500.0 * turn["training_s"]} for turn in turns]

        before, now = each("there"), each("here")
        ratios = {
            name: paired_ratio([turn[name] for turn in now], [turn[name] for turn in before]).to_dict()
            for name in before[0]
        }
        return {"ratios": ratios, "before_ms": before, "now_ms": now}

    def table(self, result: Mapping[str, Any]) -> str:
        return table(result).markdown()


def table(result: Mapping[str, Any]) -> Table:
    """A row for each thing that was timed."""
    rows = []
    for name, ratio in result["ratios"].items():
        low, high = ratio["low"], ratio["high"]
        times = [
            sorted(turn[name] for turn in result[which])[len(result[which]) // 2] for which in ("before_ms", "now_ms")
        ]
        rows.append([name, *(f"{value:,.2f}" for value in times), f"{ratio['median']:.3f} ({low:.3f}-{high:.3f})"])
    return Table(["processor time", "before, ms", "now, ms", "now / before (95 %)"], rows)
