"""Events files as they are found: whole, cut off, growing, replaced, of other programs and of later versions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dynamix.errors import ConfigError, StateError
from dynamix.events.records import EventLog, read_events
from dynamix.events.windows import window_of
from dynamix.telemetry import find_sources
from dynamix.telemetry.bins import BinnedSeries
from dynamix.telemetry.reading import EventFollower
from dynamix.telemetry.sentences import sentences
from dynamix.telemetry.sources import RunSource, require_some
from dynamix.window import Window
from tests.refused import refused
from tests.telemetry.simulated import simulate


def source(path: Path) -> RunSource:
    (found,) = find_sources([path])
    found.refresh()
    return found


def test_every_line_of_a_whole_file_is_read_as_read_events_does(tmp_path: Path) -> None:
    for workers in (3, 70):  # above 64 windows are packed
        path = simulate(tmp_path / str(workers) / "events.jsonl", workers=workers, windows=9)
        follower = EventFollower(path)
        lines = list(follower.more())
        assert follower.problems() == []
        for line, event in zip(lines, read_events(path), strict=True):
            same = Window.from_dict(event["window"])
            assert np.array_equal(line.window.batch_size, same.batch_size)
            assert np.array_equal(line.window.compute, same.compute, equal_nan=True)
            assert np.array_equal(window_of(event["window"]).wait, same.wait, equal_nan=True)
            assert np.isnan(line.window.rtt_s).all()  # nobody asks for it


def test_a_file_that_grows_is_followed_and_half_a_line_waits(tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole.jsonl", windows=8).read_bytes()
    path = tmp_path / "events.jsonl"
    follower, read = EventFollower(path), 0
    for end in range(0, len(whole) + 1, 997):
        path.write_bytes(whole[:end])
        read += len(list(follower.more()))
        assert read == whole[:end].count(b"\n")
        assert follower.unfinished == (end > 0 and whole[end - 1 : end] != b"\n")
    path.write_bytes(whole)
    assert read + len(list(follower.more())) == 8
    assert not follower.problems()


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = simulate(tmp_path / "events.jsonl", windows=9)
    found = source(path)
    assert next(iter(found.views.values())).windows == 9
    path.write_bytes(b"")
    found.refresh()
    assert not found.views
    simulate(path, windows=4, seed=5)
    assert found.refresh()
    assert [view.windows for view in found.views.values()] == [4]


def test_what_cannot_be_read_is_left_out_and_said(tmp_path: Path) -> None:
    path = simulate(tmp_path / "events.jsonl", windows=6)
    lines = path.read_bytes().splitlines(keepends=True)
    event = json.loads(lines[0])
    uneven = {**event, "window": {**event["window"], "compute": [0.1, 0.2]}}
    other = [b"no json\n", b'{"schema": 7, "window": {}}\n', b'{"schema": 2}\n', json.dumps(uneven).encode() + b"\n"]
    path.write_bytes(b"".join([*lines[:3], *other, *lines[3:], b'{"schema": 2, "windo']))
    found = source(path)
    assert next(iter(found.views.values())).windows == 6
    said = " ".join(found.missing())
    assert "1 line is no event" in said
    assert "the first is line 4" in said
    assert "1 line is of a later version" in said
    assert "2 lines without a window" in said
    assert "ends within a line" in said


def test_lists_that_nobody_reads_are_left_out_of_a_line_and_a_strange_line_is_read_whole(tmp_path: Path) -> None:
    path = simulate(tmp_path / "events.jsonl", windows=2)
    strange = [json.loads(line) for line in path.read_text().splitlines()]
    strange[0]["allocation"] = [["a],", 1], [2]]
    strange[1] |= {"note": '"rtt_s":[1],', "rounds": {"rtt_s": [[1], [2]]}}
    path.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in strange))
    first, second = EventFollower(path).more()
    assert first.window.workers == second.window.workers == 4
    assert second.fields["note"] == '"rtt_s":[1],'


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n\x00", b'{"schema": 3}\n', b"[1, 2]\n" * 3, b"\n\n"])
def test_a_file_without_any_window_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    refused(StateError, "give a run folder or its events", require_some, [source(path)])


def test_paths_that_name_no_run_are_errors(tmp_path: Path) -> None:
    refused(ConfigError, "whose sub-folders do", find_sources, [tmp_path])
    refused(ConfigError, "this one does not", find_sources, [tmp_path / "none"])
    refused(ConfigError, "one run or more", find_sources, [])


def test_runs_that_share_a_file_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "demo" / "events.jsonl"
    for policy, seed in (("static", 1), ("dynamix", 1), ("static", 2)):
        simulate(tmp_path / "one.jsonl", windows=3, policy="static")
        with EventLog(path) as log:
            for event in read_events(tmp_path / "one.jsonl"):
                log.write(**{**event, "policy": policy, "seed": seed})
        (tmp_path / "one.jsonl").unlink()
    (path.parent / "result.json").write_text(
        json.dumps({"seeds": [1, 2], "policies": {"static": {"curve": [[[1.0, 64, 0.5]], [[1.0, 64, 0.25]]]}}})
    )
    found = source(path.parent)
    assert list(found.views) == ["static, seed 1", "dynamix, seed 1", "static, seed 2"]
    assert found.curve(found.views["static, seed 2"]) == [[1.0, 64.0, 0.25]]
    assert found.curve(found.views["dynamix, seed 1"]) is None


def test_a_job_that_goes_on_is_one_run_and_one_that_begins_anew_is_another(tmp_path: Path) -> None:
    path = simulate(tmp_path / "events.jsonl", windows=6)
    first = read_events(path)
    smaller = read_events(simulate(tmp_path / "other.jsonl", workers=3, windows=8))[6:]
    smaller = [{**event, "time_s": event["time_s"] - 1000.0} for event in smaller]  # its clock began anew
    with EventLog(path) as log:
        for event in [*smaller, *first]:
            log.write(**event)
    resumed, again = source(path).views.values()
    assert (resumed.windows, again.windows) == (8, 6)
    assert resumed.notices.counts == {"restart": 1, "workers": 1}
    assert (np.diff(resumed.series.ends_s) >= 0).all()
    assert resumed.workers == 4
    assert sentences(resumed)[0].startswith("3 to 4 workers used ")
    assert np.isnan(resumed.series.each("size")[3, 6:]).all()


@pytest.mark.parametrize(("paused_s", "noted"), [(12.0, {"pause": 1}), (4.0, {})])
def test_a_long_pause_is_an_event(tmp_path: Path, paused_s: float, noted: dict[str, int]) -> None:
    events = read_events(simulate(tmp_path / "all.jsonl", windows=20))
    with EventLog(tmp_path / "events.jsonl") as log:
        for index, event in enumerate(events):
            log.write(**event | {"time_s": event["time_s"] + paused_s * (index >= 7)})
    (view,) = source(tmp_path / "events.jsonl").views.values()
    assert view.notices.counts == noted
    if noted:
        (notice,) = view.notices.kept
        assert (notice.window, notice.at_s) == (7, events[6]["time_s"])
        assert notice.text.startswith("12 s passed outside of measured steps: a pause, ")
        assert sentences(view)[-1] == "There was 1 long time outside of measured steps."


def test_a_run_that_died_is_said_with_its_last_words(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", windows=2)
    ranks = tmp_path / "ranks" / "0"
    ranks.mkdir(parents=True)
    (ranks / "rank1.err").write_text("Traceback\n  File\ntorch.OutOfMemoryError: CUDA out of memory\nsomething else\n")
    (tmp_path / "run.json").write_text(json.dumps({"command": "emulate"}))
    assert "still being written" in " ".join(source(tmp_path).missing())
    (tmp_path / "result.json").write_text(json.dumps({"seeds": [0], "exit_codes": [0, 1, -9]}))
    said = source(tmp_path).missing()
    assert said == [
        "Rank 1 ended with exit code 1: torch.OutOfMemoryError: CUDA out of memory.",
        "Rank 2 ended with signal 9.",
    ]


def test_a_rank_that_died_under_observe_is_said(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", windows=2)
    told = {"command": "observe", "missing": [], "unfinished": [1]}
    (tmp_path / "result.json").write_text(json.dumps(told))
    assert source(tmp_path).missing() == ["Rank 1 never said that it ended: it died, or runs."]
    (tmp_path / "result.json").write_text(json.dumps({**told, "missing": [2, 3], "unfinished": "?"}))
    assert source(tmp_path).missing() == ["Each of these ranks wrote nothing: 2, 3."]


def test_bins_hold_the_means_and_ends_of_all_windows() -> None:
    rng = np.random.default_rng(0)
    values, each, weights = rng.normal(size=777), rng.normal(size=(777, 3)), rng.uniform(1, 5, 777)
    each[rng.random((777, 3)) < 0.2] = np.nan
    series = BinnedSeries(["loss"], ["size"], workers=3, most=16)
    for i in range(777):
        one, now = slice(i, i + 1), np.array([float(i)])
        series.extend(now, now + 1, weights[one], {"loss": values[one]}, {"size": each[one]})
    assert (series.width, series.bins) == (64, 13)
    parts = [slice(64 * i, 64 * (i + 1)) for i in range(13)]
    expected = [np.average(values[part], weights=weights[part]) for part in parts]
    assert np.allclose(series.mean("loss"), expected)
    assert np.allclose(series.least("loss"), [values[part].min() for part in parts])
    known = np.isfinite(each)
    expected_each = [np.average(each[known[:, w], w], weights=weights[known[:, w]]) for w in range(3)]
    assert np.allclose(series.overall("size"), expected_each)
    assert np.allclose(
        series.each("size")[1, 2],
        np.average(each[parts[2], 1][known[parts[2], 1]], weights=weights[parts[2]][known[parts[2], 1]]),
        rtol=1e-5,
    )
    assert series.ends_s[-1] == 777
