"""Plain torchrun on two "nodes" of this machine: the line of docs/elastic.md without restarts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.multiproc
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    told = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"]
    line += [str(ROOT / "examples/elastic.py"), "--folder", str(tmp_path), "--epochs", "1"]
    nodes = [
        subprocess.Popen(line, env={**os.environ, **told, "DYNAMIX_HOST": host}, stdout=subprocess.PIPE, text=True)
        for host in ("a", "b")
    ]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert "epoch done: sample 6000" in "".join(said)
