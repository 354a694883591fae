"""What links do to real packets: rates each way, loss, background traffic, and changes while packets are on their
way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dynamix.errors import EmulationError, ScenarioError
from dynamix_lab.emulator import Emulation, probe_mechanisms
from dynamix_lab.emulator.cluster import Mechanism
from tests.lab.emulator.conftest import PYTHON, enter, owner, wait_until_gone
from tests.refused import refused

pytestmark = pytest.mark.emulator
needs_root = pytest.mark.usefixtures("privileged")

# A stream between ranks 0 and 1: rank 0 receives for SECONDS, then sends as long. Who receives prints rows of (time on
# the machine's monotonic clock, bytes so far); who sends prints its retransmissions.
STREAM = """
import os, socket, time, json, struct
seconds, address = float(os.environ["SECONDS"]), (os.environ["MASTER_ADDR"], 5000)
if os.environ["RANK"] == "0":
    link, _ = socket.create_server(address).accept()
else:
    while True:
        try:
            link = socket.create_connection(address, 1); break
        except OSError:
            time.sleep(0.02)
link.settimeout(20)
def receive():
    got, rows, next = 0, [], 0
    link.sendall(b"g")
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        got += len(link.recv(1 << 16))
        if now >= next:
            rows.append((now, got)); next = now + 0.01
    link.sendall(b"e")
    while not link.recv(1 << 16).endswith(b"!"): pass
    link.sendall(b"k")
    print(json.dumps(rows))
def send():
    link.recv(1)
    link.setblocking(False)
    while True:
        try:
            if link.recv(1) == b"e": break
        except BlockingIOError: pass
        try:
            link.send(bytes(1 << 14))
        except BlockingIOError: time.sleep(0.001)
    link.settimeout(20)
    link.sendall(b"!"); link.recv(1)
    print(json.dumps(struct.unpack_from("I", link.getsockopt(socket.IPPROTO_TCP, 11, 256), 100)[0]))
for part in (receive, send) if os.environ["RANK"] == "0" else (send, receive):
    part()
"""

# Rank 1 sends COUNT datagrams to rank 0, ten every 2 ms, each with the time; rank 0 prints the times that arrived.
DATAGRAMS = """
import os, socket, struct, time, json
count, address = int(os.environ["COUNT"]), (os.environ["MASTER_ADDR"], 5000)
if os.environ["RANK"] == "0":
    inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); inbox.bind(address)
    inbox.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE: all of them fit, however late this rank reads
    told, _ = socket.create_server(address).accept()
    inbox.setblocking(False); told.setblocking(False)
    seen, over = [], None
    while over is None or time.monotonic() < over:
        try:
            while True:
                seen.append(struct.unpack("d", inbox.recv(2000)[:8])[0])
        except BlockingIOError: time.sleep(0.001)
        if over is None:
            try:
                told.recv(1); over = time.monotonic() + 0.3
            except BlockingIOError: pass
    print(json.dumps(seen))
else:
    while True:
        try:
            told = socket.create_connection(address, 5); break
        except OSError:
            time.sleep(0.02)
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sent = []
    for n in range(count):
        sent.append(time.monotonic())
        out.sendto(struct.pack("d", sent[-1]) + bytes(192), address)
        if n % 10 == 9: time.sleep(0.002)
    told.sendall(b"e")
    print(json.dumps(sent))
"""


def hosts(*differences: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"cpu": 0.5, **difference} for difference in differences]


def run(
    folder: Path, scenario: dict[str, Any], program: str, *, clock: bool = False, **env: object
) -> tuple[list[Any], float]:
    """What the two ranks print, by rank, and the machine's time at which the clock began."""
    with Emulation(scenario, run_dir=folder, mechanism="privileged") as cluster:
        cluster.launch([*PYTHON, program], env={name: str(value) for name, value in env.items()})
        if clock:
            cluster.start_clock()
        start = time.monotonic() - (cluster.time_s() or 0.0)
        assert cluster.wait(60) == [0, 0], [(folder / f"rank{r}.err").read_text() for r in range(2)]
    return [[json.loads(line) for line in (folder / f"rank{r}.out").read_text().splitlines()] for r in range(2)], start


def mbit_s(rows: list[list[float]], begin: float = 0.3, end: float = 1e9) -> float:
    """Rate between two times, both counted from the first row."""
    times, got = np.array(rows).T
    times -= times[0]
    at = np.clip([begin, end], 0, times[-1])
    return float(8e-6 * np.diff(np.interp(at, times, got))[0] / np.diff(at)[0])


def held(got: float, rate: float) -> bool:
    """Not more than the rate of a link, and less only as far as a machine that pauses for longer than its bucket lasts,
    4 to 16 ms, wastes it."""
    return 0.6 * rate < got < 1.15 * rate


@needs_root
def test_up_and_down_have_rates_of_their_own(tmp_path: Path) -> None:
    scenario = {"hosts": hosts({"rate_up_mbit_s": 8, "rate_down_mbit_s": 32}, {})}
    ((down, _), (_, up)), _ = run(tmp_path, scenario, STREAM, SECONDS=1.5)
    assert held(mbit_s(down), 32)
    assert held(mbit_s(up), 8)


@needs_root
@pytest.mark.long
def test_a_rate_changes_on_schedule_under_a_stream(tmp_path: Path) -> None:
    scenario = {
        "hosts": hosts({"rate_mbit_s": 6}, {}),
        "schedule": [{"at_s": 2.0, "host": 0, "rate_down_mbit_s": 24}, {"at_s": 4.0, "host": 0, "rate_mbit_s": 12}],
    }
    ((down, _), (_, up)), start = run(tmp_path, scenario, STREAM, clock=True, SECONDS=5.5)
    times, got = np.array(down).T

    def rate(begin: float, end: float) -> float:
        return float(8e-6 * np.diff(np.interp([start + begin, start + end], times, got))[0] / (end - begin))

    assert held(rate(1.0, 1.95), 6)
    assert held(rate(2.3, 3.95), 24)
    assert held(rate(4.3, 5.4), 12)
    assert held(mbit_s(up), 12)


@needs_root
def test_the_part_of_packets_that_get_lost_is_what_both_hosts_lose(tmp_path: Path) -> None:
    scenario = {"hosts": hosts({"loss": 0.1}, {"loss": 0.2})}
    ((seen,), (sent,)), _ = run(tmp_path, scenario, DATAGRAMS, COUNT=5000)
    assert len(seen) / len(sent) == pytest.approx(0.9 * 0.8, abs=0.03)
    runs = "".join("x."[time in set(seen)] for time in sent[:1500]).split(".")
    assert max(map(len, runs)) < 12  # one by one, not in bursts


@needs_root
@pytest.mark.long
def test_loss_begins_and_ends_on_schedule(tmp_path: Path) -> None:
    scenario = {
        "hosts": hosts({}, {}),
        "schedule": [{"at_s": 1.0, "host": 1, "loss": 0.3}, {"at_s": 2.0, "host": 1, "loss": 0.0}],
    }
    ((seen,), (sent,)), start = run(tmp_path, scenario, DATAGRAMS, clock=True, COUNT=15_000)
    arrived, slot = set(seen), np.array(sent) - start
    assert slot[-1] > 2.7

    def lost(begin: float, end: float) -> float:
        times = [t for t, at in zip(sent, slot, strict=True) if begin <= at < end]
        return 1 - sum(t in arrived for t in times) / len(times)

    assert lost(0.2, 0.98) == 0
    assert lost(1.1, 1.98) == pytest.approx(0.3, abs=0.06)
    assert lost(2.5, 99) == 0


@needs_root
@pytest.mark.long
def test_background_traffic_takes_its_part_of_the_link_and_stops(tmp_path: Path) -> None:
    load = {"kind": "load", "hosts": [0], "traffic_mbit_s": 12, "start_s": 0.5, "end_s": 8}
    scenario = {"hosts": hosts({"rate_mbit_s": 20}, {}), "disturbances": [load]}
    ((down, _), (_, up)), start = run(tmp_path, scenario, STREAM, clock=True, SECONDS=5)
    assert down[0][0] - start < 1.4
    # The load does not give way, TCP does: it gets at most the 8 Mbit/s left, and bears all that the link loses. What
    # sends the load is late at times on a busy machine, so the bound is not the sharp one.
    assert 1 < mbit_s(down, 1.0, 4.9) < 12
    gone = start + 8 - up[0][0]
    assert 1 < mbit_s(up, 0.5, gone - 0.1) < 12
    assert held(mbit_s(up, gone + 1.0, 4.9), 20)  # TCP takes a while to fill what became free


@needs_root
def test_latency_is_there_or_refused_with_what_is_possible(tmp_path: Path) -> None:
    late = {"at_s": 600, "host": 0, "latency_ms": 20}
    scenario = {"hosts": hosts({"latency_ms": 10, "rate_mbit_s": 20}, {"latency_ms": 5}), "schedule": [late]}
    if not probe_mechanisms()["latency"][0]:
        with pytest.raises(ScenarioError, match=r"hosts\[0\].latency_ms=10.0 .* cpu, rate, loss; .*netem"):
            Emulation(scenario, run_dir=tmp_path / "never")
        return
    echo = """
import os, socket, time
address, inbox = (os.environ["MASTER_ADDR"], 5000), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["RANK"] == "0":
    inbox.bind(address)
    for _ in range(20):
        inbox.sendto(*inbox.recvfrom(100))
else:
    time.sleep(1)
    for _ in range(20):
        began = time.monotonic(); inbox.sendto(b"x", address); inbox.recv(100); print(time.monotonic() - began)
"""
    with Emulation(scenario, run_dir=tmp_path, mechanism="privileged") as cluster:
        cluster.launch([*PYTHON, echo])
        assert cluster.wait(30) == [0, 0]
    assert np.median(np.loadtxt(tmp_path / "rank1.out")) == pytest.approx(0.030, rel=0.2)


@pytest.mark.parametrize(
    ("host", "place"),
    [({"rate_down_mbit_s": 9}, "rate_down_mbit_s=9"), ({"loss": 0.1}, "loss=0.1"), ({"latency_ms": 1}, "latency_ms=1")],
)
@pytest.mark.parametrize("mechanism", ["duty-cycle", "auto"])
def test_no_wish_for_links_is_ignored_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: dict[str, float], place: str, mechanism: Mechanism
) -> None:
    def refuse() -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("dynamix_lab.emulator.hosts.new_namespace", refuse)
    monkeypatch.setattr("dynamix_lab.emulator.mechanisms.new_namespace", refuse)
    monkeypatch.setattr("dynamix_lab.emulator.cluster.find_cgroup", lambda: "no permission")
    says = rf"hosts\[0\].{place}.*run as root"
    refused(EmulationError, says, enter, {"hosts": hosts(host)}, run_dir=tmp_path, mechanism=mechanism)


# ---------------------------------------------------------------- nothing is left of it

_OWNER = """
import time
from dynamix_lab.emulator import Emulation
hosts = [{"cpu": 0.1, "rate_mbit_s": 5, "loss": float(sys.argv[3])}, {"cpu": 0.1}]
load = {"kind": "load", "hosts": [0], "factor": 0.5, "traffic_mbit_s": 1}
with Emulation({"hosts": hosts, "disturbances": [load]}, run_dir=sys.argv[2], mechanism="privileged") as cluster:
    cluster.launch([sys.executable, "-I", "-S", "-c", "while True: pass"])
    cluster.start_clock()
    print(cluster.name, flush=True)
    time.sleep(600)
"""


@needs_root
def test_traffic_ends_with_its_owner_even_if_a_forked_child_lives_on(tmp_path: Path) -> None:
    forking = "import os; child = os.fork()\n    if child: print(child, flush=True)\n    time.sleep(600)"
    with owner(_OWNER.replace("time.sleep(600)", forking), tmp_path, 0.1) as (process, name):
        child = int(process.stdout.readline())
        try:
            helpers = [p for p in psutil.Process(process.pid).children() if "traffic.py" in " ".join(p.cmdline())]
            assert len(helpers) == 1
            process.kill()
            process.wait(10)
            assert wait_until_gone(name)
            psutil.wait_procs(helpers, timeout=5)
            assert not helpers[0].is_running() or helpers[0].status() == psutil.STATUS_ZOMBIE
            assert psutil.pid_exists(child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
