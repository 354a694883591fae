"""Plain torchrun on two "nodes" of this machine: the line of docs/elastic.md without restarts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port, start_script

ROOT = Path(__file__).parents[2]


@pytest.mark.multiproc
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    port = free_port()
    line = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    line += ["--rdzv-endpoint", f"localhost:{port}", str(ROOT / "examples/elastic.py")]
    line += ["--folder", str(tmp_path), "--epochs", "1"]
    told, log = {"PYTHONPATH": os.pathsep.join(sys.path)}, tmp_path / "said"
    agent = ROOT / "tests/torchrun.py"
    nodes = [start_script(agent, line, log, env={**told, "DYNAMIX_HOST": host}) for host in ("a", "b")]
    for node in nodes:
        node.join(120)
    assert [node.exitcode for node in nodes] == [0, 0]
    assert "epoch done: sample 6000" in log.read_text()
