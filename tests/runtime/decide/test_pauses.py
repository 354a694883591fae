"""A worker that pauses once is no slow worker; one that becomes slow is seen at once. For every policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamix.policies.registry import make_policy, policy_names
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.facts.job_facts import ClosedWindow, JobFacts
from dynamix.runtime.limits import Limits
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.measure.row import assemble
from dynamix.window import Floats, Ints, Window
from dynamix_lab.virtual.workers import VirtualTime
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, decided

SPEED = np.array([1.0, 0.8, 0.5, 0.4])
NOISE, SIGNAL = 12.0, 0.04
NO_DEVICE = torch.device("meta")


@dataclass
class Step:
    """Seconds of one optimizer step."""

    busy: Floats  # (W,)
    data: Floats
    exchange: float


Disturbance = Callable[[int, Step], None]


class Workers:
    """Recorders of four unlike workers, on a clock that steps set."""

    def __init__(self, disturb: Disturbance) -> None:
        self.disturb, self.time, self.steps = disturb, VirtualTime(), 0
        self.random = np.random.default_rng(0)
        self.recorders = [Recorder(NO_DEVICE, clock=self.time) for _ in SPEED]

    def train(self, sizes: Ints, *, keep: bool) -> None:
        jitter = np.exp(0.03 * self.random.standard_normal(4))
        step = Step((0.02 + 0.0005 * sizes) / SPEED * jitter, np.full(4, 1e-4), 0.01)
        self.disturb(self.steps, step)
        begin = self.time.now_s
        ready = begin + step.data + step.busy
        end = float(ready.max()) + step.exchange
        reduced_sq = (SIGNAL + NOISE / sizes.sum()) * float(np.exp(0.05 * self.random.standard_normal()))
        for i, recorder in enumerate(self.recorders):
            for moment, mark in (
                (begin + step.data[i], recorder.timer.forward_started),
                (ready[i], recorder.timer.gradients_ready),
                (end, recorder.timer.reduced),
            ):
                self.time.now_s = float(moment)
                mark()
            recorder.add("local_sq", reduced_sq + NOISE * (1 / sizes[i] - 1 / sizes.sum()))
            recorder.add("global_sq", reduced_sq)
            recorder.add("loss", 2.0 + 0.1 * float(self.random.standard_normal()))
            recorder.step_done(keep=keep, first_of_epoch=False)
        self.steps += 1

    def rows(self, sizes: Ints) -> Floats:
        shares = zip(self.recorders, sizes.tolist(), strict=True)
        return np.stack([r.row(issued=self.steps + 1, count=n, weight=n / sizes.sum()) for r, n in shares])


def _nothing(index: int, step: Step) -> None:
    """No disturbance."""


def _shares(name: str, interval: int, disturb: Disturbance = _nothing, windows: int = 18) -> Floats:
    """(windows, W) shares under a policy that decides after every window; what it decides holds one step later."""
    sizes = np.full(4, 64)
    job, workers = JobFacts(JobConfig(4, "static", 64, "adaptive", Limits(min_global_batch=1))), Workers(disturb)
    decider, decided, since, shares = Decider(make_policy(name), job), sizes, 0, []
    for window in range(windows):
        if window:
            workers.train(sizes, keep=False)
            since = since if np.array_equal(sizes, decided) else workers.steps
            sizes = decided
        for _ in range(interval):
            workers.train(sizes, keep=True)
        shares.append(sizes / sizes.sum())
        now, age = workers.steps, float(workers.steps - since)
        job.closing = ClosedWindow(window, sizes, now, now + 1, age, step=now, samples=0)
        decided = decider.decide(workers.rows(sizes)).sizes
    return np.array(shares)


def _pause(worker: int, at: int, part: str) -> Disturbance:
    def disturb(index: int, step: Step) -> None:
        if index == at and part == "exchange":
            step.exchange += 10.0
        elif index == at:
            getattr(step, part)[worker] += 10.0

    return disturb


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("interval", [2, 5])
def test_ten_seconds_pause_of_a_worker_moves_no_share_for_more_than_two_windows(name: str, interval: int) -> None:
    undisturbed, first = _shares(name, interval), 9 * (interval + 1)
    for worker, at, part in ((0, first, "busy"), (3, first + interval - 1, "data"), (1, first + 1, "exchange")):
        paused = _shares(name, interval, _pause(worker, at, part))
        moved = (np.abs(paused / undisturbed - 1) > 0.2).any(1)
        assert moved.sum() <= 2, (part, np.flatnonzero(moved))


@pytest.mark.parametrize("name", ["lb_bsp", "goodput", "dynamix", "stigmergic"])
@pytest.mark.parametrize("interval", [2, 5])
def test_a_worker_that_becomes_three_times_as_slow_gives_up_its_share_within_two_windows(
    name: str, interval: int
) -> None:
    for at in range(8 * (interval + 1), 9 * (interval + 1)):

        def slow(index: int, step: Step, at: int = at) -> None:
            step.busy[0] *= 3.0 if index >= at else 1.0

        shares = _shares(name, interval, slow, windows=13)[:, 0]
        assert shares[11] < (0.5 if name == "lb_bsp" else 0.35) * shares[8], shares.round(3)


@pytest.mark.parametrize(("interval", "worker"), [(2, 0), (5, 2), (10, 3)])
def test_a_stall_too_short_to_be_a_pause_costs_a_stigmergic_worker_its_share_for_four_windows_at_most(
    interval: int, worker: int
) -> None:
    def stalled(index: int, step: Step) -> None:
        step.busy[worker] *= 1.9 if index == 8 * (interval + 1) else 1.0

    moved = np.abs(_shares("stigmergic", interval, stalled) / _shares("stigmergic", interval) - 1) > 0.2
    assert moved.any(1).sum() <= 4, np.flatnonzero(moved.any(1))


def _window(disturb: Disturbance, interval: int = 5) -> Window:
    workers, sizes = Workers(disturb), np.full(4, 64)
    for _ in range(3 * interval):
        workers.train(sizes, keep=True)
    return assemble(workers.rows(sizes), noise_scale=NoiseScale(), sizes=sizes)


def test_long_steps_that_come_again_are_a_workers_own_pace() -> None:
    def throttled(index: int, step: Step) -> None:
        step.busy[2] *= 6.0 if index % 7 == 3 else 1.0

    usual = _window(_nothing).compute[2]
    assert _window(throttled).compute[2] == pytest.approx(usual * (13 + 2 * 6) / 15, rel=0.05)  # steps 3 and 10 of 15


def _live(rank: int, events: str) -> None:
    # Another policy may change shares at round 17, whose times are in no window then.
    job = Training(adaptive("static", interval=5, events=events), classes(480))
    began, longest = time.monotonic(), 0.0
    for i, (x, y) in enumerate(job.loader):
        if 0 < i <= 17:
            longest, began = max(longest, time.monotonic() - began), time.monotonic()
        loss = job.loss(x, y)
        time.sleep(3.0 + 5 * longest if rank and i == 17 else 0.001 * len(x))  # steps of a busy machine are long, too
        loss.backward()
        job.finish(loss=loss)
    assert job.controller.metrics()["pauses"] >= 1
    job.controller.close()


@pytest.mark.multiproc
def test_a_live_workers_pause_is_in_no_window(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    run_ranks(_live, 2, str(events))
    windows = [Window.from_dict(event["window"]) for event in decided(events)]
    assert len(windows) > 4
    for window in windows:
        # Of a window's five steps one took 3 s or more, 0.6 s in the mean.
        assert np.nanmax(window.step_time) < 0.5, window
