"""Event lines of a job: off the step path, and no reason to end it."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from dynamix.events.background import BACKLOG, BackgroundLog
from dynamix.events.records import read_events
from tests.processes import run


def _written(log: BackgroundLog, lines: int) -> None:
    deadline = time.monotonic() + 30
    while (not log.path.exists() or len(read_events(log.path)) < lines) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(read_events(log.path)) == lines


def test_lines_arrive_in_order_while_the_log_is_open_and_nothing_stays_after_it(tmp_path: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    log = BackgroundLog(tmp_path / "new" / "events.jsonl")
    assert threading.active_count() == threads  # nothing before the first line
    for i in range(20):
        log.write(step=i)
    _written(log, 20)
    assert log.close()
    assert log.close()
    assert [event["step"] for event in read_events(log.path)] == list(range(20))
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # those of others may be closed meanwhile
    log.write(step=20)  # begins anew
    assert log.close()
    assert len(read_events(log.path)) == 21
    assert log.dropped == 0


def test_a_removed_folder_is_made_again(tmp_path: Path) -> None:
    log = BackgroundLog(tmp_path / "run" / "events.jsonl")
    log.write(step=0)
    _written(log, 1)
    shutil.rmtree(tmp_path / "run")
    log.write(step=1)
    assert log.close()
    assert [event["step"] for event in read_events(log.path)] == [1]


_BESIDE = """
import logging, sys
from dynamix.events.background import BackgroundLog
logging.basicConfig()
log = BackgroundLog(sys.argv[1])
log.write(step=1)
assert log.close()
"""


def test_two_jobs_that_write_one_file_are_noticed(tmp_path: Path) -> None:
    log, deadline = BackgroundLog(tmp_path / "events.jsonl"), time.monotonic() + 30
    log.write(step=0)
    while not (log.path.exists() and log.path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "another job writes" in run("-c", _BESIDE, log.path).stderr
    assert log.close()
    assert "another job writes" not in run("-c", _BESIDE, log.path).stderr
    assert [event["step"] for event in read_events(log.path)] == [0, 1, 1]


def test_what_cannot_be_written_is_dropped_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = BackgroundLog(tmp_path / "file" / "events.jsonl")
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="dynamix"):
        for i in range(3):
            log.write(step=i)
        log.write(step=object())
        assert log.close()
    assert log.dropped == 4
    assert [record.getMessage().count("training goes on") for record in caplog.records] == [1]
    (tmp_path / "file").unlink()
    log.write(step=4)
    log.write(step=5)
    assert log.close()
    assert [(e["step"], e.get("dropped")) for e in read_events(log.path)] == [(4, 4), (5, None)]


def test_a_disk_that_hangs_drops_lines_instead_of_memory(tmp_path: Path) -> None:
    log = BackgroundLog(tmp_path / "pipe")
    os.mkfifo(log.path)  # opening it waits for a reader
    for i in range(BACKLOG + 10):
        log.write(step=i)
    assert log.dropped >= 9
    assert not log.close(timeout_s=0.1)
    reader = os.open(log.path, os.O_RDONLY | os.O_NONBLOCK)
    time.sleep(0.2)
    os.close(reader)


_FULL = """
import resource, sys
from dynamix.events.background import BackgroundLog
log = BackgroundLog(sys.argv[1])
log.write(step=0, text="a" * 100)
log.close()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
log.write(step=1, text="b" * 100)
log.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.write(step=2)
log.close()
"""


def test_a_line_that_was_cut_by_a_full_disk_does_not_spoil_the_next(tmp_path: Path) -> None:
    """A limit of the file's size: the kernel takes a part of the line, as a full disk does."""
    done = run("-c", _FULL, tmp_path / "events.jsonl")
    assert "lines are dropped" in done.stderr
    events = read_events(tmp_path / "events.jsonl")
    assert [(event["step"], event.get("dropped")) for event in events] == [(0, None), (2, 1)]
