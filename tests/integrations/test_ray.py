"""Ray Train on a cluster of this machine: a killed worker, and a cluster that grows; every sample comes once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ray_job import BATCH, EVERY

JOB = Path(__file__).parent / "ray_job.py"
pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]


def _done(*command: str) -> str:
    """What a script on a cluster of its own printed."""
    told = {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    told |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180"}
    told |= {"RAY_USAGE_STATS_ENABLED": "0"}
    told |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3", "RAY_worker_niceness": "0"}  # each report waits for a check
    told |= {"PYTHONPATH": os.pathsep.join([str(JOB.parents[2]), *sys.path])}
    line = [sys.executable, *command]
    done = subprocess.run(line, env={**os.environ, **told}, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _run(what: str, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each start of the workers said, and what the last one ended with."""
    _done(str(JOB), what, str(folder))
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    return starts, json.loads((folder / "end.json").read_text())


def test_a_worker_is_killed_once(tmp_path: Path) -> None:
    starts, end = _run("killed", tmp_path)
    assert [start["workers"] for start in starts] == [2, 2]
    redone = int((tmp_path / "killed").read_text()) - starts[1]["samples"]
    assert 0 <= redone <= (2 * EVERY + 3) * BATCH  # Ray may not know of the newest checkpoint yet
    assert end["times"] == [3]  # every sample, in each of the epochs
    assert end["sizes"][0] > 1.5 * end["sizes"][1]


def test_a_cluster_that_grows(tmp_path: Path) -> None:
    starts, end = _run("elastic", tmp_path)
    assert [start["workers"] for start in starts] == [1, 2]
    assert starts[1]["samples"] > 0
    assert end["times"] == [20]
    assert sum(end["sizes"]) == BATCH


def test_the_example_runs() -> None:
    assert "'sizes': [" in _done(str(JOB.parents[2] / "examples/ray_train.py"))
