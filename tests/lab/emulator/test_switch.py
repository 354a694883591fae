"""What computes in the network runs between the hosts, and ends with them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dynamix_lab.emulator import Emulation
from tests.lab.emulator.conftest import PYTHON

SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    server.accept()[0].sendall(b"x" * 200_000)
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as line:
    print(len(line.makefile("rb").read(200_000)))
"""


@pytest.mark.emulator
@pytest.mark.usefixtures("privileged")
def test_hosts_reach_what_runs_on_the_switch(tmp_path: Path) -> None:
    hosts = [{"cpu": 0.2, "rate_mbit_s": 10.0}] * 2
    with Emulation({"hosts": hosts}, run_dir=tmp_path, mechanism="privileged") as cluster:
        process = cluster.launch_beside([*PYTHON, SERVER, cluster.switch_address])
        deadline = time.monotonic() + 20
        while not (port := (tmp_path / "beside.out").read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        cluster.launch([*PYTHON, CLIENT, cluster.switch_address, port])
        assert cluster.wait(30) == [0, 0]
        took = time.monotonic() - began
        assert process.poll() is None
    assert [(tmp_path / f"rank{rank}.out").read_text() for rank in range(2)] == ["200000\n"] * 2
    assert process.poll() is not None
    assert took > 0.8 * 200_000 * 8 / 10e6, "the hosts' own links limit them there, too"
