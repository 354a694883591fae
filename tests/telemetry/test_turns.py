"""How many times as fast: right on clusters whose speeds are known, and as sure as it says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamix.events.records import EventLog
from dynamix.policies import make_policy
from dynamix.policies.wrappers import report_of
from dynamix.telemetry.turns import LEAST_BLOCKS, PolicyTurns, cost, half_width
from dynamix.window import Bounds, Floats, Window

SECONDS, EXCHANGE_S = np.array([0.001, 0.003]), 0.008


def job(
    path: Path, policies: str, windows: int, *, noise: float = 0.01, seed: int = 0, loading: float = 0.0
) -> PolicyTurns:
    """The events of a job of two workers, of which one is three times slower."""
    turns, rng = make_policy(f"compare:{policies}"), np.random.default_rng(seed)
    bounds, sizes, time_s = Bounds.of(2, 1, 63, total_low=64, total_high=64), np.array([32, 32]), 0.0
    with EventLog(path) as log:
        for index in range(windows):
            busy = SECONDS * sizes * np.exp(noise * rng.standard_normal())
            parts = {"compute": busy * (1 - loading), "data": busy * loading, "wait": busy.max() - busy}
            window = Window.of(sizes, **parts, communication=EXCHANGE_S, steps=5)
            time_s += 5 * (busy.max() + EXCHANGE_S)
            sizes = turns.decide(window, bounds)
            told: dict[str, Any] = {"window_index": index, "window": window, "time_s": time_s, "decision": "new"}
            log.write(**told, allocation=sizes.tolist(), from_step=0, samples_seen=64 * 5 * index, **report_of(turns))
    read = PolicyTurns(path)
    read.refresh()
    return read


def test_the_ratio_is_that_of_the_cluster(tmp_path: Path) -> None:
    first, second, again = (read := job(tmp_path / "events.jsonl", "static,lb_bsp,static", 6 * 40)).speeds()
    true = (0.096 + EXCHANGE_S) / (0.048 + EXCHANGE_S)
    assert second.low < true < second.high
    assert second.times == pytest.approx(true, rel=0.01)
    assert again.low < 1 < again.high
    assert again.times == pytest.approx(1.0, rel=0.01)
    assert (first.times, math.isnan(first.low), first.windows) == (1.0, True, 38)
    assert first.samples_s == pytest.approx(64 / (0.096 + EXCHANGE_S), rel=0.01)
    total = first.seconds + second.seconds + again.seconds
    assert cost((first, second, again)) == pytest.approx(1 - 3 * second.seconds / total, rel=0.02)
    assert read.seconds > total


def test_time_between_batch_and_forward_pass_counts(tmp_path: Path) -> None:
    slow = job(tmp_path / "events.jsonl", "static,lb_bsp", 4 * 10, loading=0.9).speeds()
    assert slow[0].samples_s == pytest.approx(64 / (0.096 + EXCHANGE_S), rel=0.01)
    assert slow[1].times == pytest.approx((0.096 + EXCHANGE_S) / (0.048 + EXCHANGE_S), rel=0.02)


def test_before_a_block_counts_nothing_is_said_and_few_say_not_how_sure_they_are(tmp_path: Path) -> None:
    assert job(tmp_path / "a.jsonl", "static,lb_bsp", 8).speeds() == []
    few = job(tmp_path / "b.jsonl", "static,lb_bsp", 4 * (2 + LEAST_BLOCKS - 1)).speeds()
    assert (few[1].windows, math.isnan(few[1].low)) == (LEAST_BLOCKS - 1, True)
    assert few[1].times > 1.5


def test_a_job_that_began_anew_in_the_same_file_keeps_what_was_measured_before(tmp_path: Path) -> None:
    job(tmp_path / "events.jsonl", "static,lb_bsp", 4 * 10)
    read = job(tmp_path / "events.jsonl", "static,lb_bsp", 4 * 10, seed=1)
    assert [speed.windows for speed in read.speeds()] == [16, 16]


def correlated(count: int, rho: float, rng: np.random.Generator) -> Floats:
    values = rng.standard_normal(count)
    for n in range(1, count):
        values[n] += rho * values[n - 1]
    return values


@pytest.mark.parametrize(("rho", "least"), [(0.0, 0.93), (0.3, 0.87)])
def test_of_two_like_policies_the_interval_holds_1_as_often_as_it_says(rho: float, least: float) -> None:
    rng, held = np.random.default_rng(1), 0
    for _ in range(400):
        pair = [np.stack([np.full(20, 320.0), np.exp(0.05 * correlated(20, rho, rng))], 1) for _ in range(2)]
        ratio = math.log(pair[1][:, 1].sum() / pair[0][:, 1].sum())
        held += abs(ratio) <= half_width(pair[1], pair[0])
    assert least <= held / 400 <= 0.99
