"""Windows of fixed lengths beside windows that follow what changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import Context, untold
from dynamix_lab.suites.reaction import REPLAY, ReactionPlan, ReactionSuite, clusters_of
from tests.refused import refused

PLAN = replace(ReactionPlan.of(quick=True), cells=((REPLAY, 4, 2),), steps=25)


def test_every_row_trains_the_same_clusters_for_the_same_progress(tmp_path: Path) -> None:
    suite = ReactionSuite(PLAN)
    with RunFolder("reaction", tmp_path / "run") as folder:
        context = Context(folder, {}, untold)
        cells = {cell.key: suite.run(cell, context) for cell in suite.cells()}
    (cell,) = cells.values()
    assert {row: len(times) for row, times in cell["times_s"].items()} == {
        **{f"goodput {length}": 2 for length in ("1", "2", "5", "10", "auto")},
        **{f"lagged {length}": 2 for length in ("1", "2")},
    }
    assert cell["steps_of_a_window"]["goodput 5"] == 5
    found = suite.conclude(cells)
    speed = found["ratios"][f"{REPLAY}-4: goodput 2/goodput 10"]["median"]
    taken = [np.log(cell["times_s"][row]).mean() for row in ("goodput 10", "goodput 2")]
    assert speed == pytest.approx(np.exp(taken[0] - taken[1]))
    told = suite.table(found)
    assert f"{REPLAY}-4" in told
    assert "Steps of a window" in told


def test_the_replay_is_that_of_the_emulator() -> None:
    stairs = clusters_of(REPLAY, 3, 8, seed=1).stairs
    assert (stairs.repeat_s == 120).all()
    assert stairs.factors.max() == pytest.approx(1 / 0.62)
    assert stairs.factors.min() == 1


def test_a_plan_that_cannot_be_run_is_refused() -> None:
    refused(ConfigError, "family", replace(PLAN, cells=(("tortoises", 4, 2),)).check)
    refused(ConfigError, "steps", replace(PLAN, steps=0).check)
