"""`dynamix bench stigmergy` compares pairs, resumes, and learns the rule anew for every ablation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix.policies.stigmergic.policy import Parameters, StigmergicPolicy
from dynamix.policies.stigmergic.traces import Own, TraceKind
from dynamix.window import Bounds, Window
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.simulator import sample_family
from dynamix_lab.suites.stigmergy.ablations import ABLATIONS, Learning
from dynamix_lab.suites.stigmergy.cost import decision_costs
from dynamix_lab.suites.stigmergy.suite import StigmergyPlan, StigmergySuite
from dynamix_lab.suites.stigmergy.worlds import SlowedEnv, alike, without_a_quarter
from dynamix_lab.training.stigmergic import SearchConfig, train
from tests.refused import refused


class Little(Learning):
    """The recipe with one world, and few clusters to be chosen on."""

    def learned(self, name: str, tell: Callable[[str, float], None]) -> StigmergicPolicy:
        few = {"worlds": 1, "rows": 16, "windows": 8, "validation_workers": (2,), "validation_clusters": 2}
        recipe = SearchConfig(generations=self.generations, tried=self.tried, kept=2, **few)
        return train(recipe, rule=ABLATIONS[name], progress=tell)


SMALL = StigmergyPlan(
    **{"scenarios": ("steady", "elastic"), "workers": (4,), "studied": (4,), "seeds": (1,), "clusters": 3},
    **{"windows": 9, "ablated": ("steady",), "ablations": ("no-traces", "late"), "learning": Little((1, 0, 0, 0), 3)},
    **{"recovery": (3, 4), "resamples": 50, "cost_workers": (4,)},
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
    assert all(word in table for word in ("no-traces", "late", "one_rank", "vanished-4"))


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


def test_a_rank_s_own_decision_is_timed_at_every_w() -> None:
    for cost in decision_costs((3, 30), repeats=3):
        assert cost["one_rank"] > 0
        assert cost["central"] > 0
    refused(ConfigError, "scenario", dataclasses.replace(SMALL, scenarios=("nonsense",)).check)
    refused(ConfigError, "no-noise-trace", dataclasses.replace(SMALL, ablations=("nonsense",)).check)
