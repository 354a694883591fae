"""`dynamix bench observe`: its cases are what they say, and what it concludes from cells."""

from __future__ import annotations

from typing import Any

import pytest

from dynamix.errors import ConfigError
from dynamix_lab.suites.observe.cases import PARTS, draw_cases
from dynamix_lab.suites.observe.pays import JOBS
from dynamix_lab.suites.observe.suite import LAUNCHES, ObservePlan, ObserveSuite


def test_cases_have_every_part_as_often_and_a_link_is_told_from_others() -> None:
    cases = draw_cases(20, 22)
    assert [case.part for case in cases] == 5 * list(PARTS)
    assert cases == draw_cases(20, 22)
    assert {case.ranks for case in cases} == {2, 3, 4}
    assert all(case.slow < case.ranks and (case.part != "network" or case.ranks > 2) for case in cases)
    assert len({case.slow for case in cases}) > 2


def test_in_all_ten_jobs_the_first_host_is_a_fastest_one_and_stays_so() -> None:
    assert len(JOBS) == 10
    for job in JOBS.values():
        assert job["speeds"][0] == max(job["speeds"])
        assert all(change["host"] == job["slow"] != 0 for change in job.get("schedule", ()))


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
    assert "| even | balance | 0.50 (0.40 to 0.60); 0.55 | –; – | 1.30 (0.40 to 0.60); 1.40 | yes |" in told
    assert "NO" in told
    with pytest.raises(ConfigError, match="only="):
        ObservePlan(kinds=("speed",)).check()
