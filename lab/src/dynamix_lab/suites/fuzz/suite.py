"""`dynamix bench fuzz`: any number of damaged states, events, policy files, scenarios, traces and aggregator frames;
resumable.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dynamix.errors import ConfigError
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.installed import how_to_install
from dynamix_lab.report import Table, document, number
from dynamix_lab.suites.fuzz.guided import guided
from dynamix_lab.suites.fuzz.run import KINDS, fuzz
from dynamix_lab.suites.fuzz.targets import targets

CELL = 10_000  # inputs per cell
GROWTH_MB = 64.0  # limit on a process's growth


@dataclass(frozen=True, slots=True)
class FuzzPlan:
    """The kinds of input, how many of each (rounded up to whole cells of `cell`), and the first seed.

    guided   by coverage, with atheris
    """

    kinds: tuple[str, ...] = KINDS
    inputs: int = 200_000
    seed: int = 0
    cell: int = CELL
    guided: bool = False

    @classmethod
    def of(cls, *, kinds: tuple[str, ...] | None = None, inputs: int, seed: int = 0, guided: bool = False) -> FuzzPlan:
        """All kinds if none is chosen."""
        return cls(kinds or KINDS, inputs, seed, min(CELL, inputs), guided)

    def check(self) -> None:
        for name in self.kinds:
            if name not in KINDS:
                raise ConfigError("kinds", name, ", ".join(KINDS), "choose of these")
        if self.guided and importlib.util.find_spec("atheris") is None:
            raise ConfigError("guided", True, "False, where atheris is not installed", how_to_install("fuzz"))
        for field in ("inputs", "cell"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "1 or more", "check the argument")


@dataclass
class FuzzSuite(Suite):
    """The suite for the harness."""

    plan: FuzzPlan
    name: str = "fuzz"
    grows: ClassVar[frozenset[str]] = frozenset({"kinds", "inputs"})

    def facts(self) -> dict[str, Any]:
        return {"cluster": "one process a cell", "seeds": [self.plan.seed], "goal": {"grown_mb": GROWTH_MB}}

    def cells(self) -> Sequence[Cell]:
        parts = range(-(-self.plan.inputs // self.plan.cell))
        return [Cell(f"{kind}-{part}", (kind, part)) for part in parts for kind in self.plan.kinds]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        kind, part = cell.what
        seed = 1000 * self.plan.seed + part
        if self.plan.guided:
            return {"kind": kind, **guided(kind, inputs=self.plan.cell, seed=seed)}
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = targets(Path(folder))[kind]()
            found = fuzz(target, inputs=self.plan.cell, seed=seed)
        return {"kind": kind, **found}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        kinds: dict[str, Any] = {}
        for key, cell in cells.items():
            told = kinds.setdefault(cell["kind"], {"grown_mb": 0.0, "escapes": {}})
            for name in ("inputs", "taken", "refused", "foreign", "trained_out", "seconds"):
                told[name] = round(told.get(name, 0) + cell.get(name, 0), 1)
            told["grown_mb"] = max(told["grown_mb"], cell["grown_mb"])
            told["escapes"] |= {f"{key}: {what}": about for what, about in cell["escapes"].items()}
        return {"inputs": sum(told["inputs"] for told in kinds.values()), "kinds": kinds}

    def table(self, result: Mapping[str, Any]) -> str:
        said = f"{result['inputs']:,} inputs. Every one gives an error of ours, or loads to an equal state."
        escapes = [f"- {what}: {about}" for told in result["kinds"].values() for what, about in told["escapes"].items()]
        return document(said, table(result), "\n".join(escapes))


def table(result: Mapping[str, Any]) -> Table:
    """A row per kind of input."""
    goal = result["goal"]["grown_mb"]
    heads = ["input", "tried", "taken", "refused", "another error", "trained out", f"growth, MB (goal: {goal:g})"]
    rows = [
        [
            kind,
            *(f"{told[name]:,.0f}" for name in ("inputs", "taken", "refused", "foreign")),
            f"{told['trained_out']:,.0f}" if kind == "states" else "–",
            number(told["grown_mb"], 0),
        ]
        for kind, told in result["kinds"].items()
    ]
    return Table(heads, rows)
