"""Decisions are recorded under one revision and asked again under another, window by window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix_lab.suites.decisions import asked, replay
from dynamix_lab.suites.decisions.corpus import POLICIES, UNUSUAL, plan
from dynamix_lab.suites.decisions.suite import DecisionsPlan

FEW = [spec for spec in plan() if spec.policy in ("goodput", "guarded:lb_bsp") and max(spec.shapes())[-1] <= 8][:4]


def test_the_corpus_asks_every_policy_in_long_trajectories() -> None:
    specs = plan()
    assert {spec.policy for spec in specs} == {*POLICIES, *UNUSUAL}
    assert sum(spec.windows for spec in specs) >= 2000
    assert min(spec.windows for spec in specs) >= 30
    assert {shape[-1] for spec in specs for shape in spec.shapes()} >= {1, 2, 1024}
    assert any(spec.reload for spec in specs)


def test_the_same_code_decides_the_same(tmp_path: Path) -> None:
    recorded = replay.record(tmp_path / "d.npz", FEW)
    found = replay.replay(tmp_path / "d.npz")
    assert recorded["windows"] == found["windows"] == sum(spec.windows for spec in FEW)
    assert found["identical"]
    assert found["within_limits"]


def test_one_sample_more_in_every_window_is_no_longer_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay.record(tmp_path / "d.npz", FEW[:1])
    make = asked.make

    class Other:
        def __init__(self, policy: object) -> None:
            self.policy = policy

        def __getattr__(self, name: str) -> object:
            return getattr(self.policy, name)

        def decide(self, window: object, bounds: object) -> np.ndarray:
            return np.asarray(self.policy.decide(window, bounds)) + 1  # type: ignore[attr-defined]

    monkeypatch.setattr(replay, "make", lambda name, clock: Other(make(name, clock)))
    monkeypatch.setattr(replay, "reloaded", lambda policy, name, clock: policy)
    found = replay.replay(tmp_path / "d.npz")
    assert found["different"] == found["windows"]
    assert not found["within_limits"]


def test_a_revision_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="against='nonsense'"):
        DecisionsPlan("nonsense").check()
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["bench", "decisions", "--against", "nonsense"]).exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted({*POLICIES, *UNUSUAL}))
def test_every_policy_of_the_corpus_is_made_under_this_revision(name: str) -> None:
    assert hasattr(asked.make(name, [0]), "decide")
