"""A long events file is thinned: it stays bounded, and a reader still sees the whole run."""

from __future__ import annotations

import errno
import itertools
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from dynamix.errors import StateError
from dynamix.events import records
from dynamix.events.background import BackgroundLog
from dynamix.events.records import EventLog, read_events
from dynamix.events.replay import recorded
from dynamix.telemetry.run import RunView
from dynamix.telemetry.sources import RunSource
from dynamix.window import Window

MOST_BYTES = 40_000


def _line(index: int) -> dict[str, Any]:
    window = Window.of([8, 24], compute=[0.25, 0.75], wait=[0.5, 0.0], steps=10, step=10 * (index + 1))
    told = {"decision": "new", "allocation": [8, 24], "from_step": 10 * index, "noise": 1.0, "signal": 1.0}
    return {"window_index": index, "window": window, **told, "samples_seen": 320 * (index + 1), "time_s": 10.0 + index}


def _written(path: Path, begin: int, end: int) -> list[int]:
    """The file's largest sizes while windows are written by a job's own log."""
    log, sizes = BackgroundLog(path), []
    for index in range(begin, end):
        log._append(_line(index))
        sizes.append(path.stat().st_size)
    log._shut()
    return sizes


@pytest.fixture(autouse=True)
def _short_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_BYTES", MOST_BYTES)


def _view(path: Path) -> RunView:
    source = RunSource(path, "run")
    source.refresh()
    (view,) = source.views.values()
    return view


def test_a_file_stays_bounded_and_keeps_its_beginning_and_the_newest_windows(tmp_path: Path) -> None:
    sizes = _written(tmp_path / "events.jsonl", 0, 2000)
    assert max(sizes) <= MOST_BYTES + 1000
    kept = [event["window_index"] for event in read_events(tmp_path / "events.jsonl")]
    assert kept[0] == 0
    newest = int(0.4 * MOST_BYTES / (sizes[0] + 10))  # lines
    assert kept[-newest:] == list(range(2000 - newest, 2000))
    assert kept == sorted(set(kept))
    gaps = [later - earlier for earlier, later in itertools.pairwise(kept)]
    assert gaps[1] > gaps[len(gaps) // 2] >= gaps[-1] == 1  # the older, the thinner
    assert list(tmp_path.iterdir()) == [tmp_path / "events.jsonl"]


def test_a_report_of_it_is_that_of_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _written(tmp_path / "thinned.jsonl", 0, 600)
    monkeypatch.setattr(records, "MOST_BYTES", 2**26)
    _written(tmp_path / "whole.jsonl", 0, 600)
    thinned, whole = _view(tmp_path / "thinned.jsonl"), _view(tmp_path / "whole.jsonl")
    assert thinned.windows < whole.windows == 600
    for name in ("seconds", "samples", "steps", "samples_per_s", "mean_waiting"):
        assert getattr(thinned, name) == pytest.approx(getattr(whole, name))
    source = RunSource(tmp_path / "thinned.jsonl", "run")
    source.refresh()
    assert source.missing() == ["thinned.jsonl grew long, and a part of its older windows was left out"]


def test_a_job_that_goes_on_thins_what_an_earlier_version_left_and_keeps_where_runs_begin(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for _ in range(3):
            for index in range(400):
                log.write(**_line(index))
    assert (tmp_path / "events.jsonl").stat().st_size > 5 * MOST_BYTES
    (tmp_path / "linked.jsonl").symlink_to(tmp_path / "events.jsonl")
    _written(tmp_path / "linked.jsonl", 400, 401)
    assert (tmp_path / "linked.jsonl").is_symlink()
    assert (tmp_path / "events.jsonl").stat().st_size < MOST_BYTES
    events = read_events(tmp_path / "events.jsonl")
    assert [event["window_index"] for event in events].count(0) == 3
    assert events[-1]["window_index"] == 400


def test_a_reader_that_follows_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    _written(path, 0, 60)
    source = RunSource(path, "run")
    source.refresh()
    before = path.stat().st_size
    index = 60
    while path.stat().st_size >= before or "thinned" not in read_events(path)[0]:
        _written(path, index, index + 1)
        index += 1
    while path.stat().st_size <= before:  # as long as it was, when it is read next
        _written(path, index, index + 1)
        index += 1
    source.refresh()
    (view,) = source.views.values()
    assert view.windows == len(read_events(path))
    assert view.samples == 320 * index
    assert not [said for said in source.missing() if "line" in said]


def test_what_was_thinned_is_not_replayed(tmp_path: Path) -> None:
    _written(tmp_path / "events.jsonl", 0, 10)
    assert len(recorded(tmp_path / "events.jsonl", 2)) == 10
    _written(tmp_path / "events.jsonl", 10, 300)
    with pytest.raises(StateError, match=r"windows were left out of this file .* cannot be replayed"):
        recorded(tmp_path / "events.jsonl", 2)


def test_a_file_that_cannot_be_thinned_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, other: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records.shutil, "copymode", full)
    with caplog.at_level(logging.WARNING, logger="dynamix"):
        sizes = _written(tmp_path / "events.jsonl", 0, 300)
    assert len(read_events(tmp_path / "events.jsonl")) == 300
    assert 1 < len(caplog.records) <= math.log2(sizes[-1] / MOST_BYTES) + 1
    assert list(tmp_path.iterdir()) == [tmp_path / "events.jsonl"]
    assert "No space left on device" in caplog.text
