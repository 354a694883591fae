from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamix_lab.emulator import Emulation
from dynamix_lab.emulator.limits import Cgroup, find_cgroup, quota_and_period_us
from tests.lab.emulator.conftest import PYTHON

# Prints the cores a busy loop got over each of SPANS seconds of wall clock, after half a second of running in.
BUSY = """
import time, json, os
def spin(s):
    end = time.monotonic() + s
    while time.monotonic() < end: pass
spin(0.5)
got = []
for span in json.loads(os.environ["SPANS"]):
    cpu, wall = time.process_time(), time.monotonic()
    spin(span)
    got.append((time.process_time() - cpu) / (time.monotonic() - wall))
print(json.dumps(got))
"""


def measured(folder: Path, ranks: int) -> list[list[float]]:
    return [json.loads((folder / f"rank{rank}.out").read_text()) for rank in range(ranks)]


@pytest.mark.emulator
@pytest.mark.usefixtures("privileged")
def test_a_quota_holds(tmp_path: Path) -> None:
    with Emulation({"hosts": [{"cpu": 0.25}, {"cpu": 0.17}]}, run_dir=tmp_path, mechanism="privileged") as cluster:
        cluster.throttle()
        cluster.launch([*PYTHON, BUSY], env={"SPANS": "[0.5, 0.5, 0.5, 0.5]"})
        assert cluster.wait(60) == [0, 0]
    # What other tenants take of the machine lowers some of the spans, never raises one.
    assert [max(spans) for spans in measured(tmp_path, 2)] == pytest.approx([0.25, 0.17], rel=0.10)


@pytest.mark.emulator  # measured by the clock, so not beside other tests
def test_a_duty_cycle_holds_without_privilege(tmp_path: Path) -> None:
    # Small shares: unlike a control group, signals cannot give a rank more than its turn on a busy machine.
    with Emulation({"hosts": [{"cpu": 0.1}, {"cpu": 0.2}]}, run_dir=tmp_path, mechanism="duty-cycle") as cluster:
        assert cluster.mechanisms == {"network": "loopback", "cpu": "duty-cycle", "link": "none"}
        cluster.throttle()
        cluster.launch([*PYTHON, BUSY], env={"SPANS": "[1.0, 1.0, 1.0]"})
        assert cluster.wait(60) == [0, 0]
    for got, cores in zip(measured(tmp_path, 2), (0.1, 0.2), strict=True):
        assert sum(got) / len(got) < 1.15 * cores  # never more
        assert max(got) > 0.65 * cores  # less only where the machine's processor was taken away


def test_quotas_stay_above_what_the_kernel_accepts() -> None:
    for cores in (0.001, 0.02, 0.085, 0.1, 0.56, 3.0):
        quota, period = quota_and_period_us(cores)
        assert quota >= 1000
        assert quota / period == pytest.approx(cores, rel=0.01)
        assert period <= 1_000_000


def test_cgroup_v2_is_written_below_the_nearest_group_that_passes_cpu_on(tmp_path: Path) -> None:
    own = tmp_path / "user.slice" / "session.scope"
    own.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
    (own.parent / "cgroup.subtree_control").write_text("memory")
    (own / "cgroup.subtree_control").write_text("")
    found = find_cgroup(tmp_path, "0::/user.slice/session.scope\n")
    assert found == (tmp_path, 2)

    group = Cgroup(tmp_path, 2, "dynamix-test")
    group.limit("host0", 0.17)
    assert (tmp_path / "dynamix-test/host0/cpu.max").read_text() == "1700 10000"
    assert (tmp_path / "dynamix-test/cgroup.subtree_control").read_text() == "+cpu"
    group.limit("host0", None)
    assert (tmp_path / "dynamix-test/host0/cpu.max").read_text() == "max"


def test_without_control_groups_the_reason_is_given(tmp_path: Path) -> None:
    assert "no control groups are mounted" in str(find_cgroup(tmp_path, "0::/\n"))
    assert "no cpu controller" in str(find_cgroup(tmp_path, "3:cpu,cpuacct:/\n"))
    (tmp_path / "cgroup.controllers").write_text("cpu")
    (tmp_path / "cgroup.subtree_control").write_text("")
    assert "Delegate=yes" in str(find_cgroup(tmp_path, "0::/\n"))


def test_cgroup_v1_is_found_with_joined_controllers(tmp_path: Path) -> None:
    (tmp_path / "cpu,cpuacct" / "box").mkdir(parents=True)
    (tmp_path / "cpu,cpuacct" / "box" / "cpu.cfs_quota_us").write_text("-1")
    assert find_cgroup(tmp_path, "4:cpu,cpuacct:/box\n0::/\n") == (tmp_path / "cpu,cpuacct" / "box", 1)
