"""`scripts/same` notices what it is there for: any value that is not the same to the last bit."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.processes import call

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def same() -> ModuleType:
    """The script as a module."""
    loader = SourceFileLoader("scripts_same", str(ROOT / "scripts" / "same"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    sys.modules[loader.name] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _told(**changed: Any) -> dict[str, Any]:
    told = {"samples": [[3, 1], [2]], "losses": [0.5, math.nan], "parameters": {"weight": [1.0, -0.0]}}
    return {**told, "decisions": [{"decision": "new", "allocation": [6, 2]}], **changed}


def test_equal_reports_have_no_differences(same: ModuleType) -> None:
    assert same.of_case([_told(), _told()], [_told(), _told()]) == []


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"losses": [math.nextafter(0.5, 1), math.nan]}, ("losses", 0)),
        ({"losses": [0.5]}, ("losses", 1)),
        ({"samples": [[1, 3], [2]]}, ("samples", 0)),
        ({"parameters": {"weight": [1.0, 0.0]}}, ("parameters weight", 1)),
        ({"parameters": {}}, ("parameters weight", None)),
        ({"decisions": [{"decision": "new", "allocation": [5, 3]}]}, ("decisions allocation", 0)),
        ({"decisions": [{"decision": "late", "allocation": [6, 2]}]}, ("decisions decision", 0)),
        ({"rates": [0.1]}, ("rates", None)),
        ({"error": "ConfigError: no such option"}, ("error", None)),
    ],
)
def test_every_difference_is_named(same: ModuleType, changed: dict[str, Any], where: tuple[str, int | None]) -> None:
    for here, there in ((_told(), _told(**changed)), (_told(**changed), _told())):
        (found,) = same.of_case([_told(), here], [_told(), there])
        assert (found.rank, found.what, found.step) == (1, *where)
        assert repr(found.here) != repr(found.there)


def test_a_job_that_runs_in_neither_tree_differs(same: ModuleType) -> None:
    assert len(same.of_case([{"error": "no"}], [{"error": "no"}])) == 1


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_change_of_one_line_is_noticed_where_it_acts_and_nowhere_else(tmp_path: Path) -> None:
    """The jobs of `resume` have another policy."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "src/dynamix/policies/goodput.py"
    changed = path.read_text().replace("GROWTH = 0.02\n", "GROWTH = 0.03\n")
    assert changed != path.read_text()
    path.write_text(changed)
    report = tmp_path / "report.json"
    command = [ROOT / "scripts" / "same", tmp_path, "--cases", "gradients-goodput-3", "resume", "--json", report]
    done = call(*command, timeout_s=250)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(report.read_text())["cases"]
    assert found["resume"] == []
    assert "decisions allocation" in {difference["what"] for difference in found["gradients-goodput-3"]}
    assert "error" not in {difference["what"] for difference in found["gradients-goodput-3"]}
