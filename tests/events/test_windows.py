"""Windows of many workers in the events file: small lines that read back, and damage that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.errors import StateError
from dynamix.events.records import EventLog, read_events
from dynamix.events.windows import PACKED_ABOVE, RAW_ABOVE, unpacked, window_record
from dynamix.window import PER_CLUSTER, PER_WORKER, Window
from tests.refused import refused

MANY = PACKED_ABOVE + 1


def window(workers: int, seed: int = 0, scale: float = 1e-3) -> Window:
    rng = np.random.default_rng(seed)
    known: dict[str, Any] = {name: rng.lognormal(size=workers) * scale for name in PER_WORKER}
    known["loss"][::3] = np.nan
    known["rtt_s"][:] = np.nan
    return Window.of(rng.integers(0, 100_000, workers), **known, steps=10.0, noise=1e9, signal=float("inf"))


def written(tmp_path: Path, value: Window) -> tuple[bytes, dict[str, Any]]:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(window_index=3, window=value, allocation=value.batch_size.tolist())
    (event,) = read_events(path)
    return path.read_bytes(), event


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 99), st.sampled_from([1e-300, 1e-9, 1.0, 1e12, 1e300]))
def test_every_number_is_right_to_a_quarter_of_a_percent_and_sizes_are_exact(w: int, seed: int, scale: float) -> None:
    value = window(w, seed, scale)
    back = Window.from_dict(unpacked(json.loads(json.dumps(window_record(value), allow_nan=False))))
    assert back.batch_size.tolist() == value.batch_size.tolist()
    for name in PER_WORKER:
        was, now = getattr(value, name), getattr(back, name)
        np.testing.assert_allclose(now, was, rtol=2.5e-3 if w > PACKED_ABOVE else 0, equal_nan=True)
    for name in PER_CLUSTER:
        was = getattr(value, name)
        assert np.array_equal(getattr(back, name), np.where(np.isfinite(was), was, np.nan), equal_nan=True)


def test_a_reader_sees_plain_lists_however_many_workers_there_are(tmp_path: Path) -> None:
    for workers in (4, MANY):
        folder = tmp_path / str(workers)
        _, event = written(folder, window(workers))
        assert set(event["window"]) == {"batch_size", *PER_WORKER, *PER_CLUSTER}
        assert event["window"]["loss"][0] is None
        assert event["window"]["rtt_s"] == [None] * workers
        assert event["allocation"] == window(workers).batch_size.tolist()


def test_a_line_of_1024_workers_takes_at_most_40_kb_with_everything_measured(tmp_path: Path) -> None:
    value = window(1024)
    line, _ = written(tmp_path, Window.of(value.batch_size % 500, **{n: getattr(value, n) for n in PER_WORKER}))
    assert len(line) <= 40 * 1024


def test_low_bytes_of_very_many_workers_go_as_they_are_and_read_back(tmp_path: Path) -> None:
    value = window(RAW_ABOVE + 1)
    line, event = written(tmp_path, value)
    back = Window.from_dict(event["window"])
    assert back.batch_size.tolist() == value.batch_size.tolist()
    for name in PER_WORKER:
        np.testing.assert_allclose(getattr(back, name), getattr(value, name), rtol=2.5e-3, equal_nan=True)
    cut = json.loads(line)
    cut["window"]["packed"] = cut["window"]["packed"][:-8]
    (tmp_path / "events.jsonl").write_text(json.dumps(cut) + "\n")
    refused(StateError, "the packed window is damaged", read_events, tmp_path / "events.jsonl")


@pytest.mark.parametrize(
    ("field", "broken"),
    [
        *(("packed", wrong) for wrong in ("!!", "eJwDAAAAAAE=", 7)),
        *(("shift", wrong) for wrong in ([0], ["x"] * len(PER_WORKER), [2**80] * len(PER_WORKER))),
        *(("workers", wrong) for wrong in (10**30, MANY + 1, -1)),
        ("sizes", ""),
        ("steps", ...),
    ],
)
def test_a_damaged_window_is_named_by_its_line(tmp_path: Path, field: str, broken: Any) -> None:
    line, _ = written(tmp_path, window(MANY))
    event = json.loads(line)
    event["window"][field] = broken
    if broken is ...:
        del event["window"][field]
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    refused(StateError, r"events.jsonl:1: the packed window is damaged", read_events, tmp_path / "events.jsonl")
