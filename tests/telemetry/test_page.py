"""The page: one file that loads nothing, with the data of the run in it."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.events.records import EventLog, read_events
from dynamix.telemetry import find_sources, page_data, page_html
from dynamix.telemetry.changes import LARGEST
from tests.telemetry.simulated import simulate


def made(*paths: Path) -> dict[str, Any]:
    sources = find_sources(paths)
    for source in sources:
        source.refresh()
    return page_data(sources)


def data_in(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return dict(json.loads(text))


def drawn(map_: dict[str, Any]) -> np.ndarray:
    """What the page makes of a heat map."""
    raw = np.frombuffer(base64.b64decode(map_["data"]), "<u1" if map_["bits"] == 8 else "<u2")
    values = map_["low"] + raw * map_["step"]
    return np.where(raw == 2 ** map_["bits"] - 1, np.nan, values).reshape(map_["rows"], map_["columns"])


def test_the_page_loads_nothing_and_holds_its_data(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", windows=12, policy="guarded:dynamix")
    data = made(tmp_path)
    page = page_html(data)
    assert data_in(page) == data
    tags = re.sub(r"<script.*?</script>|<style>.*?</style>|<!--.*?-->", "", page, flags=re.S)
    assert re.findall(r'(?:src|href)="([^"]*)"', tags) == ["data:,"]
    assert "<!--" not in page.replace("<!-- The plots", "")
    assert "Leon Sorokin" in page  # the licence of what is vendored
    assert data["headline"] in page


def test_a_few_workers_are_lines_and_many_are_maps(tmp_path: Path) -> None:
    simulate(tmp_path / "few" / "events.jsonl", workers=4, windows=12)
    (run,) = made(tmp_path / "few")["runs"]
    events = read_events(tmp_path / "few" / "events.jsonl")
    assert np.array_equal(np.array(run["each"]["size"]).T, [event["window"]["batch_size"] for event in events])
    assert run["one"]["global_batch"]["mean"] == [sum(event["window"]["batch_size"]) for event in events]
    simulate(tmp_path / "many" / "events.jsonl", workers=100, windows=12)
    (run,) = made(tmp_path / "many")["runs"]
    events = read_events(tmp_path / "many" / "events.jsonl")
    assert np.array_equal(drawn(run["each"]["size"]).T, [event["window"]["batch_size"] for event in events])
    compute = np.array([event["window"]["compute"] for event in events]).T
    assert np.allclose(drawn(run["each"]["compute"]), compute, atol=run["each"]["compute"]["step"])
    assert len(run["bars"]) == 12


def test_changes_of_sizes_are_counted_and_the_largest_are_told(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", windows=100)
    (run,) = made(tmp_path)["runs"]
    events = read_events(tmp_path / "events.jsonl")
    sizes = [event["window"]["batch_size"] for event in events]
    changed = [index for index, (a, b) in enumerate(itertools.pairwise(sizes), 1) if a != b]
    assert run["change_count"] == len(changed) > LARGEST == len(run["changes"])
    for change in run["changes"]:
        before, after = sizes[change["window"] - 1], sizes[change["window"]]
        assert change["total"] == [sum(before), sum(after)]
        worker = change["most"][0]
        assert change["most"] == [worker, before[worker], after[worker]]
    totals = [abs(math.log(sum(sizes[index]) / sum(sizes[index - 1]))) for index in changed]
    assert changed[totals.index(max(totals))] in [change["window"] for change in run["changes"]]


def test_a_run_that_is_followed_line_by_line_has_the_page_of_one_read_at_once(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", windows=150)
    (at_once,) = made(tmp_path)["runs"]
    sources = find_sources([tmp_path])
    for source in sources:
        for line in source.follower.more():
            view = source._view(line)
            view.add(line)
            view.settle()
    (followed,) = page_data(sources)["runs"]
    for run in (at_once, followed):
        del run["facts"]
    assert followed == at_once


def test_a_long_run_is_a_small_page(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", workers=12, windows=500, distinct=20)
    data = made(tmp_path)
    (run,) = data["runs"]
    assert len(run["ends"]) <= 480
    assert run["windows"] == 500
    assert len(page_html(data)) < 250_000


def test_strings_of_a_file_cannot_leave_their_place(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--DATA-->"
    simulate(tmp_path / "events.jsonl", windows=3)
    events = read_events(tmp_path / "events.jsonl")
    (tmp_path / "events.jsonl").unlink()
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in events:
            log.write(**{**event, "policy": evil, "guard": {"by": "rule", "reason": evil, "error": evil}})
    data = made(tmp_path)
    page = page_html({**data, "title": evil})
    assert "<script>alert" not in page
    assert data_in(page)["runs"][0]["name"] == evil


def test_the_command_writes_the_page_and_says_what_it_shows(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    simulate(folder / "events.jsonl", windows=12)
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert "4 workers" in done.stdout
    assert (folder / "report.html").exists()
    (folder / "report.html").write_text("a page of the demo's own")
    CliRunner().invoke(app, ["report", str(folder)])
    assert (folder / "report.html").read_text() == "a page of the demo's own"
    assert (folder / "dynamix-report.html").exists()
    single = CliRunner().invoke(app, ["report", str(folder / "events.jsonl"), "--out", str(tmp_path / "page.html")])
    assert single.exit_code == 0
    found = json.loads(CliRunner().invoke(app, ["report", str(folder), "--json"]).stdout)
    assert found["runs"][0]["windows"] == 12


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds events.jsonl" in done.stderr
    simulate(tmp_path / "events.jsonl", windows=2)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "no/such/page.html")])
    assert done.exit_code == 2
    assert "error: out=" in done.stderr
