"""The paper's tables on the virtual clock: its world, one tiny suite that resumes, and what is concluded from runs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.emulator import host_speeds
from dynamix_lab.harness.suite import Suite, run_suite
from dynamix_lab.report import sections_markdown
from dynamix_lab.suites.scaling.report import conclude, large_medium_small, sections
from dynamix_lab.suites.scaling.suite import ScalingPlan, ScalingSuite
from dynamix_lab.suites.scaling.virtual_world import NetEnv, at_workers
from dynamix_lab.tasks.net_costs import NetCosts
from tests.refused import refused

COSTS = NetCosts(0.01, 0.0005, 250_000)
TINY = dataclasses.replace(
    ScalingPlan((("vgg11-sgd", 8),), ("reference", "dynamix-paper"), seeds=(0,), sweep=(8, 16)),
    **{"samples": 600, "train": 1000, "test": 100, "scored": 100, "width": 8},
)


def test_the_scenario_repeats_its_hosts_and_disturbs_each_by_itself() -> None:
    few, many = at_workers("paper-like", 8), at_workers("paper-like", 32)
    assert (many.workers, many.total_cores) == (32, pytest.approx(4 * few.total_cores))
    speeds = np.array([host_speeds(many, t, 3) for t in range(0, 400, 8)]) / [host.cpu for host in many.hosts]
    assert 0.1 < (speeds < 1).mean() < 0.3
    assert not (speeds[:, :8] == speeds[:, 8:16]).all()
    refused(ConfigError, "multiple of 8", at_workers, "paper-like", 12)


def test_a_step_costs_the_slowest_hosts_computing_and_the_gradients_bytes() -> None:
    scenario = at_workers("paper-like", 8)
    small = NetEnv(scenario, COSTS, seed=1, batch_size=16, longest_s=100.0)
    large = NetEnv(scenario, dataclasses.replace(COSTS, parameters=1_000_000), seed=1, batch_size=16, longest_s=100.0)
    quick, slow = (float(np.mean([env.advance()[1][0] for _ in range(10)])) for env in (small, large))
    # A ring of eight sends 1.75 times the gradient over links of 50 Mbit/s, of which bursts take 20.
    bytes_s = 1.75 * 4 * 750_000 * 8e-6 / 50
    assert bytes_s * 0.95 < slow - quick < bytes_s * 50 / 30 * 1.2


def test_a_plan_takes_some_cases_and_longer_runs() -> None:
    plan = ScalingPlan.of(quick=False, cases=["vgg16-sgd"], workers=[8, 16], samples=270_000, seeds=4)
    assert plan.cells == (("vgg16-sgd", 8), ("vgg16-sgd", 16))
    assert (plan.samples, plan.every(), plan.seeds) == (270_000, 9_000, (0, 1, 2, 3))
    assert ScalingPlan.of(quick=False).samples < 270_000
    assert ScalingPlan.of(quick=True, samples=24_000).samples == 24_000
    for quick, case in ((False, "vgg12-sgd"), (True, "vgg16-sgd")):
        refused(ConfigError, "cases", ScalingPlan.of, quick=quick, cases=[case])
    refused(ConfigError, "samples", dataclasses.replace(plan, samples=3).check)


@pytest.mark.parametrize("given", [["--cases", "vgg16-sgd"], ["--samples", "9000"]])
def test_the_command_says_what_only_the_virtual_clock_has(given: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "scaling", *given])
    assert result.exit_code == 2
    assert "virtual with these options" in " ".join(result.output.split())


def test_the_command_hands_cases_and_samples_to_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    plans: list[ScalingPlan] = []

    def run(suite: Suite, folder: RunFolder, **_: Any) -> dict[str, Any]:
        plans.append(suite.plan)
        raise KeyboardInterrupt

    monkeypatch.setattr("dynamix_lab.harness.suite.run_suite", run)
    options = ["--workers", "8", "--cases", "vgg16-sgd,vgg11-sgd", "--samples", "9000", "--seeds", "2"]
    CliRunner().invoke(app, ["bench", "scaling", "--cluster", "virtual", *options, "--out", str(tmp_path / "x")])
    assert plans == [ScalingPlan.of(quick=False, workers=[8], cases=["vgg16-sgd", "vgg11-sgd"], samples=9_000, seeds=2)]


@pytest.mark.slow
def test_a_tiny_suite_trains_and_concludes(tmp_path: Any) -> None:
    ran: list[str] = []
    result = run_suite(ScalingSuite(TINY), RunFolder("scaling", tmp_path), tell=lambda what, done: ran.append(what))
    assert len(ran) == 2 + 3
    run = result["raw"]["vgg11-sgd-8"]["runs"]["dynamix-paper"][0]
    assert run["samples"][-1] >= TINY.samples
    assert run["time_s"] == sorted(run["time_s"])
    assert len(run["global_batch"]) == 30
    assert result == json.loads((tmp_path / "result.json").read_text())


def _run(step_s: float, scores: list[float], batches: list[float]) -> dict[str, Any]:
    ends = range(1, len(scores) + 1)
    course = {"time_s": [step_s * i for i in ends], "samples": [100 * i for i in ends], "score": scores}
    return {**course, "global_batch": batches, "wait_fraction": 0.1, "step_s": step_s, "cpu_s": 1.0}


def _cell(runs: dict[str, Any], samples: int) -> dict[str, Any]:
    seeds = list(range(len(runs["static"])))
    known = {"target": 0.8, "best_static": 16, "sweep_s": {}, "sweep_cpu_s": 3.0, "seeds": seeds}
    return {"runs": runs, "samples": samples, **known}


def test_conclusions_are_paired_censored_and_beside_the_paper() -> None:
    rising = [0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9, 0.9]
    even, falling = [128.0] * 6, [512.0, 400.0, 256.0, 200.0, 128.0, 100.0]
    runs = {
        "static": [_run(10, rising, even)] * 2,
        "goodput": [_run(6, rising, even)] * 2,
        "dynamix": [_run(5, rising, falling)] * 2,
        "dynamix-paper": [_run(5, [0.2] * 8, falling), _run(10, rising, even)],
    }
    found = conclude({"vgg16-sgd-8": _cell(runs, 800)})
    part = found["cells"]["vgg16-sgd-8"]
    assert (part["attainable_cut"], part["attained_by"]) == (pytest.approx(0.4), "goodput")
    ours, paper = part["policies"]["dynamix"], part["policies"]["dynamix-paper"]
    assert (ours["cut"], ours["goal_reached"]) == (pytest.approx(0.5), True)
    assert ours["gain_at_equal_samples"]["mean"] == 0.0
    assert ours["gain_at_equal_time"]["mean"] > 0.1  # static has just arrived there, the faster run is at its plateau
    assert paper["over_static"]["median"] == pytest.approx(2**0.5)  # one never arrives: twice static's time
    assert paper["goal_reached"] is False
    assert found["pattern"]["dynamix"] == {"runs": 2, "large_medium_small": 2}
    assert found["pattern"]["dynamix-paper"] == {"runs": 2, "large_medium_small": 1}
    assert "853 s to 652 s" in sections_markdown(sections(found))
    assert not large_medium_small(even)


def test_a_static_that_never_arrives_leaves_the_cell_without_ratios() -> None:
    runs = {"static": [_run(10, [0.1, 0.2, 0.3], [8.0] * 3)], "dynamix": [_run(10, [0.9, 0.9, 0.9], [8.0] * 3)]}
    found = conclude({"vgg16-sgd-8": _cell(runs, 300)})
    assert found["cells"]["vgg16-sgd-8"]["policies"] == {}
    assert "never reached" in sections_markdown(sections(found))
