from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.suites.tasks import WorkloadsPlan, WorkloadsSuite, measure, noise_and_signal, table
from dynamix_lab.tasks import Arrays, Data, Workload, make_workload
from tests.refused import refused


def test_a_run_measures_and_writes_its_table(tmp_path: Path) -> None:
    plan = WorkloadsPlan(("digits", "ratings"), budget_s=0.5, seed=1)
    said: list[str] = []
    result = run_suite(
        WorkloadsSuite(plan), RunFolder("workloads", tmp_path / "run"), tell=lambda text, done: said.append(text)
    )
    row = result["workloads"]["digits"]
    assert row["reached"] > row["untrained"]
    assert row["steps_per_s"] > 0
    assert row["trained_s"] >= 0.5
    assert row["parameters"] == sum(p.numel() for p in make_workload("digits").make_model(0).parameters())
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == json.loads(json.dumps(result))
    written = (tmp_path / "run" / "table.md").read_text()
    assert written == table(result).markdown()
    assert len({line.count("|") for line in written.strip().splitlines()}) == 1
    assert any("digits" in text for text in said)


def test_impossible_plans_are_refused_before_anything_runs() -> None:
    refused(ConfigError, "more than 0", WorkloadsPlan(("digits",), budget_s=0).check)
    refused(ConfigError, "mnist1d", WorkloadsPlan.of(names=["nothing"]).check)
    assert set(WorkloadsPlan.of(quick=True).names) < set(WorkloadsPlan.of().names)


def quadratic(metric=lambda out, _: 0.5) -> Workload:
    """Samples x with loss mean |w - x|^2 / 2: tr(Sigma) is the variance of x, |G|^2 is |w - mean x|^2."""

    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w - x).square().sum(1) / 2

    how = {"make_data": lambda *_: None, "make_model": lambda _: Offset(), "loss": lambda out, _: out.mean()}
    how |= {"make_optimizer": lambda p: torch.optim.SGD(p, lr=0.01), "metric": metric}
    return Workload(name="quadratic", min_batch=1, max_batch=64, **how)


def test_noise_scale_is_that_of_a_task_whose_noise_is_known() -> None:
    workload, rng = quadratic(), torch.Generator().manual_seed(0)
    model = workload.make_model(0)
    found = []
    for _ in range(400):
        x = torch.randn(32, 3, generator=rng) * 2 + 1
        found.append(noise_and_signal(workload, model, x, torch.zeros(32)))
    noise, signal = np.mean(found, axis=0)
    assert noise == pytest.approx(3 * 4, rel=0.1)
    assert signal == pytest.approx(3 * 1, rel=0.1)
    assert all(p.grad is None for p in model.parameters())


def test_a_score_still_rising_is_marked() -> None:
    scores = iter(np.linspace(0.1, 0.9, 100))
    rising = quadratic(metric=lambda *_: next(scores))
    data = Arrays(torch.randn(64, 3), torch.zeros(64))
    row = measure(rising, Data(data, data), budget_s=0.2, seed=0)
    assert row["still_rising"]
    assert "+ |" in table({"workloads": {"quadratic": row}}).markdown()
