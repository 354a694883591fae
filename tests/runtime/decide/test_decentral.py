"""Ranks that each decide for themselves: same sizes at the same step, every sample once, no trace lost."""

from __future__ import annotations

import copy
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from dynamix.errors import ConfigError
from dynamix.policies.guard import Guard
from dynamix.policies.stigmergic.policy import StigmergicPolicy
from dynamix.policies.stigmergic.traces import LEAST_OF_FEW, TraceKind
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.decide.peer_channel import PeerChannel, open_channel, own_window
from dynamix.runtime.facts.job_facts import ClosedWindow, JobFacts
from dynamix.runtime.measure.row import ROW
from dynamix.window import Bounds, Window
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, classifier, decided
from tests.runtime.ranks.wires import over_threads
from tests.runtime.thread_job import ThreadJob

SAMPLES = 1200
DATA = TensorDataset(*classes(SAMPLES, 4).tensors, torch.arange(SAMPLES))


def _train(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """One epoch; rank r's samples take r + 1 times as long as rank 0's."""
    job = Training(
        adaptive("stigmergic", max_batch_size=16, process_group=dist.new_group(), **options),
        DATA,
        classifier(4),
        sampling={"seed": 3},
    )
    controller, seen, plans = job.controller, [], []
    for x, y, index in job.loader:
        plan = job.sampler.plan()
        plans.append((plan.index, tuple(int(c) for c in plan.counts)))
        seen += index.tolist() if plan.counts[rank] else []
        loss = job.loss(x, y)
        time.sleep(0.0005 * (rank + 1) * len(x))
        loss.backward()
        job.finish(loss=loss)
    controller.close()
    sizes = controller.batch_sizes.tolist()
    return {"seen": seen, "plans": plans, "sizes": sizes, "weights": job.weights()}


def _train_and_repeat(rank: int, events: str) -> list[dict[str, Any]]:
    return [_train(rank, {"events": events, "lr_rule": "adascale"}), _train(rank, {"replay": events})]


@pytest.mark.multiproc
def test_all_ranks_apply_the_same_sizes_at_the_same_step_and_use_every_sample_once(tmp_path: Path) -> None:
    events = str(tmp_path / "events.jsonl")
    told = run_ranks(_train_and_repeat, 3, events)
    results = [of_rank[0] for of_rank in told]
    assert all(r["plans"] == results[0]["plans"] for r in results)
    assert Counter(i for r in results for i in r["seen"]) == Counter(range(SAMPLES))
    assert len({counts for _, counts in results[0]["plans"]}) > 2, "sizes hardly ever changed"
    assert all(torch.equal(r["weights"], results[0]["weights"]) for r in results)  # one learning rate everywhere
    lines = decided(events)
    assert [line["window_index"] for line in lines] == list(range(len(lines)))
    assert lines[-1]["noise"] is not None  # what a sample teaches follows it, if not the rate
    assert lines[-1]["window"]["compute"][0] > 0
    assert lines[-1]["window"]["compute"][1] is None  # rank 0 writes what it saw itself
    assert all(again["plans"] == results[0]["plans"] for _, again in told)  # repeated from the file


class Watched(StigmergicPolicy):
    """What a rank knew by itself in every window, what it smelt of who is there, and what it chose in which bounds."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self.late_s, self.known, self.present, self.chosen = late_s, list[Any](), list[float](), list[Any]()

    def observe(self, own: Any) -> Any:
        time.sleep(self.late_s)
        self.known.append(copy.deepcopy(own))
        return super().observe(own)

    def choose(self, own: Any, sense: Any, traces: Any, bounds: Any) -> Any:
        self.present.append(float(traces[0, TraceKind.PRESENT]))
        size = super().choose(own, sense, traces, bounds)
        self.chosen.append((int(size[0]), int(bounds.low[0]), int(bounds.high[0])))
        return size


def test_live_ranks_choose_what_the_same_rules_do_beside_each_other_and_no_trace_is_lost() -> None:
    """However slow a rank is to leave its own."""

    def train(ranks: Any) -> Watched:
        policy = Watched(0.05 * (ranks.rank == 1))
        speeds = np.array([1000.0, 500.0, 250.0])
        ThreadJob(ranks, policy, samples=SAMPLES, batch_size=8, speeds=speeds, interval=5).train()
        return policy

    live = over_threads(train, 3)
    rules = [StigmergicPolicy() for _ in live]
    assert len(live[0].chosen) > 5
    for index, owns in enumerate(zip(*(policy.known for policy in live), strict=True)):
        taken = [rule.observe(own) for rule, own in zip(rules, owns, strict=True)]
        total = sum(left for _, left in taken)
        for rule, own, (sense, _), policy in zip(rules, owns, taken, live, strict=True):
            assert policy.present[index] == pytest.approx(3.0)
            size, low, high = policy.chosen[index]
            assert rule.choose(own, sense, total, Bounds.of(1, low, high)).tolist() == [size], index


def test_a_guard_which_needs_all_workers_times_is_refused() -> None:
    guarded = Guard(StigmergicPolicy())
    job = JobFacts(JobConfig(2, "static", 1))
    ranks: Any = SimpleNamespace(workers=2)
    with pytest.raises(ConfigError, match="guard=True"):
        open_channel(ranks, JobConfig(2, guarded), job, Decider(guarded, job))


def _row(window: Window, worker: int, steps: int) -> Any:
    """What a rank's recorder would have written of this window."""
    weight = float(window.batch_size[worker] / window.batch_size.sum())
    known = {"issued": 0.0, "count": float(window.batch_size[worker]), "weight": weight, "measured_in": 1.0}
    known |= {"global_norm_sq": float(window.global_norm_sq)}
    fields = ("compute", "compute_std", "data", "gradient_norm_sq")
    known |= {name: float(getattr(window, name)[worker]) for name in fields}
    comm = float(window.wait[worker] + window.communication[worker])
    waited = max(float(window.wait[worker]) - LEAST_OF_FEW * known["compute_std"], 0.0)
    least = waited + float(window.communication[worker])  # in one step; the mean stays
    rest = (steps * comm - least) / (steps - 1)
    return np.array([known.get(name, np.nan) for name in ROW] + [least] + [rest] * (steps - 1))


def test_the_noise_of_a_row_is_that_of_the_batch_it_was_measured_in() -> None:
    """As on CUDA, where a row may tell of the window before: 60 samples then, 120 now."""
    ranks: Any = SimpleNamespace(rank=0, workers=2, group=None)
    channel = PeerChannel(
        ranks, JobFacts(JobConfig(2, "static", 30, "adaptive")), StigmergicPolicy(), None, share_noise=False
    )
    before = {"compute": [0.1, 0.1], "wait": [0.0, 0.0], "communication": [0.01, 0.01], "compute_std": [0.01, 0.01]}
    # Of 60 samples: the noise is 1.5, so that of one is 90, and |G|^2 is 1.
    norms = {"gradient_norm_sq": [4.0, 4.0], "global_norm_sq": 2.5}
    row = _row(Window.of(np.array([30, 30]), **before, **norms), 0, 3)
    _, _, left = channel.observe(row, ClosedWindow(1, np.array([60, 60]), 0, 0, 1.0, 0, 0))
    channel.close()
    noise, square = left[TraceKind.NOISE] * 2.5, left[TraceKind.HEARD] * 2.5
    assert (noise, square - noise) == pytest.approx((90 / 120, 1.0))


def test_ranks_that_decide_alone_come_to_what_the_simulator_does() -> None:
    workers, steps, bounds = 5, 4, Bounds.of(5, 1, 256)
    rng = np.random.default_rng(2)
    together, ranks = StigmergicPolicy(), [StigmergicPolicy() for _ in range(workers)]
    job = JobFacts(JobConfig(workers, "static", 32, "adaptive"))
    sizes = np.full(workers, 32)
    for index in range(8):
        compute = sizes * np.exp(0.2 * rng.normal(size=workers)) * np.linspace(1e-3, 4e-3, workers)
        window = Window.of(
            sizes,
            compute=compute,
            compute_std=0.1 * compute,
            data=0.001,
            wait=compute.max() - compute,
            communication=0.01,
            gradient_norm_sq=2.0 + 300.0 / sizes,
            global_norm_sq=2.0 + 300.0 / sizes.sum(),
            steps=steps,
            base_batch=32 * workers,
        )
        closing = ClosedWindow(index, sizes, 0, 0, 1.0, 0, 0)
        owns = [own_window(_row(window, i, steps), closing, rank=i, job=job) for i in range(workers)]
        taken = [rank.observe(own) for rank, own in zip(ranks, owns, strict=True)]
        left, alone = sum(left for _, left in taken), Bounds.of(1, 1, 256)
        chosen = np.array(
            [rank.choose(own, sense, left, alone)[0] for rank, own, (sense, _) in zip(ranks, owns, taken, strict=True)]
        )
        assert together.decide(window, bounds).tolist() == chosen.tolist()
        sizes = chosen
