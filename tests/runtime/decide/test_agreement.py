"""Every rank applies the same allocation at the same step; lateness and failure are judged in one place."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dynamix
from dynamix.runtime.decide.channel import PATIENCE_S
from dynamix.runtime.decide.decision import Decider
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, decided

pytestmark = pytest.mark.multiproc


class Restless:
    """Answers at random, after a random delay."""

    def __init__(self, delay_s: float) -> None:
        self.random, self.delay_s, self.asked = np.random.default_rng(0), delay_s, 0

    def decide(self, window: dynamix.Window, bounds: dynamix.Bounds) -> Any:
        time.sleep(self.delay_s * self.random.random())
        return self.random.integers(2, 12, size=window.workers)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _train(rank: int, policy: Any, num_workers: int, epochs: int = 1, interval: int = 2) -> dict[str, Any]:
    controller = adaptive(policy, 4, max_batch_size=16, interval=interval)
    job = Training(controller, classes(400), num_workers=num_workers)
    plans, sizes_ok = [], True
    jitter = np.random.default_rng(rank)
    for x, y in job.batches(epochs):
        plan = job.sampler.plan()
        plans.append((plan.index, plan.start, tuple(int(c) for c in plan.counts)))
        sizes_ok &= len(x) == max(plan.counts[rank], 2 if plan.counts[rank] == 0 else 0)
        logits = job.model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        time.sleep(0.004 * jitter.random())
        job.finish(loss=loss, logits=logits, target=y)
    controller.close()
    return {"plans": plans, "sizes_ok": sizes_ok}


def test_same_step_same_allocation_with_loaders_of_processes() -> None:
    results = run_ranks(_train, 2, Restless(0.02), 1, timeout_s=100)
    assert all(r["plans"] == results[0]["plans"] for r in results)
    assert all(r["sizes_ok"] for r in results)
    assert len({counts for _, _, counts in results[0]["plans"]}) > 5, "allocations hardly ever changed"


class Sluggish(Restless):
    """Is busy for many windows with every fourth of those it sees; its answers change the global batch."""

    def decide(self, window: dynamix.Window, bounds: dynamix.Bounds) -> Any:
        self.asked += 1
        if self.asked % 4 == 1:
            time.sleep(0.4)
        return self.random.integers(2, 12, size=window.workers)


def _follow_noise(rank: int, policy: Any, events: str | None, replay: str | None) -> torch.Tensor:
    controller = adaptive(policy, 4, max_batch_size=16, lr_rule="adascale", events=events, replay=replay)
    job = Training(controller, classes(400))
    for x, y in job.batches(3):
        loss = job.backward(x, y)
        time.sleep(0.005)
        job.finish(loss=loss)
    controller.close()
    return job.weights()


def _repeat_on_a_busy_machine(rank: int, events: str, replay: str) -> torch.Tensor:
    """What was recorded is now and then looked up later than a policy may answer."""
    look_up, asked = Decider._replayed, itertools.count()

    def late(self: Decider, recorded: Any) -> Any:
        if next(asked) % 8 == 3:
            time.sleep(3 * PATIENCE_S)
        return look_up(self, recorded)

    Decider._replayed = late  # type: ignore[method-assign]
    return _follow_noise(rank, "static", events, replay)


def test_windows_that_a_busy_policy_never_saw_are_written_down_and_replay_to_the_last_bit(tmp_path: Path) -> None:
    live, again = str(tmp_path / "live.jsonl"), str(tmp_path / "again.jsonl")
    weights = run_ranks(_follow_noise, 3, Sluggish(0.0), live, None)[0]
    events = decided(live)
    assert [e["window_index"] for e in events] == list(range(len(events)))
    decisions = [e["decision"] for e in events]
    assert decisions.count("late") > decisions[::4].count("late"), "no window was skipped, so this shows nothing"
    assert decisions.count("new") > 1
    for event in events:
        assert event["window"]["steps"] == 2
        if event["decision"] == "late":
            assert event["allocation"] == event["window"]["batch_size"]
    repeated = run_ranks(_repeat_on_a_busy_machine, 3, again, live)[0]
    assert torch.equal(weights, repeated)
    told = [(e["noise"], e["signal"], e["allocation"]) for e in events]
    assert [(e["noise"], e["signal"], e["allocation"]) for e in decided(again)] == told
