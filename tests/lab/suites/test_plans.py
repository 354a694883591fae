"""`dynamix bench` stigmergy, disturbance and observe: what they compare, take away, conclude and refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix.policies.stigmergic.policy import Parameters
from dynamix.policies.stigmergic.traces import Own, TraceKind
from dynamix.window import Bounds, Window
from dynamix_lab.harness.suite import Cell, Context, run_suite, untold
from dynamix_lab.simulator import sample_family
from dynamix_lab.suites.disturbance import DisturbancePlan, DisturbanceSuite, disturbed, table
from dynamix_lab.suites.observe.cases import PARTS, draw_cases
from dynamix_lab.suites.observe.suite import LAUNCHES, ObservePlan, ObserveSuite
from dynamix_lab.suites.stigmergy.ablations import ABLATIONS
from dynamix_lab.suites.stigmergy.suite import StigmergyPlan, StigmergySuite
from dynamix_lab.suites.stigmergy.worlds import SlowedEnv, alike, without_a_quarter
from tests.refused import refused

SMALL = StigmergyPlan(
    **{"scenarios": ("steady", "elastic"), "workers": (4,), "studied": (4,), "seeds": (1,), "clusters": 3},
    **{"windows": 9, "ablations": (), "recovery": (3, 4), "resamples": 50, "cost_workers": (4,)},
)


def test_the_suite_reports_every_part(tmp_path: Path) -> None:
    result = run_suite(StigmergySuite(SMALL), RunFolder("test", tmp_path / "run"))
    assert list(result["cells"])[:3] == ["steady-4", "elastic-4", "vanished-4"]
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["pairs"] == ["steady-4", "elastic-4"]
    assert set(result["ratios"]) >= {f"stigmergic/{base}" for base in ("static", "dbs", "lb_bsp", "goodput", "dynamix")}
    assert result["cells"]["steady-4"]["pairs"] == 3
    assert set(result["cells"]["recovery-4"]["windows"]) >= {"static", "stigmergic", "dynamix"}
    table = (tmp_path / "run" / "table.md").read_text()
    assert all(word in table for word in ("one_rank", "vanished-4"))


def test_what_an_ablation_takes_away_is_not_there() -> None:
    window = Window.of([48, 16], steps=5, compute=[1.0, 3.0], compute_std=0.01, wait=[2.0, 0.0], communication=0.1)
    own, bounds = Own.of(window), Bounds.of(2)
    parameters = Parameters()
    _, left = ABLATIONS["no-noise-trace"](parameters).observe(own)
    assert left[..., [TraceKind.NOISE, TraceKind.HEARD]].tolist() == [[0.0, 0.0]] * 2
    assert (left[..., TraceKind.LOAD] > 0).all()
    late, whole = ABLATIONS["late"](parameters), ABLATIONS["whole"](parameters)
    assert late.decide(window, bounds).tolist() == [48, 16]
    assert late.decide(window, bounds).tolist() != [48, 16]
    assert whole.decide(window, bounds).tolist() != [48, 16]
    read = [ABLATIONS[name](parameters).decide(window, bounds).tolist() for name in ("noise", "noise", "whole")]
    assert read[0] == read[1] != read[2]


def test_a_quarter_of_the_workers_go_and_the_rest_take_their_samples() -> None:
    world = sample_family("link-contention", 3, 8, seed=1)
    left = without_a_quarter(world)
    assert left.shape == (3, 6)
    assert (left.base_batch % 6 == 0).all()
    assert left.noise_knots.shape == world.noise_knots.shape
    assert (alike(world).beta == world.beta[:, :1]).all()


def test_one_worker_slows_down_for_good() -> None:
    env = SlowedEnv(sample_family("affine-quiet", 2, 3, seed=1), seed=1)
    window = env.reset()
    window = env.step(window.batch_size)
    before = env.slowdown().copy()
    env.from_window = env.windows
    np.testing.assert_allclose(env.slowdown(), before * np.array([2.5, 1.0, 1.0]))


def test_every_policy_is_compared_with_equal_shares_and_the_rule_cuts_their_time() -> None:
    plan = dataclasses.replace(DisturbancePlan.of(quick=True), policies=("static", "dbs", "goodput"), epochs=8)
    suite = DisturbanceSuite(plan)
    context = Context(None, {}, untold)  # type: ignore[arg-type]
    found = suite.run(Cell("alike-4", ("alike", 4)), context)
    assert found["time_over_static"]["static"]["median"] == 1.0
    assert found["time_over_static"]["goodput"]["median"] < 1.0
    assert "alike-4" in table({"cells": {"alike-4": found}}).markdown()


def test_workers_that_are_alike_differ_by_the_disturbance_only() -> None:
    clusters = disturbed("alike", DisturbancePlan.of(quick=True), 4, 7)
    for costs in (clusters.alpha, clusters.beta):
        assert (costs == costs[:, :1]).all()
    assert (np.asarray(clusters.slow_weakest) > 1).all()
    assert (clusters.slow_strongest > np.asarray(clusters.slow_weakest)).all()


def test_impossible_plans_are_named() -> None:
    refused(ConfigError, "unknown", DisturbancePlan((("unknown", 4),)).check)
    refused(ConfigError, "static", DisturbancePlan(policies=("dbs",)).check)
    refused(ConfigError, "scenario", dataclasses.replace(SMALL, scenarios=("nonsense",)).check)
    refused(ConfigError, "only=", ObservePlan(kinds=("speed",)).check)
    refused(ConfigError, "no-noise-trace", dataclasses.replace(SMALL, ablations=("nonsense",)).check)


def test_cases_have_every_part_as_often_and_a_link_is_told_from_others() -> None:
    cases = draw_cases(20, 22)
    assert [case.part for case in cases] == 5 * list(PARTS)
    assert cases == draw_cases(20, 22)
    assert {case.ranks for case in cases} == {2, 3, 4}
    assert all(case.slow < case.ranks and (case.part != "network" or case.ranks > 2) for case in cases)
    assert len({case.slow for case in cases}) > 2


def test_what_it_concludes_counts_names_promises_and_processor_time() -> None:
    suite = ObserveSuite(ObservePlan(cases=2))
    assert [cell.key for cell in suite.cells()][:2] == ["case-00-forward", "case-01-backward"]
    case: dict[str, Any] = {"wanted": [1, "forward"], "ranks": 2, "rank": 1, "part": "forward", "right": True}
    place = {"promised": 1.4, "low": 1.3, "high": 1.5, "reached": 1.45, "off": 1.4 / 1.45 - 1}
    cells = {"case-00-forward": case, "case-01-backward": {**case, "rank": None, "right": False}}
    cells |= {"gain-one-slow": place, "gain-even": {**place, "reached": 1.2, "off": 1.4 / 1.2 - 1}}
    gain = {"median": 0.5, "low": 0.4, "high": 0.6}
    job = {"said": "balance", "pays": True, "right": True, "reached": {"alone": 0.55, "balance": 1.4}}
    job["promised"] = {"alone": gain, "without": None, "balance": {**gain, "median": 1.3}}
    cells |= {"pays-even": job, "pays-a-tenth": {**job, "pays": False, "right": False}}
    cells |= {f"overhead-{i}": {"off": [1.0, 2.0], "on": [1.004, 2.006]} for i in range(LAUNCHES)}
    result = suite.conclude(cells)
    assert result["named"] == 1
    assert [one["within"] for one in result["gains"].values()] == [True, False]
    assert result["overhead"]["added"] == pytest.approx(0.0035, abs=5e-4)
    assert result["overhead"]["within"]
    told = suite.table(result)
    assert "1 of 2 slow ranks" in told
    assert "said right of 1 of 2 jobs; in 1 one worker is as fast" in told
