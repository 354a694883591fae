"""Every example runs as its first lines say."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamix.compression.aggregator.server import AggregatorServer

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.multiproc


FILM = "excavation.py"
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != FILM))
def test_example_runs(name: str) -> None:
    script = EXAMPLES / name
    alone = f"torchrun --nproc-per-node 2 examples/{name}" not in script.read_text()
    command = [sys.executable, *([] if alone else TWO_RANKS), str(script)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        if name == "sparse_gradients.py":
            aggregator = stack.enter_context(AggregatorServer())
            command += ["--aggregator", aggregator.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if name == "sparse_gradients.py":
        assert "'compaction': " in done.stdout
        assert "lost" not in done.stdout


def test_the_example_of_agents_that_learn_writes_its_film(tmp_path: Path) -> None:
    film = tmp_path / "film.gif"
    command = [sys.executable, str(EXAMPLES / FILM), "--scale", "0.01", "--steps", "20", "--gif", str(film)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 20: " in done.stdout
    assert film.read_bytes().startswith(b"GIF8")
