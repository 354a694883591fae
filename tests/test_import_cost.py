"""What importing the controller costs, as `scripts/import-cost` measures it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.processes import call

SCRIPT = Path(__file__).parent.parent / "scripts" / "import-cost"


def test_the_controller_is_cheap_beside_torch() -> None:
    done = call(SCRIPT, 1)
    wall, processor, goal = done.stdout.splitlines()
    ratio = float(re.findall(r"([\d.]+) of it$", processor)[0])
    assert wall.startswith("wall clock: ")
    assert done.returncode == (ratio > float(re.findall(r"at most ([\d.]+)", goal)[0]))
    assert 0.0 < ratio < 0.4, "one run on a busy machine; FSDP alone was 0.3"


def test_a_measurement_needs_a_run() -> None:
    done = call(SCRIPT, 0)
    assert done.returncode == 1
    assert "runs=0" in done.stderr
