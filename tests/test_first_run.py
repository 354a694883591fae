"""`scripts/first_run.py`: the first run in its smallest form trains in every row and way, here without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "first_run.py"


@pytest.mark.multiproc
@pytest.mark.parametrize(("row", "options"), [("single", []), ("adapt", ["--amp"]), ("balance", ["--fsdp"])])
def test_a_row_learns_and_says_seconds_and_score(row: str, options: list[str]) -> None:
    said = run_script(SCRIPT, ["--row", row, "--budget", "4096", *options], ranks=None if row == "single" else 2)
    found: dict[str, Any] = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert found["row"] == row
    assert found["score"] > 30  # of 100; knowing nothing is 0
    assert found["samples"] >= 4096
