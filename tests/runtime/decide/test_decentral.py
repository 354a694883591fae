"""Ranks that each decide for themselves: same sizes at the same step, every sample once, no trace lost."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from dynamix.errors import ConfigError
from dynamix.policies.guard import Guard
from dynamix.policies.stigmergic.policy import PRETRAINED, StigmergicPolicy
from dynamix.policies.stigmergic.traces import LEAST_OF_FEW, TRACES, TraceKind
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.decide.peer_channel import PeerChannel, open_channel, own_window
from dynamix.runtime.facts.job_facts import ClosedWindow, JobFacts
from dynamix.runtime.measure.row import ROW
from dynamix.window import Bounds, Window
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, classifier, decided

SAMPLES = 1200
DATA = TensorDataset(*classes(SAMPLES, 4).tensors, torch.arange(SAMPLES))


def _train(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """One epoch; rank r's samples take r + 1 times as long as rank 0's."""
    job = Training(adaptive("stigmergic", max_batch_size=16, **options), DATA, classifier(4), sampling={"seed": 3})
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


@pytest.mark.multiproc
@pytest.mark.parametrize("workers", [2, 3])
def test_all_ranks_apply_the_same_sizes_at_the_same_step_and_use_every_sample_once(
    workers: int, tmp_path: Path
) -> None:
    events = str(tmp_path / "events.jsonl")
    rule = "adascale" if workers == 3 else "none"
    results = run_ranks(_train, workers, {"events": events, "lr_rule": rule})
    assert all(r["plans"] == results[0]["plans"] for r in results)
    assert Counter(i for r in results for i in r["seen"]) == Counter(range(SAMPLES))
    assert len({counts for _, counts in results[0]["plans"]}) > 2, "sizes hardly ever changed"
    assert all(torch.equal(r["weights"], results[0]["weights"]) for r in results)  # one learning rate everywhere
    lines = decided(events)
    assert [line["window_index"] for line in lines] == list(range(len(lines)))
    assert lines[-1]["noise"] is not None  # what a sample teaches follows it, if not the rate
    assert lines[-1]["window"]["compute"][0] > 0
    assert lines[-1]["window"]["compute"][1] is None  # rank 0 writes what it saw itself
    if workers == 2:
        again = run_ranks(_train, workers, {"replay": events})
        assert again[0]["plans"] == again[1]["plans"] == results[0]["plans"]


def _slow_to_leave_traces(rank: int, share: float) -> dict[str, Any]:
    told, choose, observe = [], StigmergicPolicy.choose, StigmergicPolicy.observe

    def watched(self: Any, own: Any, sense: Any, smelt: Any, new: Any, bounds: Any) -> Any:
        told.append(float(new[0, TraceKind.PRESENT]))
        return choose(self, own, sense, smelt, new, bounds)

    def slowly(self: Any, own: Any) -> Any:
        time.sleep(share if rank == 1 else 0.0)
        return observe(self, own)

    StigmergicPolicy.choose, StigmergicPolicy.observe = watched, slowly  # type: ignore[method-assign]
    return {**_train(rank, {}), "told": told}


@pytest.mark.multiproc
def test_everybodys_traces_are_there_in_every_window_however_slow_a_rank_is_to_leave_its_own() -> None:
    results = run_ranks(_slow_to_leave_traces, 2, 0.1)
    assert Counter(i for r in results for i in r["seen"]) == Counter(range(SAMPLES))
    assert results[0]["plans"] == results[1]["plans"]
    assert len(results[0]["told"]) > 3
    for result in results:  # the field adds `beta` a worker and window
        assert result["told"] == pytest.approx([2.0] * len(result["told"]), rel=1e-9)


def _windows_of(rank: int) -> dict[str, Any]:
    """What a rank knew by itself in every window, and what it chose within which bounds."""
    known, chosen, observe, choose = [], [], StigmergicPolicy.observe, StigmergicPolicy.choose

    def watched(self: Any, own: Any) -> Any:
        known.append(own)
        return observe(self, own)

    def watched_too(self: Any, own: Any, sense: Any, smelt: Any, new: Any, bounds: Any) -> Any:
        chosen.append((int(choose(self, own, sense, smelt, new, bounds)[0]), int(bounds.low[0]), int(bounds.high[0])))
        return np.array([chosen[-1][0]])

    StigmergicPolicy.observe, StigmergicPolicy.choose = watched, watched_too  # type: ignore[method-assign]
    return {**_train(rank, {}), "known": known, "chosen": chosen}


@pytest.mark.multiproc
def test_live_ranks_choose_what_the_same_rules_do_beside_each_other_in_one_process() -> None:
    results = run_ranks(_windows_of, 3)
    rules, ways = [StigmergicPolicy.load(PRETRAINED) for _ in results], np.zeros(len(TRACES))
    for index, owns in enumerate(zip(*(r["known"] for r in results), strict=True)):
        taken = [rule.observe(own) for rule, own in zip(rules, owns, strict=True)]
        total, way, ways = sum(left[0] for _, left in taken), ways, np.zeros(len(TRACES))
        for rule, own, (sense, _), result in zip(rules, owns, taken, results, strict=True):
            smelt, new = rule.smell(total, way)
            live, low, high = result["chosen"][index]
            size = rule.choose(own, sense, smelt[None], new[None], Bounds.of(1, low, high))
            assert size.tolist() == [live], index
            ways = ways + rule.moved(own.size, own.load, size)[0]
    assert len({tuple(sizes) for _, sizes in results[0]["plans"]}) > 2


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
        left, way = sum(left[0] for _, left in taken), np.zeros(len(TRACES))
        if index:
            way = sum(rank.way for rank in ranks)
        field = [rank.smell(left, way) for rank in ranks]
        alone = [Bounds.of(1, 1, 256) for _ in ranks]
        chosen = np.array(
            [
                rank.choose(own, sense, smelt[None], new[None], bound)[0]
                for rank, own, (sense, _), (smelt, new), bound in zip(ranks, owns, taken, field, alone, strict=True)
            ]
        )
        for i, own in enumerate(owns):
            ranks[i].go(own, chosen[i : i + 1])
        assert together.decide(window, bounds).tolist() == chosen.tolist()
        sizes = chosen
