"""What every suite gets from the harness, with one that only counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dynamix.errors import ConfigError, StateError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import Cell, Context, Suite, run_suite
from tests.refused import refused


@dataclass(frozen=True)
class CountPlan:
    names: tuple[str, ...] = ("a", "b", "c")
    factor: int = 2

    def check(self) -> None:
        if self.factor < 1:
            raise ConfigError("factor", self.factor, "1 or more", "choose another")


@dataclass(frozen=True)
class CountSuite(Suite):
    """A cell is the sum of those before it and the factor; cells called "x" are never final."""

    plan: CountPlan
    name: str = "count"
    grows: ClassVar[frozenset[str]] = frozenset({"names"})

    def facts(self) -> dict[str, Any]:
        return {"cluster": "none", "seeds": []}

    def cells(self) -> list[Cell]:
        return [Cell(name) for name in self.plan.names]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        return {"final": cell.key != "x", "value": sum(c["value"] for c in context.found.values()) + self.plan.factor}

    def keeps(self, found: Mapping[str, Any]) -> bool:
        return bool(found["final"])

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        return {"values": {key: cell["value"] for key, cell in cells.items()}}

    def table(self, result: Mapping[str, Any]) -> str:
        return f"{result['values']}\n"


def _resumed(path: Path, plan: CountPlan) -> tuple[dict[str, Any], list[str]]:
    told: list[str] = []
    result = run_suite(
        CountSuite(plan), RunFolder("count", path, resume=True), tell=lambda what, done: told.append(what)
    )
    return result, told


def test_a_result_names_its_command_and_its_plan(tmp_path: Path) -> None:
    result = run_suite(CountSuite(CountPlan()), RunFolder("count", tmp_path / "run"), command="dynamix bench count -x")
    assert result["values"] == {"a": 2, "b": 4, "c": 8}
    assert (result["command"], result["plan"]["factor"]) == ("dynamix bench count -x", 2)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    host = json.loads((tmp_path / "run" / "run.json").read_text())["host"]
    assert host["memory_bytes"] > 0
    assert len(host["load_average"]) == 3


def test_what_is_final_is_not_run_again_and_cells_may_be_added(tmp_path: Path) -> None:
    run_suite(CountSuite(CountPlan(("a", "x"))), RunFolder("count", tmp_path / "run"))
    result, told = _resumed(tmp_path / "run", CountPlan(("a", "x", "c")))
    assert told == ["x", "c"]
    assert result["values"] == {"a": 2, "x": 4, "c": 8}


def test_another_plan_and_a_damaged_cell_are_refused_and_named(tmp_path: Path) -> None:
    run_suite(CountSuite(CountPlan()), RunFolder("count", tmp_path / "run"))
    refused(
        ConfigError, "plan: factor=3 is not possible: allowed is 2", _resumed, tmp_path / "run", CountPlan(factor=3)
    )
    refused(ConfigError, "factor=0", _resumed, tmp_path / "run", CountPlan(factor=0))
    (tmp_path / "run" / "cells" / "b.json").write_text("{")
    refused(StateError, r"b\.json is damaged", _resumed, tmp_path / "run", CountPlan())


def test_what_ended_before_an_interrupt_is_concluded(tmp_path: Path) -> None:
    def stop(what: str, done: float) -> None:
        if what == "c":
            raise KeyboardInterrupt

    refused(KeyboardInterrupt, "", run_suite, CountSuite(CountPlan()), RunFolder("count", tmp_path / "run"), tell=stop)
    partly = json.loads((tmp_path / "run" / "result.json").read_text())
    assert partly["interrupted"]
    assert partly["values"] == {"a": 2, "b": 4}
    assert "interrupted" not in _resumed(tmp_path / "run", CountPlan())[0]


@dataclass(frozen=True)
class Bound(CountSuite):
    """Bound to something that may change between calls."""

    to: str = "this machine"

    def bound_to(self) -> dict[str, Any]:
        return {"machine": self.to}


def test_a_suite_of_times_is_resumed_only_where_it_began(tmp_path: Path) -> None:
    first = Bound(CountPlan())
    run_suite(first, RunFolder("count", tmp_path / "run"))
    with pytest.raises(ConfigError, match="machine='another'"):
        run_suite(replace(first, to="another"), RunFolder("count", tmp_path / "run", resume=True))
