"""`dynamix bench stigmergy` compares pairs, resumes, and says what is left when nobody decides any more."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix.policies.registry import make_policy
from dynamix.simulator import sample_family
from dynamix.window import Bounds, Window
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.suites.stigmergy.cost import decision_costs
from dynamix_lab.suites.stigmergy.suite import StigmergyPlan, StigmergySuite
from dynamix_lab.suites.stigmergy.worlds import Dying, SlowedEnv, alike, without_a_quarter

SMALL = StigmergyPlan(
    scenarios=("steady", "elastic"),
    workers=(4,),
    failing_workers=(4,),
    seeds=(1,),
    clusters=3,
    windows=9,
    ablated=("steady",),
    recovery=(3, 4),
    resamples=50,
    cost_workers=(4,),
)


def test_the_suite_goes_on_where_it_stopped_and_reports_every_part(tmp_path: Path) -> None:
    ran: list[str] = []

    def stop(what: str, done: float) -> None:
        ran.append(what)
        if len(ran) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_suite(StigmergySuite(SMALL), RunFolder("test", tmp_path / "run"), tell=stop)
    partly = json.loads((tmp_path / "run" / "result.json").read_text())
    assert partly["interrupted"]
    assert list(partly["cells"]) == ran[:2]
    again: list[str] = []
    result = run_suite(
        StigmergySuite(SMALL),
        RunFolder("test", tmp_path / "run", resume=True),
        tell=lambda what, done: again.append(what),
    )
    assert ran == ["steady-4", "elastic-4", "failures-4"]
    assert not set(ran[:2]) & set(again)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["pairs"] == ["steady-4", "elastic-4"]
    assert set(result["ratios"]) >= {"stigmergic/static", "stigmergic/dbs", "stigmergic/dynamix"}
    assert result["cells"]["steady-4"]["pairs"] == 3
    assert set(result["cells"]["recovery-4"]["windows"]) >= {"static", "stigmergic", "dynamix"}
    table = (tmp_path / "run" / "table.md").read_text()
    assert all(word in table for word in ("no-traces", "fast-decay", "stigmergic-dead", "one_rank", "vanished-4"))
    other = StigmergySuite(dataclasses.replace(SMALL, windows=30))
    with pytest.raises(ConfigError, match="plan: "):
        run_suite(other, RunFolder("test", tmp_path / "run", resume=True))


def test_who_is_dead_changes_nothing_any_more() -> None:
    bounds, count = Bounds.of(2), [0]
    policy = Dying(make_policy("lb_bsp"), 1, count)
    assert policy.decide(Window.of([32, 32], compute=[1.0, 3.0]), bounds).tolist() == [48, 16]
    assert policy.decide(Window.of([40, 24], compute=[1.0, 3.0]), bounds).tolist() == [40, 24]


def test_a_quarter_of_the_workers_go_and_the_rest_take_their_samples() -> None:
    world = sample_family("link-contention", 3, 8, seed=1)
    left = without_a_quarter(world)
    assert left.shape == (3, 6)
    assert (left.base_batch % 6 == 0).all()
    assert left.noise_knots is not None
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
    with pytest.raises(ConfigError, match="scenario"):
        dataclasses.replace(SMALL, scenarios=("nonsense",)).check()
