from __future__ import annotations

import socket
import time
from pathlib import Path

import psutil
import pytest

from dynamix.errors import ConfigError, EmulationError
from dynamix_lab.emulator import Emulation, keeper
from tests.lab.emulator.conftest import PYTHON, enter
from tests.refused import refused

pytestmark = pytest.mark.emulator

# Every rank greets all others every 50 ms with the time and prints whom it hears.
GREET = """
import os, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind((f"198.18.0.{rank + 1}", 6000))
own.settimeout(0.05)
end, told = time.monotonic() + float(sys.argv[1]), 0.0
while time.monotonic() < end:
    if time.monotonic() - told > 0.05:
        told = time.monotonic()
        for other in range(world):
            try:
                own.sendto(f"{told} {rank}".encode(), (f"198.18.0.{other + 1}", 6000))
            except OSError:
                pass
    try:
        print(own.recv(100).decode())
    except OSError:
        pass
"""


def own_interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


@pytest.mark.usefixtures("privileged")
def test_a_rank_reaches_nothing_outside(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as outside:
        addresses = [a.address for card in psutil.net_if_addrs().values() for a in card if a.family == socket.AF_INET]
        program = f"""
import socket
for address in {addresses!r}:
    try:
        socket.create_connection((address, {outside.getsockname()[1]}), 2)
        print("reached", address)
    except OSError:
        pass
"""
        with Emulation({"hosts": [{"cpu": 0.5}]}, run_dir=tmp_path, mechanism="privileged") as cluster:
            cluster.launch([*PYTHON, program])
            assert cluster.wait(30) == [0]
    assert (tmp_path / "rank0.out").read_text() == ""


def test_a_refusal_of_the_kernel_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("dynamix_lab.emulator.hosts.new_namespace", refuse)
    monkeypatch.setattr("dynamix_lab.emulator.cluster.find_cgroup", lambda: "no permission")
    demo = {"hosts": [{"cpu": 0.2}]}
    refused(EmulationError, "no permission", enter, demo, run_dir=tmp_path, mechanism="privileged")
    with Emulation(demo, run_dir=tmp_path) as cluster:  # "auto" takes what there is, and says so
        assert cluster.mechanisms == {"network": "loopback", "cpu": "duty-cycle", "link": "none"}


@pytest.mark.usefixtures("privileged")
def test_two_emulations_at_once_use_the_same_addresses(tmp_path: Path) -> None:
    """And nothing of either appears in the caller's namespace."""
    hosts, before = {"hosts": [{"cpu": 0.4}, {"cpu": 0.4}]}, own_interfaces()
    with (
        Emulation(hosts, run_dir=tmp_path / "a", mechanism="privileged") as a,
        Emulation(hosts, run_dir=tmp_path / "b", mechanism="privileged") as b,
    ):
        for cluster in (a, b):
            assert cluster.mechanisms["network"] == "netns+veth"
            cluster.launch([*PYTHON, GREET, "1"])
        assert own_interfaces() == before
        assert [a.wait(30), b.wait(30)] == [[0, 0], [0, 0]]
        assert a.name != b.name
    for rank in range(2):
        heard = {line.split()[1] for line in (tmp_path / "a" / f"rank{rank}.out").read_text().splitlines()}
        assert heard == {"0", "1"}
    assert own_interfaces() == before


@pytest.mark.usefixtures("privileged")
def test_making_hosts_leaves_no_process_or_descriptor_behind(tmp_path: Path) -> None:
    me = psutil.Process()
    enter({"hosts": [{"cpu": 0.1}]}, run_dir=tmp_path, mechanism="privileged")
    before = me.num_fds(), len(me.children(recursive=True)), me.num_threads()
    enter({"hosts": [{"cpu": 0.1}] * 4}, run_dir=tmp_path, mechanism="privileged")
    assert (me.num_fds(), len(me.children(recursive=True)), me.num_threads()) == before
    assert keeper.start_time(me.pid) is not None


@pytest.mark.usefixtures("privileged")
def test_a_network_that_is_cut_in_parts_and_made_whole_again(tmp_path: Path) -> None:
    with Emulation({"hosts": [{"cpu": 0.2}] * 4}, run_dir=tmp_path) as cluster:
        with pytest.raises(ConfigError, match="every host"):
            cluster.partition([0, 1], [1, 2])
        cluster.launch([*PYTHON, GREET, "4.5"])
        time.sleep(1.5)
        cluster.partition([0, 2], [1, 3])
        cut = time.monotonic()
        time.sleep(1.3)
        whole = time.monotonic()
        cluster.partition()
        assert cluster.wait(30) == [0] * 4
    for rank in range(4):
        rows = [line.split() for line in (tmp_path / f"rank{rank}.out").read_text().splitlines()]
        heard = [(float(at), int(who)) for at, who in rows]
        assert {who for at, who in heard if at < cut} == {0, 1, 2, 3}
        assert {who for at, who in heard if cut + 0.2 < at < whole} == {rank, (rank + 2) % 4}
        assert {who for at, who in heard if at > whole + 0.2} == {0, 1, 2, 3}
