"""Equal conditions for measurements: processors that are kept awake, by work that ends with its owner, and heaps that
are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamix_lab.emulator import Emulation, awake, cluster
from dynamix_lab.emulator.limits import start_helper, stop_helper

pytestmark = pytest.mark.timeout(100)
OWNER = """
import os, time
from dynamix_lab.emulator import awake
from dynamix_lab.emulator.limits import start_helper
print(start_helper(awake.__file__, str(os.getpid())).pid, flush=True)
time.sleep(90)
"""
PROCESSORS = sorted(os.sched_getaffinity(0))


def _turning(pid: int) -> list[int]:
    """Its children of the lowest class."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and _fields(int(entry.name))[1] == str(pid):
                found += [int(entry.name)] * (os.sched_getscheduler(int(entry.name)) == os.SCHED_IDLE)
        except (OSError, IndexError):
            continue  # ended meanwhile
    return found


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _wait(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _gone(pid: int) -> bool:
    try:
        return _fields(pid)[0] in "ZX"
    except (OSError, IndexError):
        return True


@contextmanager
def _awake() -> Iterator[list[int]]:
    helper = start_helper(awake.__file__, str(os.getpid()))
    try:
        _wait(lambda: len(_turning(helper.pid)) == len(PROCESSORS))
        yield _turning(helper.pid)
    finally:
        stop_helper(helper, b"g")


def test_one_idle_process_turns_on_every_processor_until_it_is_stopped() -> None:
    with _awake() as turning:
        assert sorted(tuple(os.sched_getaffinity(pid)) for pid in turning) == [(cpu,) for cpu in PROCESSORS]
    _wait(lambda: all(map(_gone, turning)))


@pytest.mark.parametrize("dies", ["owner", "helper"])
def test_nothing_turns_on_when_somebody_above_is_killed(dies) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        with owner.stdout as out:
            helper = int(out.readline())
        _wait(lambda: len(_turning(helper)) == len(PROCESSORS))
        turning = _turning(helper)
        os.kill(owner.pid if dies == "owner" else helper, signal.SIGKILL)
        _wait(lambda: all(map(_gone, turning)))
    finally:
        owner.kill()
        owner.wait()


@pytest.mark.long
@pytest.mark.emulator
def test_who_works_loses_little_to_it() -> None:
    """Processor time beside one busy process on every processor; other load takes from both."""
    with _awake() as turning:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in PROCESSORS]
        for process, processor in zip(busy, PROCESSORS, strict=True):
            os.sched_setaffinity(process.pid, {processor})
        time.sleep(1.0)
        before, began = sum(map(_ticks, turning)), time.monotonic()
        time.sleep(3.0)
        idle, took = sum(map(_ticks, turning)) - before, time.monotonic() - began
        for process in busy:
            process.kill()
            process.wait()
    assert idle < 0.1 * took * len(PROCESSORS) * os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("asked", "virtual", "quota", "turns"),
    [
        (True, True, float("inf"), True),
        (False, True, float("inf"), False),
        (True, False, float("inf"), False),
        (True, True, 1.5, False),
    ],
)
def test_an_emulation_keeps_awake_where_asked_and_where_it_helps(
    monkeypatch, tmp_path, asked, virtual, quota, turns
) -> None:
    started = []

    def start(script, *arguments):
        started.append(script)
        return start_helper(script, *arguments)

    monkeypatch.setattr(awake, "is_virtual", lambda: virtual)
    monkeypatch.setattr(cluster.Cgroups, "cpu_cores", lambda self: quota)
    monkeypatch.setattr(cluster, "start_helper", start)
    with Emulation({"hosts": [{"cpu": 0.5}]}, run_dir=tmp_path, mechanism="duty-cycle", keep_awake=asked):
        assert (awake.__file__ in started) == turns


def test_ranks_keep_their_heap_unless_told_otherwise(tmp_path) -> None:
    names = ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"]
    program = f"import os; print(*(os.environ[name] for name in {names}))"
    with Emulation({"hosts": [{"cpu": 0.5}]}, run_dir=tmp_path, mechanism="duty-cycle") as hosts:
        hosts.launch([sys.executable, "-c", program])
        assert hosts.wait(60) == [0]
        hosts.launch([sys.executable, "-c", program], env={"MALLOC_TOP_PAD_": "0"}, name="mine")
        assert hosts.wait(60) == [0]
    assert (tmp_path / "rank0.out").read_text().split() == [str(2**25), str(2**30), str(2**26)]
    assert (tmp_path / "mine.rank0.out").read_text().split() == [str(2**25), str(2**30), "0"]


def _ticks(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[11]) + int(fields[12])
