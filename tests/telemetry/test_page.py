"""The page: one file that loads nothing, with the data of the run in it."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from importlib.resources import files
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


LUMINANCE = np.array([0.2126, 0.7152, 0.0722])
# How all, and those without a kind of cones for red or green, see linear sRGB (Machado and others, 2009).
SIGHTS = np.array(
    [
        np.eye(3),
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    ]
)
LMS = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
LAB = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])


def linear(colour: str) -> np.ndarray:
    levels = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.asarray(np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4))


def oklab(seen: np.ndarray) -> np.ndarray:
    return np.asarray(LAB @ np.cbrt(LMS @ seen.clip(0, 1)))


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


def test_eight_lines_can_be_told_apart_in_both_modes_also_by_those_who_see_two_kinds_of_colour() -> None:
    sheet = (files("dynamix.telemetry") / "static" / "page.css").read_text(encoding="utf-8")
    palettes = re.findall(r"--card: (#\w{6})|--c\d: (#\w{6})", sheet)
    assert len(palettes) == 2 * 9
    for card, *colours in (palettes[:9], palettes[9:]):
        lines = [linear(colour) for _, colour in colours]
        paper = linear(card[0]) @ LUMINANCE
        for seen in lines:
            dark, bright = sorted((seen @ LUMINANCE, paper))
            assert (bright + 0.05) / (dark + 0.05) >= 3
        for sight in SIGHTS:
            seen = np.array([oklab(sight @ line) for line in lines])
            apart = np.linalg.norm(seen[:, None] - seen, axis=2) + np.eye(8)
            assert apart.min() > 0.07, (sight, np.argwhere(apart == apart.min()))


def test_neighbouring_lines_differ_by_dash_too() -> None:
    scripts = (files("dynamix.telemetry") / "static" / "charts.js").read_text(encoding="utf-8")
    (dashes,) = re.findall(r"const DASHES = (\[.*\]);", scripts)
    patterns = json.loads(dashes.replace("undefined", "null"))
    looks = [(i % 8, str(patterns[(i + i // 8) % len(patterns)])) for i in range(32)]
    assert "(i + Math.floor(i / 8)) % DASHES.length" in scripts
    assert len(set(looks)) == 32
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in itertools.pairwise(looks))


def test_a_page_without_a_window_says_what_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    assert "waits for the first one" in made(tmp_path)["headline"]
    (tmp_path / "another.jsonl").touch()
    assert made(tmp_path, tmp_path / "another.jsonl")["headline"] == made(tmp_path)["headline"]
    (tmp_path / "result.json").write_text('{"command": "emulate"}')
    assert made(tmp_path)["headline"] == "The job has ended without a window."


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
    both = CliRunner().invoke(app, ["report", str(folder), str(folder / "events.jsonl")])
    assert (both.exit_code, (folder / "comparison.html").exists()) == (0, True), both.output
    single = CliRunner().invoke(app, ["report", str(folder / "events.jsonl"), "--out", str(tmp_path / "page.html")])
    assert single.exit_code == 0
    found = json.loads(CliRunner().invoke(app, ["report", str(folder), "--json"]).stdout)
    assert found["runs"][0]["windows"] == 12


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds events.jsonl" in done.stderr
    assert "a path that exists" in CliRunner().invoke(app, ["report", str(tmp_path / "none")]).stderr
    simulate(tmp_path / "events.jsonl", windows=2)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "no/such/page.html")])
    assert done.exit_code == 2
    assert "error: out=" in done.stderr
