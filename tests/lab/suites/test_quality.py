"""The suite of quality: trained models at equal samples, as many pairs as their spread asks for."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix.runtime.controller import Controller
from dynamix_lab.report import sections_markdown
from dynamix_lab.results.record import load
from dynamix_lab.suites.quality import suite
from dynamix_lab.suites.quality.pages import sections
from dynamix_lab.suites.quality.plan import BATCH, JOBS, USUAL, QualityPlan
from dynamix_lab.suites.quality.suite import concluded, run_in_stages, trained
from dynamix_lab.tasks import make_workload
from tests.refused import refused

QUICK = QualityPlan.quick()


def test_a_smoke_run_compares_models_that_saw_the_same_samples(tmp_path: Path) -> None:
    command = ["bench", "quality", "--quick", "--json", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert set(result["jobs"]) == {"teacher-classes", "teacher-classes-batchnorm"}
    for part in result["jobs"].values():
        assert part["samples"] == 8192
        assert part["rows"]["static"]["points"] == [0.0, 0.0]
        assert part["rows"]["static"]["global_batch"] == 4 * BATCH
        assert any(part["rows"]["dynamix"]["points"])
    assert "| teacher-classes-batchnorm | 2 |" in (tmp_path / "run" / "table.md").read_text()
    assert "teacher-classes-batchnorm" in (tmp_path / "run" / "report.html").read_text()


def test_at_equal_time_every_row_trains_for_as_long_as_even_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs whose samples take a row's own time; and of recorded ones, whose time moves from run to run."""
    sample_s = {"static": 1e-3, "static-128": 8e-4, "qsr": 5e-4}

    def pretended(plan: QualityPlan, job: str, row: str, seed: int, samples: int | None = None) -> dict[str, Any]:
        count, extra = samples or plan.train, {} if samples is None else {"at_time": True}
        known = {"samples": count, "time_s": sample_s[row] * count, "accuracy": 50.0 + (row == "static-128")}
        return {**_drawn(plan, job, row, seed), **known, **extra}

    monkeypatch.setattr(suite, "trained", pretended)
    plan = replace(QUICK, jobs=("teacher-classes",), rows=tuple(sample_s), pilot=2, max_pairs=2, equal_time=True)
    result = run_in_stages(plan, RunFolder("quality", tmp_path / "run"))
    found = result["jobs"]["teacher-classes"]["at_time"]
    assert found["best_static"] == "static-128"
    for row, longer in (("static-128", 1.25), ("qsr", 2.0)):
        mine = found["rows"][row]
        assert mine["samples_over_even"] == pytest.approx(longer, abs=0.01), row
        assert mine["time_over_even"]["median"] == pytest.approx(1, abs=0.1), row
    assert "## At equal time" in sections_markdown(sections(result))
    recorded = load("results/equal-time-*", Path(__file__).parents[3])
    for part in recorded["jobs"].values():
        for row, mine in part["at_time"]["rows"].items():
            assert mine["time_over_even"]["median"] == pytest.approx(1, abs=0.1), row
            assert (mine["samples_over_even"] > 1.05) == (row not in ("static", "static-32")), row


def test_the_same_run_gives_the_same_model_and_a_fixed_global_batch_stays() -> None:
    plan = replace(QUICK, train=4096)
    run, again = (trained(plan, "teacher-classes-batchnorm", "dynamix-fixed", 1) for _ in range(2))
    assert run == again
    assert run["samples"] / run["steps"] == 4 * BATCH
    assert len(set(run["samples_by_worker"])) == 4  # unlike shares of it


def _drawn(plan: QualityPlan, job: str, row: str, seed: int) -> dict[str, Any]:
    """Instead of a run: pairs whose differences scatter by a quarter of a point, ten times that for one row."""
    if row == "static":
        scatter = 0.0
    else:
        width = {"dynamix": 0.25, "dynamix-fixed": 2.5}.get(row, 0.0)
        scatter = width * float(np.random.default_rng([seed, len(row)]).standard_normal())
    known = {"job": job, "row": row, "seed": seed, "trial": {}, "samples": 1000, "steps": 10, "time_s": 1.0}
    return {**known, "accuracy": 50 + scatter, "cross_entropy": 1.0, "samples_by_worker": [1000]}


def test_pairs_follow_the_spread_up_to_the_cap_and_only_what_is_missing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def counted(plan: QualityPlan, job: str, row: str, seed: int) -> dict[str, Any]:
        ran.append((row, seed))
        return _drawn(plan, job, row, seed)

    monkeypatch.setattr(suite, "trained", counted)
    rows = ("static", "dynamix", "dynamix-fixed", "lb_bsp")
    plan = QualityPlan(("conv",), rows, pilot=4, max_pairs=30)
    result = run_in_stages(plan, RunFolder("quality", tmp_path / "run"))
    parts = result["jobs"]["conv"]["rows"]
    assert len(ran) == len(set(ran))
    assert parts["lb_bsp"]["pairs"] == 4
    assert 4 < parts["dynamix"]["pairs"] < 30
    assert parts["dynamix"]["half_width"] <= 0.2
    assert not parts["dynamix"]["capped"]
    assert parts["static"]["pairs"] == parts["dynamix-fixed"]["pairs"] == 30
    assert parts["dynamix-fixed"]["capped"]
    assert "dynamix-fixed at conv" in sections_markdown(sections(result))
    assert result["seeds"] == list(range(30))
    done = len(ran)
    more = replace(plan, sized=("dynamix", "dynamix-fixed", "lb_bsp"), max_pairs=31)
    run_in_stages(more, RunFolder("quality", tmp_path / "run", resume=True))
    assert ran[done:] == [("static", 30), ("dynamix-fixed", 30)]


def _runs(accuracies: list[float], losses: list[float | None]) -> dict[int, dict[str, Any]]:
    about = {"samples": 100, "steps": 10, "time_s": 2.0, "trial": {}}
    values = zip(accuracies, losses, strict=True)
    return {seed: {**about, "accuracy": a, "cross_entropy": x} for seed, (a, x) in enumerate(values)}


def test_a_default_reaches_the_floor_by_its_lower_end_and_a_diverged_run_counts() -> None:
    even = _runs([50.0, 50.2, 50.4], [1.0, 1.0, 1.0])
    good, bad = _runs([50.0, 50.1, 50.5], [1.1, 1.1, 1.1]), _runs([50.3, 50.9, 0.0], [1.0, 0.9, None])
    found = concluded({"static": even, "dynamix": good, "lb_bsp": bad}, QUICK)["rows"]
    assert found["dynamix"]["reached"]
    assert found["dynamix"]["accuracy_over_even"]["mean"] == 0
    assert found["dynamix"]["cross_entropy_over_even"]["mean"] == pytest.approx(0.1)
    assert not found["lb_bsp"]["reached"]
    assert found["lb_bsp"]["diverged"] == 1
    assert found["lb_bsp"]["points"][2] == pytest.approx(-50.4)
    assert found["lb_bsp"]["cross_entropy_over_even"]["mean"] is None
    refused(ConfigError, "as many", concluded, {"static": even, "dynamix": {0: {**good[0], "samples": 99}}}, QUICK)


@pytest.mark.parametrize("name", [name for name in JOBS if name.endswith("-batchnorm")])
def test_batch_norm_is_the_only_difference_of_a_job_and_its_twin(name: str) -> None:
    plain, normed = (JOBS[one].load() for one in (name.removesuffix("-batchnorm"), name))
    assert normed.description == f"{plain.description}, batch norm"
    assert normed.target is None
    models = [workload.make_model(3) for workload in (plain, normed)]
    layers = [m for m in models[1].modules() if isinstance(m, torch.nn.BatchNorm1d)]
    assert len(layers) in (2, 3)
    kept = [m for m in models[1].children() if not isinstance(m, torch.nn.BatchNorm1d)]
    own = parameters_to_vector(p for m in kept for p in m.parameters())
    assert torch.equal(own, parameters_to_vector(models[0].parameters()))
    refused(ConfigError, "none, batch", make_workload, JOBS[name].workload, norm="layer")


def test_rows_are_the_defaults_of_a_controller_unless_they_say_otherwise() -> None:
    trials = {row: QualityPlan().trial("conv", row) for row in USUAL}
    default = inspect.signature(Controller).parameters["lr_rule"].default
    assert {t.lr_rule for row, t in trials.items() if row in ("static", "dynamix", "dynamix-fixed", "lb_bsp")} == {
        default
    }
    assert [row for row, trial in trials.items() if trial.global_batch == "fixed"] == ["dynamix-fixed"]
    assert {(t.batch_size, t.learning_rate, t.schedule, t.budget) for t in trials.values()} == {
        (BATCH, JOBS["conv"].rate, "cosine", 144_000)
    }


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"jobs": ("hope",)}, "hope"),
        ({"jobs": ()}, "jobs"),
        ({"rows": ("dynamix",)}, "static"),
        ({"rows": ("static", "static")}, "rows"),
        ({"sized": ("hope",)}, "hope"),
        ({"pilot": 1}, "pilot"),
        ({"max_pairs": 3, "pilot": 4}, "max_pairs"),
        ({"seed": 9000}, "9001"),
        ({"rate_factor": 0.0}, "rate_factor"),
        ({"schedule": "warm"}, "schedule"),
        ({"scenario": "even"}, "device"),
    ],
)
def test_a_plan_that_compares_nothing_is_refused(changed: dict[str, Any], names: str) -> None:
    refused(ConfigError, names, replace(QualityPlan(), **changed).check)


def test_rates_are_chosen_on_the_tuning_seeds_from_even_shares_alone() -> None:
    QualityPlan(rows=("static",), seed=9001, pilot=2, max_pairs=2).check()
