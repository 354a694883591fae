import json
import tracemalloc

import numpy as np
import pytest

from dynamix.errors import ConfigError, StateError
from dynamix.events.background import BackgroundLog, background_log
from dynamix.events.records import EventLog, read_events
from dynamix.window import Window
from tests.refused import refused


def test_what_was_written_is_read_back_window_included(tmp_path):
    window = Window.of([3, 5], compute=[0.1, np.nan])
    with EventLog(tmp_path / "new" / "events.jsonl") as log:
        log.write(window=window.to_dict(), allocation=[4, 4], decision="new")
        log.write(loss=float("nan"), decision="keep")
        first, second = read_events(log.path)  # every line is on disk before the next
    assert first["schema"] == 2
    assert Window.from_dict(first["window"]).batch_size.tolist() == [3, 5]
    assert second["loss"] is None


def test_a_killed_run_loses_only_the_line_it_was_writing_and_can_be_continued(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(step=1)
        log.write(step=2)
    path.write_bytes(path.read_bytes()[:-5])
    assert [e["step"] for e in read_events(path)] == [1]
    with EventLog(path) as log:
        log.write(step=3)
    assert [e["step"] for e in read_events(path)] == [1, 3]


@pytest.mark.parametrize("line", ["{broken", "[1]", json.dumps({"schema": 9})])
def test_a_broken_or_foreign_line_in_the_middle_is_an_error_that_names_it(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_text(f'{{"schema": 2}}\n{line}\n{{"schema": 2}}\n')
    refused(StateError, r"events\.jsonl:2", read_events, path)


def test_a_missing_file_is_named(tmp_path):
    refused(StateError, "nowhere", read_events, tmp_path / "nowhere.jsonl")


def test_lines_of_version_0_1_are_refused_by_name(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"schema": 1, "loss": 2.0}) + "\n")
    with pytest.raises(StateError, match=r"events\.jsonl:1: event has schema 1, this version reads 2"):
        read_events(path)


def test_opening_reads_the_ends_of_a_file_and_not_all_of_it(tmp_path):
    path, line = tmp_path / "events.jsonl", b'{"schema":2,"a":"' + b"x" * 500_000 + b'"}\n'
    for whole, unfinished in ((40, b""), (40, b"{"), (40, line[:-1]), (0, line[:-1])):
        path.write_bytes(whole * line + unfinished)
        tracemalloc.start()
        background_log(path)
        with EventLog(path) as log:
            log.write(b=1)
        assert tracemalloc.get_traced_memory()[1] < 6e6
        tracemalloc.stop()
        assert path.read_bytes() == whole * line + b'{"schema":2,"b":1}\n'


def test_the_environment_names_another_file_than_the_script(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMIX_EVENTS", str(tmp_path / "outside"))
    for path in (None, tmp_path / "of the script"):
        log = background_log(path)
        log.write(step=1)
        assert log.close()
    assert [e["step"] for e in read_events(tmp_path / "outside")] == [1, 1]
    assert not (tmp_path / "of the script").exists()


@pytest.mark.parametrize(
    "content", [b"a note", b"a\nb", b'{"schema":1}\n', b'{"schema":25}\n{', b"[1]\n", b"\x1f\x8b\n\xff"]
)
def test_a_file_of_something_else_is_neither_cut_nor_written_to(tmp_path, content, monkeypatch):
    path = tmp_path / "notes"
    path.write_bytes(content)
    refused(ConfigError, "notes", EventLog(path).write, step=1)
    monkeypatch.setenv("DYNAMIX_EVENTS", str(path))
    refused(ConfigError, "DYNAMIX_EVENTS=.*notes", background_log, None)
    log = BackgroundLog(path)  # the file became another one after the job began
    log.write(step=1)
    assert log.close()
    assert (log.dropped, path.read_bytes()) == (1, content)
