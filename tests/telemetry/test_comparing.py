"""Runs beside each other: what is compared, with which certainty, and when there is no verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.events.records import EventLog, read_events
from dynamix.telemetry.comparing import table
from dynamix.telemetry.run import RunView
from dynamix.telemetry.sources import find_sources
from dynamix.window import Window
from tests.telemetry.test_page import made
from tests.v0_2 import FIXTURES

BATCH, STEPS = 64, 10  # of a window


def write(
    folder: Path,
    speeds: list[float],
    *,
    began_at: int | None = 0,
    losses: list[float] | None = None,
    rest: int = 0,
    **result: Any,
) -> Path:
    """A run's folder whose windows trained at these samples a second, and then `rest` more samples at the last one."""
    folder.mkdir(parents=True)
    samples, time_s = began_at or 0, 0.0
    first = samples // (BATCH * STEPS)
    start = {} if began_at is None else {"began_at": began_at}
    with EventLog(folder / "events.jsonl") as log:
        for index, speed in enumerate(speeds, first):
            samples, time_s = samples + BATCH * STEPS, time_s + BATCH * STEPS / speed
            loss = 1.0 / (1 + index) if losses is None else losses[index]
            window = Window.of(
                [BATCH // 2] * 2,
                compute=[BATCH / speed] * 2,
                loss=[loss] * 2,
                steps=STEPS,
                step=STEPS * (index + 1),
            )
            told = {"decision": "keep", "allocation": [BATCH // 2] * 2, "from_step": 0}
            log.write(window_index=index, window=window, **told, samples_seen=samples, time_s=time_s, **start)
        if rest:
            samples, time_s = samples + rest, time_s + rest / speeds[-1]
            short = Window.of([BATCH // 2] * 2, steps=3)
            told = {"decision": "keep", "allocation": [BATCH // 2] * 2, "from_step": 0, "short": True}
            log.write(window_index=index + 1, window=short, **told, samples_seen=samples, time_s=time_s, **start)
    (folder / "result.json").write_text(json.dumps({"command": "emulate", **result}))
    return folder


def steady(speed: float, windows: int = 40, scatter: float = 0.02) -> list[float]:
    noise = np.random.default_rng(int(speed)).standard_normal(windows)
    return [speed * (1 + scatter * float(one)) for one in noise]


def test_every_run_is_compared_with_the_first_and_has_an_interval(tmp_path: Path) -> None:
    """Also where another one is faster than both, and the first is the fastest."""
    names = {"static": 100.0, "faster": 200.0, "alike": 101.0, "slower": 50.0}
    runs = [write(tmp_path / name, steady(speed)) for name, speed in names.items()]
    compared = made(*runs)["comparison"]
    for row, speed in zip(compared["rows"][1:], list(names.values())[1:], strict=True):
        assert row["over_first"] == pytest.approx(100.0 / speed, rel=0.02)
        assert row["low"] < 100.0 / speed < row["high"]
        assert row["high"] / row["low"] < 1.2
    assert (compared["rows"][0]["over_first"], compared["rows"][0]["low"]) == (1.0, None)
    said = compared["headline"]
    assert "faster took, as parts of static's time, 0.50" in said
    assert "slower took 2.0" in said
    assert said.count("no clear difference") == 1
    assert [line[-1].partition(" ")[0] for line in table(compared)][:3] == ["over", "1.00", "0.50"]
    backwards = made(*reversed(runs))["comparison"]["rows"]
    assert backwards[-1]["over_first"] == pytest.approx(0.5, rel=0.02)


def test_a_loss_that_crosses_the_common_one_again_and_again_tells_no_clear_difference(tmp_path: Path) -> None:
    """A lucky first crossing is as good as chance, however even the speeds are."""
    noise = np.random.default_rng(0).standard_normal((2, 60))
    losses = [[1.0 + float(one) for one in row] for row in noise]
    runs = [write(tmp_path / str(i), steady(100.0 + i, 60), losses=one) for i, one in enumerate(losses)]
    row = made(*runs)["comparison"]["rows"][1]
    assert row["high"] is None or row["low"] < 1.0 < row["high"]


def test_few_windows_tell_no_clear_difference(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, [speed] * 3) for name, speed in (("static", 100.0), ("other", 200.0))]
    compared = made(*runs)["comparison"]
    row = compared["rows"][1]
    assert (row["over_first"], row["low"], row["high"]) == (pytest.approx(0.5), None, None)
    assert "0.50, no clear difference" in compared["headline"]


def test_a_smoothing_longer_than_the_data_is_not_used(tmp_path: Path) -> None:
    """Five windows over five made one mean of all, which no window had; and all runs are smoothed alike."""
    losses = [5.0, 4.0, 3.0, 2.0, 1.0]
    short = write(tmp_path / "short", [100.0] * 5, losses=losses)
    (run, other) = made(short, write(tmp_path / "twice", [200.0] * 5, losses=losses))["comparison"]["rows"]
    assert run["loss"] == other["loss"] == 1.0
    assert run["loss_s"] == pytest.approx(run["seconds"])
    long = write(tmp_path / "long", [100.0] * 60, losses=[float(i % 2) for i in range(60)])
    many = made(long, write(tmp_path / "as long", [100.0] * 60, losses=[float(i % 2) for i in range(60)]))
    assert 0.3 < many["comparison"]["rows"][0]["loss"] < 0.5
    beside = made(short, long)["comparison"]["rows"]
    assert beside[1]["loss"] == 0.0  # as the short one is


def test_a_run_that_goes_on_from_a_state_is_named_and_has_no_verdict(tmp_path: Path) -> None:
    whole = write(tmp_path / "static", steady(100.0))
    resumed = write(tmp_path / "goodput", steady(100.0, 20), began_at=20 * BATCH * STEPS)
    old = write(tmp_path / "old", steady(100.0, 40), began_at=None)  # a file of 0.2 does not say where it began
    compared = made(whole, resumed, old)["comparison"]
    assert "No verdict for goodput: it began at sample 12,800, static at sample 0" in compared["headline"]
    assert table(compared)[2][-3:] == ["–", "–", "no verdict"]
    assert compared["rows"][1]["samples_per_s"] == pytest.approx(100.0, rel=0.02)
    assert compared["rows"][2]["no_verdict"] == ""
    assert compared["common_samples"] == 40 * BATCH * STEPS


@pytest.mark.parametrize("at", [0, 1])
def test_devices_that_overran_are_said_and_beyond_the_limit_there_is_no_verdict(tmp_path: Path, at: int) -> None:
    few, many = ([{"steps": 400, "overruns": late, "overrun_s": 0.1}] * 2 for late in (2, 12))
    names = ["static", "goodput", "lb_bsp"]
    runs = [write(tmp_path / n, steady(100.0), device_steps=many if i == at else few) for i, n in enumerate(names)]
    compared = made(*runs)["comparison"]
    assert f"No verdict for {names[at]}: 3 % of a rank's device steps overran, more than 1 %" in compared["headline"]
    assert f"{names[at]}: up to 3 % of a rank's device steps overran." in compared["notes"]
    assert "lb_bsp: up to 0.5 % of a rank's device steps overran." in compared["notes"]
    without = [row["name"] for row in compared["rows"] if row["over_first"] is None]
    assert without == (names if at == 0 else ["goodput"])  # with the first none can be compared


def test_a_run_that_failed_or_ended_elsewhere_is_named(tmp_path: Path) -> None:
    runs = [write(tmp_path / "static", steady(100.0)), write(tmp_path / "shorter", steady(100.0, 30))]
    runs.append(write(tmp_path / "failed", steady(100.0, 5), exit_code=1))
    compared = made(*runs)["comparison"]
    assert "No verdict for failed: it ended with exit code 1." in compared["headline"]
    assert compared["common_samples"] == 30 * BATCH * STEPS  # not the few of the one that failed
    assert any(note.startswith("shorter ended at sample 19,200, static at sample 25,600") for note in compared["notes"])
    assert compared["rows"][1]["over_first"] == pytest.approx(1.0, rel=0.02)


def test_a_run_of_more_windows_than_bins_reaches_its_own_samples(tmp_path: Path) -> None:
    """Its last bin is of several windows: their mean number of samples is not the last one's."""
    runs = [write(tmp_path / name, [speed] * 1000) for name, speed in (("static", 100.0), ("goodput", 200.0))]
    data = made(*runs)
    for row in data["comparison"]["rows"]:
        assert row["samples_s"] == pytest.approx(row["seconds"])
    assert data["runs"][0]["samples"] == 1000 * BATCH * STEPS


def test_a_bins_speed_is_its_samples_over_its_seconds(tmp_path: Path) -> None:
    """Not the mean of its windows' speeds, which a slow window hardly lowers."""
    view = RunView("run", most_bins=2)
    (source,) = find_sources([write(tmp_path / "run", [100.0, 10.0, 100.0, 10.0])])
    for line in source.follower.more():
        view.add(line)
    view.settle()
    assert view.speeds == pytest.approx([2 / (1 / 100 + 1 / 10)] * 2)


def test_the_command_prints_what_is_unlike(tmp_path: Path) -> None:
    runs = [write(tmp_path / "static", steady(100.0)), write(tmp_path / "goodput", steady(100.0, 9), began_at=6400)]
    done = CliRunner().invoke(app, ["report", *map(str, runs), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "No verdict for goodput: it began at sample 6,400" in done.stdout
    shown = CliRunner().invoke(app, ["watch", str(runs[1]), "--once"])
    assert "5,760 samples" in shown.stdout


def test_files_of_0_2_are_reports_as_before(tmp_path: Path) -> None:
    """They say neither where a job began nor which window is short."""
    for path in sorted((FIXTURES / "events").glob("*.jsonl")):
        events = read_events(path)
        (run,) = made(path)["runs"]
        assert (run["samples"], run["began_at"], run["windows"]) == (events[-1]["samples_seen"], 0, len(events))
        assert run["samples_per_s"] == pytest.approx(events[-1]["samples_seen"] / events[-1]["time_s"], rel=1e-3)
        assert run["one"]["samples_per_s"]["mean"][0] is None  # its first window holds the start-up
