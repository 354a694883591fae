"""The lowest work there is keeps processors awake, and ends with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamix.emulator import awake
from dynamix.emulator.limits import start_helper, stop_helper

pytestmark = pytest.mark.timeout(60)
OWNER = """
import sys, time
from dynamix.emulator import awake
from dynamix.emulator.limits import start_helper
print(start_helper(awake.__file__).pid, flush=True)
time.sleep(50)
"""


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _wait_for_children(pid: int) -> list[int]:
    processors = len(os.sched_getaffinity(0))
    deadline = time.monotonic() + 20
    while len(found := _children(pid)) < processors or any(os.sched_getscheduler(c) != os.SCHED_IDLE for c in found):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def _gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_one_idle_process_turns_on_every_processor_until_it_is_stopped() -> None:
    helper = start_helper(awake.__file__)
    turning = _wait_for_children(helper.pid)
    assert sorted(next(iter(os.sched_getaffinity(pid))) for pid in turning) == sorted(os.sched_getaffinity(0))
    assert all(len(os.sched_getaffinity(pid)) == 1 for pid in turning)
    stop_helper(helper)
    assert _gone(turning)


@pytest.mark.parametrize("dies", ["owner", "helper"])
def test_nothing_turns_on_when_somebody_above_is_killed(dies) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    helper = int(owner.stdout.readline())
    turning = _wait_for_children(helper)
    os.kill(owner.pid if dies == "owner" else helper, signal.SIGKILL)
    assert _gone(turning)
    owner.kill()
    owner.wait()
    owner.stdout.close()


def test_who_works_loses_little_to_it() -> None:
    """Processor time of one busy process per processor, beside the idle ones; other load takes from both."""
    helper = start_helper(awake.__file__)
    turning = _wait_for_children(helper.pid)
    before = [_ticks(pid) for pid in turning]
    spin = "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in turning]
    began = time.monotonic()
    for process in busy:
        process.wait()
    took = (time.monotonic() - began) * os.sysconf("SC_CLK_TCK")
    idle = [_ticks(pid) - then for pid, then in zip(turning, before, strict=True)]
    stop_helper(helper)
    assert sum(idle) < 0.1 * took * len(turning)


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
