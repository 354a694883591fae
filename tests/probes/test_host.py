"""Processor and memory fractions, under the limits of control groups."""

from __future__ import annotations

import math
import multiprocessing
import time
from pathlib import Path

import psutil
import pytest

from dynamix.probes.host import Cgroups, HostProbe, allowed_cores


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def proc(tmp_path: Path, groups: str, mounts: str) -> Path:
    write(tmp_path / "proc", cgroup=groups, mountinfo=mounts)
    return tmp_path / "proc"


class TestHostProbe:
    def test_fractions_of_this_machine(self) -> None:
        available, detail = HostProbe.detect()
        assert available
        assert "cores allowed" in detail
        probe = HostProbe()
        burn(0.2)
        sample = probe.sample()
        assert set(sample) == {"cpu", "memory"}
        assert 0.0 < sample["memory"] < 1.0
        assert 0.02 < sample["cpu"] <= 1.0

    def test_cpu_is_since_the_previous_sample(self) -> None:
        probe = HostProbe()
        burn(0.1)
        probe.sample()
        time.sleep(0.2)
        assert probe.sample()["cpu"] < 0.2

    def test_cpu_is_a_fraction_of_the_quota(self, tmp_path: Path) -> None:
        write(tmp_path, cpu__max="25000 100000")
        # Half of a quarter of a core, measured in this process's own time so that a busy machine does not matter.
        probe = HostProbe(cgroups=Cgroups(cpu=(tmp_path,)))
        started, used = time.perf_counter(), time.process_time()
        burn(0.05)
        time.sleep(0.35)
        elapsed, used = time.perf_counter() - started, time.process_time() - used
        assert probe.sample()["cpu"] == pytest.approx(used / elapsed / 0.25, rel=0.2)

    def test_loader_workers_count(self) -> None:
        probe = HostProbe()
        worker = multiprocessing.get_context("fork").Process(target=burn, args=(60.0,), daemon=True)
        started = time.perf_counter()
        worker.start()
        try:
            while sum(psutil.Process(worker.pid).cpu_times()[:2]) < 0.2:
                time.sleep(0.02)
            used_s = probe.sample()["cpu"] * (time.perf_counter() - started) * allowed_cores(Cgroups.find())
        finally:
            worker.kill()
            worker.join()
        assert used_s > 0.15
        assert 0.0 <= probe.sample()["cpu"] <= 1.0  # one that ended does not count backwards


class TestCgroups:
    def test_version_2_takes_the_tightest_of_all_ancestors(self, tmp_path: Path) -> None:
        root = tmp_path / "fs"
        write(root / "pod", cpu__max="50000 100000", memory__max="max")
        write(root / "pod" / "job", cpu__max="max 100000", memory__max="1000", memory__current="700")
        write(root / "pod" / "job", memory__stat="anon 500\ninactive_file 200")
        here = proc(tmp_path, "0::/pod/job", f"41 31 0:38 / {root} rw shared:4 - cgroup2 cgroup2 rw")
        groups = Cgroups.find(here)
        assert groups.cpu == groups.memory == (root / "pod" / "job", root / "pod", root)
        assert groups.cpu_cores() == 0.5
        assert groups.memory_bytes() == (500.0, 1000.0)

    def test_version_1(self, tmp_path: Path) -> None:
        cpu, memory = tmp_path / "cpu,cpuacct", tmp_path / "memory"
        write(cpu / "job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
        write(cpu, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
        write(memory / "job", memory__limit_in_bytes="4096", memory__usage_in_bytes="3072")
        write(memory / "job", memory__stat="inactive_file 1\ntotal_inactive_file 1024")
        write(memory, memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="99999")
        here = proc(
            tmp_path,
            "4:memory:/job\n2:cpu,cpuacct:/job\n0::/",
            f"32 31 0:29 / {cpu} rw - cgroup cgroup rw,cpu,cpuacct\n"
            f"35 31 0:32 / {memory} rw - cgroup cgroup rw,memory\n"
            f"41 31 0:38 / {tmp_path} rw - cgroup2 cgroup2 rw",
        )
        groups = Cgroups.find(here)
        assert groups.cpu_cores() == 1.5
        assert groups.memory_bytes() == (2048.0, 4096.0)
        assert groups.memory_limit_bytes() == 4096.0

    @pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/elsewhere", "/../../up"])
    def test_a_container_sees_its_own_part_of_the_tree(self, tmp_path: Path, path: str) -> None:
        write(tmp_path / "fs", cpu__max="10000 100000")
        here = proc(tmp_path, f"0::{path}", f"41 31 0:38 /docker/abc {tmp_path / 'fs'} rw - cgroup2 cgroup2 rw")
        assert Cgroups.find(here).cpu_cores() == 0.1

    def test_no_limits_is_no_error(self, tmp_path: Path) -> None:
        for groups in (Cgroups.find(tmp_path / "nowhere"), Cgroups(cpu=(tmp_path,), memory=(tmp_path,))):
            assert math.isinf(groups.cpu_cores())
            assert math.isinf(groups.memory_limit_bytes())
            assert math.isinf(groups.memory_bytes()[1])
            assert HostProbe(cgroups=groups).sample()["memory"] > 0

    def test_a_limit_that_changes_is_seen(self, tmp_path: Path) -> None:
        groups = Cgroups(cpu=(tmp_path,))
        write(tmp_path, cpu__max="50000 100000")
        assert allowed_cores(groups) == 0.5
        write(tmp_path, cpu__max="20000 100000")
        assert allowed_cores(groups) == 0.2

    def test_memory_near_its_cgroup_limit_is_what_counts(self, tmp_path: Path) -> None:
        write(tmp_path, memory__max="1000", memory__current="990")
        assert HostProbe(cgroups=Cgroups(memory=(tmp_path,))).sample()["memory"] == pytest.approx(0.99)
