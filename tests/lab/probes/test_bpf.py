"""The optional eBPF probe: what it says where it cannot run, how it reads its tracer, and real retransmissions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynamix.probes import probe_report, probes_here
from dynamix_lab.probes.bpf import BpfProbe


def test_what_is_missing_is_said_with_how_to_enable_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    available, detail = BpfProbe.detect()
    assert not available
    assert "apt-get install bpftrace" in detail
    assert "root" in detail
    assert ("bpf", available, detail) in probe_report()
    assert BpfProbe().sample() == {}
    for asked in ("0", "1"):  # what TCP says stays unless it is asked for and can be had
        monkeypatch.setenv("DYNAMIX_BPF", asked)
        assert "bpf" not in [probe.name for probe in probes_here(torch.device("cpu"))]


FAKE = """#!/bin/sh
echo '{"type": "attached_probes", "data": {"probes": 3}}'
echo 'Lost 3 events'
while true; do
  echo '{"type": "map", "data": {"@again": {"5001,6001": 3, "7,8": 100}}}'
  echo '{"type": "map", "data": {"@sent": 1000}}'
  echo '{"type": "printf", "data": "told\\\\n"}'
  sleep 0.02
done
"""


def test_only_own_connections_count_and_a_dead_tracer_leaves_it_to_tcp_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bpftrace"
    tool.write_text(FAKE)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(BpfProbe, "detect", classmethod(lambda cls: (True, "")))
    monkeypatch.setattr(BpfProbe, "_connections", lambda self: {(5001, 6001)})
    probe = BpfProbe()
    assert probe._tracer is not None
    ended = probe._tracer
    while not probe._told:
        ended.poll()
    probe.sample()
    again = sent = 0.0
    for _ in range(3):
        subprocess.run(["sleep", "0.2"], check=True)
        sample = probe.sample()
        again, sent = again + sample["retransmits_per_s"], sent + sample["bytes_per_s"]
    assert 0 < again / 3 < 300  # 3 every 20 ms and what a shell takes besides
    assert sent == pytest.approx(again * 1000 / 3, rel=0.3)  # 3 beside 1,000 bytes, never 100 more
    ended.kill()
    ended.wait(5)
    assert probe.sample() == {}
    probe.close()
    probe.close()


RANK = """
import json, os, socket, struct, sys, time
from dynamix_lab.probes.bpf import BpfProbe
address = (os.environ["MASTER_ADDR"], 5000)
if os.environ["RANK"] == "0":
    link, _ = socket.create_server(address).accept()
    while link.recv(1 << 16): pass
else:
    probe = BpfProbe()
    while True:
        try:
            link = socket.create_connection(address, 1); break
        except OSError:
            time.sleep(0.02)
    until = time.monotonic() + 30
    while not probe._told and time.monotonic() < until: time.sleep(0.05)
    probe.sample(); began = time.perf_counter()
    for _ in range(120):
        link.sendall(bytes(20_000)); time.sleep(0.005)
    time.sleep(1.0)
    took = time.perf_counter() - began
    sample = probe.sample()
    again = struct.unpack_from("I", link.getsockopt(socket.IPPROTO_TCP, 11, 256), 100)[0]
    link.close(); probe.close()
    counted = {"bpf": sample["retransmits_per_s"] * took, "bytes": sample.get("bytes_per_s", 0) * took}
    print(json.dumps({**counted, "tcp_info": again}))
"""

JOB = """
import sys
from pathlib import Path
from dynamix_lab.emulator import Emulation
from dynamix.errors import EmulationError
folder, program = Path(sys.argv[1]), sys.argv[2]
try:
    lossy = {"hosts": [{"cpu": 0.5}, {"cpu": 0.5, "loss": 0.05}]}
    with Emulation(lossy, run_dir=folder, mechanism="privileged") as cluster:
        cluster.launch([sys.executable, "-c", program])
        assert cluster.wait(70) == [0, 0], [(folder / f"rank{r}.err").read_text() for r in range(2)]
except EmulationError as error:
    print(error)
    sys.exit(77)
"""


@pytest.mark.emulator
def test_retransmissions_on_a_lossy_link_are_those_that_the_socket_counts(tmp_path: Path) -> None:
    """Needs bpftrace, which nothing here installs, so it may skip also where privileged tests are required."""
    if shutil.which("bpftrace") is None or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("bpftrace, root and unshare are needed: apt-get install bpftrace")
    # Mounted for this process and its children alone.
    inside = 'mount -t tracefs t /sys/kernel/tracing; mount -t debugfs d /sys/kernel/debug; exec "$@"'
    command = [sys.executable, "-c", JOB, str(tmp_path), RANK]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside, "sh", *command],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"no privileged emulation here: {done.stdout}")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rank1.out").read_text())
    assert found["tcp_info"] > 10
    assert found["bpf"] == pytest.approx(found["tcp_info"], rel=0.1)
    assert found["bytes"] in (0, pytest.approx(2.4e6, rel=0.05))  # 0 where the kernel has no such tracepoint
