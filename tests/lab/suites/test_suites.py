"""The suites: simulated cells that resume, shares of the attainable cut, and processes that play them."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time

import pytest

from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.run_folder import RunFolder
from dynamix.policies import make_policy
from dynamix.window import Bounds, Window
from dynamix_lab.harness.processes import in_processes
from dynamix_lab.harness.reference import references
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.suites.fidelity.suite import lines, run_fidelity
from dynamix_lab.suites.simulated import SimulatedPlan, SimulatedSuite, run_cell, scaling_plan
from tests.refused import refused

SMALL = SimulatedPlan(
    (("affine-slowdowns", 4), ("pai-steady", 2)), ("dbs", "lb_bsp"), seeds=(1,), clusters=6, windows=25
)


def test_a_cell_holds_every_policy_reference_and_the_attainable_cut() -> None:
    cell = run_cell(SMALL, "affine-slowdowns", 4)
    assert set(cell["policies"]) == {"static", "dbs", "lb_bsp", "lagged", "greedy", "hedged"}
    assert cell["policies"]["lagged"]["lagged_over_time"] == 1.0
    assert 0.05 < cell["attainable_cut"] < 0.9
    assert cell["policies"][cell["attained_by"]]["fraction_of_cut"] == pytest.approx(1.0)
    assert 0 < cell["interior_share"] <= 1
    assert cell == run_cell(SMALL, "affine-slowdowns", 4)


def test_a_suite_compares_its_cells_and_leaves_a_whole_folder(tmp_path) -> None:
    result = run_suite(SimulatedSuite(SMALL), RunFolder("test", tmp_path / "run"))
    assert result["pairs"] == ["affine-slowdowns-4", "pai-steady-2"]
    assert len(result["policies"]["dbs"]["time_to_target_s"]) == 2
    assert result["ratios"]["lagged/static"]["median"] < 1
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert "| pai-steady-2 |" in (tmp_path / "run" / "table.md").read_text()
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


def test_suites_name_what_they_run_and_refuse_unknown_names() -> None:
    assert max(w for _, w in scaling_plan(quick=False).cells) == 1024
    refused(ConfigError, "family", dataclasses.replace(SMALL, cells=(("nonsense", 4),)).check)
    refused(ConfigError, "policy", dataclasses.replace(SMALL, policies=("nonsense",)).check)


def test_fidelity_prints_held_out_errors_within_their_goal() -> None:
    result = run_fidelity()
    assert result["held_out_step_time"]["jabas"]["inside"]["mean_absolute"] <= result["goal"]["mean_absolute"]
    assert any("held out" in line for line in lines(result))


def test_a_piece_that_is_killed_ends_the_others() -> None:
    # The other piece would take longer than a test may.
    refused(WorkerLostError, "killed", list, in_processes(_killed, {"a": (0.0,), "b": (1e3,)}, 2))
    refused(WorkerLostError, "killed", list, in_processes(_killed, {"b": (1e3,), "a": (0.0,)}, 2))
    assert not multiprocessing.active_children()


def _killed(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def test_pieces_end_with_whoever_asked_for_them() -> None:
    pieces = in_processes(time.sleep, {"short": (0.0,), "long": (1e3,)}, 2)
    assert next(pieces) == ("short", None)
    pieces.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


def test_a_reference_may_hold_another_global_batch() -> None:
    window = Window.of([128] * 4, compute=0.2, steps=5)
    held = make_policy("reference:256", others=references("demo")).decide(window, Bounds.of(4))
    kept = make_policy("reference", others=references("demo")).decide(window, Bounds.of(4))
    assert (held.sum(), kept.sum()) == (256, 512)
    refused(ConfigError, "reference:NUMBER", make_policy, "reference:much", others=references("demo"))
