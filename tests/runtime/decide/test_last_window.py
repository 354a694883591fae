"""What a job trained after its last window: in the events file, in reports, and in nobody's decision."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest

import dynamix
from dynamix.errors import StateError
from dynamix.events.records import read_events
from dynamix.policies.static import Static
from dynamix.telemetry import find_sources
from dynamix.telemetry.run import RunView
from dynamix.window import Bounds, Ints, Window
from tests.ranks import run_ranks, run_script
from tests.refused import refused
from tests.runtime.jobs import Training, apart, classes

SAMPLES = 520  # no whole number of windows in any of the jobs here


def seen(path: Path) -> RunView:
    """What a report makes of an events file."""
    (source,) = find_sources([path])
    source.refresh()
    assert not source.missing()
    (view,) = source.views.values()
    return view


def train(job: Training, epochs: int = 1, steps: int | None = None) -> None:
    for number, (x, y) in enumerate(job.batches(epochs)):
        job.train(x, y)
        if number + 1 == steps:
            break


WAYS: dict[str, dict[str, Any]] = {
    "one window never closed": {"policy": "static", "interval": 1000},
    "adaptive": {"policy": "goodput", "global_batch": "adaptive", "interval": 3},
    "each decides": {"policy": "stigmergic", "global_batch": "adaptive", "interval": 3},
    "accumulated": {"policy": "lb_bsp", "accumulate": 2},
    "auto": {"policy": "lb_bsp", "meet": "auto"},
    "apart": {"policy": "lb_bsp", "batch_size": 16, "min_batch_size": 0},
}


def _each_way(rank: int, folder: Path) -> list[int]:
    done = []
    for number, options in enumerate(WAYS.values()):
        given = {"batch_size": 8, "interval": 7, "events": folder / f"{number}.jsonl", **options}
        job = Training((apart if "min_batch_size" in given else dynamix.Controller)(**given), classes(SAMPLES))
        for x, y in job.batches(2):
            job.train_piece(x, y)
        done.append(job.controller.samples_seen)
        job.controller.close()
        job.controller.close()  # writes nothing again
    return done


@pytest.mark.multiproc
def test_all_samples_are_in_the_file_whatever_the_way_of_meeting(tmp_path: Path) -> None:
    done, other = run_ranks(_each_way, 2, tmp_path)
    assert done == other == [2 * SAMPLES] * len(WAYS)
    for number, trained in enumerate(done):
        events = read_events(tmp_path / f"{number}.jsonl")
        assert [event["window_index"] for event in events] == list(range(len(events)))
        assert [event.get("short", False) for event in events[:-1]] == [False] * (len(events) - 1)
        assert events[-1]["samples_seen"] == seen(tmp_path / f"{number}.jsonl").trained == trained
    alone = read_events(tmp_path / "0.jsonl")
    assert [event["short"] for event in alone] == [True]
    assert alone[0]["window"]["steps"] == alone[0]["window"]["step"] > 0


def _one_fails(rank: int, folder: Path) -> str:
    job = Training(dynamix.Controller("static", 8, interval=7, events=folder / "events.jsonl"), classes(SAMPLES))
    try:
        train(job, steps=10)
        raise ValueError("of the loop")
    except ValueError:
        job.controller.close()  # in an error's way: nobody is waited for
    return str(job.controller.samples_seen)


@pytest.mark.multiproc
def test_a_loop_that_fails_loses_nothing_that_it_trained(tmp_path: Path) -> None:
    assert run_ranks(_one_fails, 2, tmp_path) == ["160", "160"]
    assert seen(tmp_path / "events.jsonl").trained == 160


def test_a_short_window_decides_nothing_and_no_figure_comes_from_it(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    asked = []

    class Watched(Static):
        def decide(self, window: Window, bounds: Bounds) -> Ints:
            asked.append(float(window.step))
            return super().decide(window, bounds)

    for path, steps in ((whole, 20), (cut, 23)):
        job = Training(dynamix.Controller(Watched(), 8, interval=10, events=path), classes(SAMPLES))
        train(job, steps=steps)
        trained = job.controller.samples_seen
        job.controller.close()
        assert seen(path).trained == trained
    assert asked == [10, 20, 10, 20]
    short = read_events(cut)[-1]
    assert (short["short"], short["decision"], short["window"]["steps"]) == (True, "keep", 3)
    assert set(short["window"]["compute"] + short["window"]["loss"]) == {None}
    assert not any(event.get("short") for event in read_events(whole))  # nothing was left
    view = seen(cut)
    assert view.newest is not None
    assert float(view.newest.step) == 20
    assert sum(view.decisions.values()) == 2
    assert view.latest["loss"] == pytest.approx(read_events(cut)[1]["window"]["loss"][0])


def test_a_loop_that_does_not_close_its_controller_loses_nothing(tmp_path: Path) -> None:
    job = Training(dynamix.Controller("static", 8, interval=7, events=tmp_path / "left.jsonl"), classes(SAMPLES))
    train(job)
    del job
    gc.collect()
    assert seen(tmp_path / "left.jsonl").trained == SAMPLES
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom tests.runtime.decide.test_last_window import *\n"
        "job = Training(dynamix.Controller('static', 8, interval=7, events=sys.argv[1]), classes(SAMPLES))\n"
        "train(job)\n"
    )
    run_script(script, [str(tmp_path / "ended.jsonl")])
    assert seen(tmp_path / "ended.jsonl").trained == SAMPLES


def test_a_job_that_goes_on_counts_its_own_samples_and_is_one_run_in_one_file(tmp_path: Path) -> None:
    def job_at(*paths: Path, state: dict[str, Any] | None = None, steps: int) -> dict[str, Any]:
        job = Training(dynamix.Controller("static", 8, interval=7, events=paths[0]), classes(SAMPLES))
        if state is not None:
            job.controller.load_state_dict(state)
        train(job, steps=steps)
        saved = job.controller.state_dict()
        job.controller.close()
        return saved

    first = job_at(tmp_path / "one.jsonl", steps=10)
    again = job_at(tmp_path / "one.jsonl", state=first, steps=2)  # no window of its own: two steps of an open one
    job_at(tmp_path / "one.jsonl", state=again, steps=20)
    view = seen(tmp_path / "one.jsonl")
    assert (view.began_at, view.trained, view.steps) == (0, 256, 32)
    assert view.notices.counts["restart"] == 2
    job_at(tmp_path / "two.jsonl", state=first, steps=20)
    view = seen(tmp_path / "two.jsonl")
    assert (view.began_at, view.trained, view.samples) == (80, 160, 240)
    assert [event["began_at"] for event in read_events(tmp_path / "two.jsonl")] == [80] * 4
    assert read_events(tmp_path / "two.jsonl")[-1]["window"]["steps"] == 2  # of 30, windows closing at 14, 21 and 28


def test_a_replay_passes_short_windows_over(tmp_path: Path) -> None:
    for path, interval in (("run", 7), ("short", 1000)):
        controller = dynamix.Controller("static", 8, interval=interval, events=tmp_path / f"{path}.jsonl")
        train(Training(controller, classes(SAMPLES)))
        controller.close()
    controller = dynamix.Controller("static", 8, interval=7, replay=tmp_path / "run.jsonl")
    train(Training(controller, classes(SAMPLES)), 2)  # longer than it was
    assert controller.samples_seen == 2 * SAMPLES
    controller.close()
    refused(StateError, "has no decision to replay", dynamix.Controller, "static", 8, replay=tmp_path / "short.jsonl")


def test_speed_counts_from_the_first_step_to_the_last(tmp_path: Path) -> None:
    """What comes before the first step, and between the last one and close(), is no training."""
    job = Training(dynamix.Controller("static", 8, interval=7, events=tmp_path / "events.jsonl"), classes(SAMPLES))
    job.sampler.set_epoch(0)
    time.sleep(0.4)
    began = time.perf_counter()
    train(job)
    took_s = time.perf_counter() - began
    time.sleep(0.4)
    job.controller.close()
    view = seen(tmp_path / "events.jsonl")
    assert view.seconds <= took_s + 0.01
    assert view.samples_per_s >= SAMPLES / (took_s + 0.01)
    assert all(view.speeds > 0)  # the first window's, too
