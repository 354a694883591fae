from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynamix.errors import ConfigError
from dynamix_lab.results.record import load
from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.claim_jobs import CLAIM_JOBS, definition_sha256

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", CLAIM_JOBS)
def test_a_frozen_job_is_what_it_was_and_its_figures_are_those_of_the_recorded_curve(name: str) -> None:
    job, recorded = CLAIM_JOBS[name], load("results/stepcount-*", ROOT)
    assert job.workload == name
    assert job.load().fixed_target() == job.target
    curve = recorded["workloads"][name]
    assert (curve["target"], round(curve["critical_batch"])) == (job.target, job.critical_batch)
    assert {row["batch"]: row["learning_rate"] for row in curve["table"]} == job.rates
    assert {row["batch"]: sum(row["steps"]) / len(row["steps"]) for row in curve["table"]} == job.steps


@pytest.mark.parametrize("changed", [{"target": 0.5}, {"base_batch": 128}])
def test_a_job_with_another_definition_is_refused(changed: dict[str, float]) -> None:
    job = next(iter(CLAIM_JOBS.values()))
    moved = replace(make_workload(job.workload), **changed)
    assert definition_sha256(moved) != job.sha256
    assert definition_sha256(make_workload(job.workload, noise=0.1)) != job.sha256
    with pytest.raises(ConfigError, match="freeze a new job"):
        replace(job, sha256="0" * 64).load()


def test_a_job_has_the_rate_of_the_nearest_measured_batch() -> None:
    job = replace(next(iter(CLAIM_JOBS.values())), rates={64: 0.1, 256: 0.2})
    assert [job.rate_at(batch) for batch in (8, 120, 140, 4096)] == [0.1, 0.1, 0.2, 0.2]
