"""`dynamix bench tta` on emulated hosts, with demos that are only pretended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.suites import tta
from dynamix_lab.suites.tta import TtaPlan, TtaSuite

PLAN = TtaPlan(("even", "slow-link"), seeds=2, seed=0, policies=("static", "dbs"))


def _pretended(ran: list[tuple[str, int]], stop_after: int = 99) -> Any:
    def run_comparison(settings: Any, folder: RunFolder, **_: Any) -> tuple[dict[str, Any], bool]:
        if len(ran) == stop_after:
            raise KeyboardInterrupt
        ran.append((settings.scenario, settings.seeds))
        times = {"static": [20.0] * settings.seeds, "dbs": [10.0] * settings.seeds}
        policies = {name: {"time_to_target_s": t} for name, t in times.items()}
        about = {"mechanisms": {}, "seeds": list(range(settings.seeds)), "target": 0.9, "a_a": None}
        return {**about, "policies": policies, "ratios": {}}, True

    return run_comparison


@pytest.fixture(autouse=True)
def _one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tta, "commit", lambda: "one")


def test_every_scenario_gets_its_first_seed_before_any_gets_its_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(tta, "run_comparison", _pretended(ran))
    result = run_suite(TtaSuite(PLAN), RunFolder("tta", tmp_path / "run"))
    assert ran == [("even", 1), ("slow-link", 1), ("even", 2), ("slow-link", 2)]
    assert result["arrived"]
    assert result["ratios"]["dbs/static"]["median"] == pytest.approx(0.5)
    assert len(result["pairs"]) == 4


def test_an_interrupted_call_leaves_all_scenarios_with_equally_many_pairs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(tta, "run_comparison", _pretended(ran, stop_after=3))
    with pytest.raises(KeyboardInterrupt):
        run_suite(TtaSuite(PLAN), RunFolder("tta", tmp_path / "run"))
    partly = json.loads((tmp_path / "run" / "result.json").read_text())
    assert partly["interrupted"]
    assert partly["pairs"] == [["even", 0], ["slow-link", 0]]
    monkeypatch.setattr(tta, "run_comparison", _pretended(ran))
    result = run_suite(TtaSuite(PLAN), RunFolder("tta", tmp_path / "run", resume=True))
    assert ran[3:] == [("slow-link", 2)]
    assert len(result["pairs"]) == 4
