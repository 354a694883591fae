"""Families that a suite gets from outside: a module of the user's own."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.suites.outside import load_families
from dynamix_lab.suites.simulated import SimulatedPlan, SimulatedSuite, scaling_plan
from tests.refused import refused

MODULE = """
from dataclasses import replace
from dynamix_lab.simulator import sample_family

def slow(count, workers, seed):
    clusters = sample_family("affine-quiet", count, workers, seed)
    return replace(clusters, alpha=2 * clusters.alpha)

def families():
    return {"slow": slow, "quiet.too": lambda *asked: sample_family("affine-quiet", *asked)}

nothing, no_mapping, number = dict, list, 3
def known(): return {"pai-steady": slow}
def name(): return {"Slow one": slow}
def no_sampler(): return {"slow": 3}
def wrong_type(): return {"slow": lambda *asked: "clusters"}
def wrong_shape(): return {"slow": lambda count, workers, seed: slow(count + 1, workers, seed)}
def no_number(): return {"slow": lambda *asked: replace(slow(*asked), alpha=float("nan") * slow(*asked).alpha)}
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "reserved_for_tests.py"
    file.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "reserved_for_tests", raising=False)
    return file


def test_plans_take_all_families_of_the_function() -> None:
    place = "reserved_for_tests:families"
    plan = scaling_plan(quick=True, families_from=place)
    assert {family for family, _ in plan.cells} == {"slow", "quiet.too"}
    dataclasses.replace(plan, cells=(("slow", 8), ("pai-steady", 8))).check()
    assert scaling_plan(quick=True, families_from=place).cells[:4] == tuple(("slow", w) for w in (2, 8, 32, 128))


def test_suite_runs_on_them_and_its_result_names_the_source(tmp_path: Path, module: Path) -> None:
    plan = SimulatedPlan((("slow", 8),), ("lb_bsp",), seeds=(710_001,), families_from="reserved_for_tests:families")
    plan = dataclasses.replace(plan, clusters=3, windows=12, references=("lagged",))
    result = run_suite(SimulatedSuite(plan), RunFolder("test", tmp_path / "run"), tell=lambda *_: None)
    assert result["pairs"] == ["slow-8"]
    assert result["plan"]["families_from"] == "reserved_for_tests:families"
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["bound_to"]["families_sha256"]) == 64
    module.write_text(MODULE + "# changed\n")
    with pytest.raises(ConfigError, match="families_sha256"):
        run_suite(SimulatedSuite(plan), RunFolder("test", tmp_path / "run", resume=True), tell=lambda *_: None)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("reserved_for_tests", "MODULE:FUNCTION"),
        ("not_there_at_all:families", "not_there_at_all"),
        ("reserved_for_tests:number", "behind the colon"),
        ("reserved_for_tests:missing", "behind the colon"),
        ("reserved_for_tests:nothing", "mapping"),
        ("reserved_for_tests:no_mapping", "mapping"),
        ("reserved_for_tests:known", "pai-steady"),
        ("reserved_for_tests:name", "Slow one"),
        ("reserved_for_tests:no_sampler", "callable"),
    ],
)
def test_what_gives_no_families_is_refused(place: str, said: str) -> None:
    refused(ConfigError, said, load_families, place)


@pytest.mark.parametrize(
    ("function", "said"), [("wrong_type", "Clusters"), ("wrong_shape", "shape"), ("no_number", "alpha")]
)
def test_clusters_that_cannot_be_played_are_refused_before_anything_runs(function: str, said: str) -> None:
    plan = scaling_plan(quick=True, policies=("lb_bsp",), families_from=f"reserved_for_tests:{function}")
    refused(ConfigError, said, plan.check)


def test_only_the_simulator_takes_them() -> None:
    command = ["bench", "scaling", "--cluster", "virtual", "--families-from", "reserved_for_tests:families"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "--cluster simulator" in done.output
