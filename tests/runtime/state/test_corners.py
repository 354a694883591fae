"""Corners found by reading: what ranks must agree on, what a resume must respect, what evaluation must not break."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import dynamix
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, decided
from tests.union import Script


def _rank_zero_saves(rank: int) -> torch.Tensor:
    job = Training(adaptive("static", 4, interval=3), classes(240), hook=fp16_compress_hook)
    for x, y in job.loader:
        job.backward(x, y)
        job.finish()
        if rank == 0:
            job.controller.state_dict()  # settles what is pending, on this rank alone
    job.controller.close()
    return job.weights()


@pytest.mark.multiproc
def test_a_checkpoint_on_rank_zero_alone_changes_nothing() -> None:
    first, second = run_ranks(_rank_zero_saves, 2)
    assert torch.equal(first, second)


def _slow_to_arrive(rank: int, events: str) -> list[int]:
    controller = dynamix.Controller("dbs", batch_size=20, max_batch_size=60, events=events)
    job = Training(controller, classes(120))
    for x, y in job.batches(4):
        if rank == 1:
            time.sleep(0.01)
        job.backward(x, y)
        job.update()
        if rank == 1:
            time.sleep(0.15)  # longer than rank 0's patience with its policy
        controller.step()
    controller.close()
    return controller.batch_sizes.tolist()


@pytest.mark.multiproc
def test_patience_is_for_the_policy_not_for_the_slowest_rank(tmp_path: Path) -> None:
    events = str(tmp_path / "events.jsonl")
    sizes = run_ranks(_slow_to_arrive, 2, events)
    assert sizes[0] == sizes[1] != [20, 20]
    # One may be a pause of the machine; if the slow rank used up the policy's patience, all would be late.
    assert len([e for e in decided(events) if e["decision"] == "late"]) <= 1


def test_bounds_changed_before_a_resume_hold_at_once(tmp_path: Path) -> None:
    def made(most: int) -> Training:
        return Training(adaptive(Script([[64]]), 16, max_batch_size=most), classes(240))

    job = made(64)
    for x, y in job.loader:
        job.train(x, y)
    assert job.controller.batch_sizes.tolist() == [64]
    torch.save(job.controller.state_dict(), tmp_path / "state.pt")
    resumed = made(32).controller
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))  # weights_only is torch's default
    assert resumed.batch_sizes.tolist() == [32]


def test_the_global_step_never_outgrows_the_data_set() -> None:
    job = Training(adaptive(Script([[4000], [20]]), 16, max_batch_size=4000, interval=1), classes(240))
    sizes = []
    for x, y in job.batches(6):
        job.train(x, y)
        sizes.append(int(job.controller.batch_sizes[0]))
    assert max(sizes) == 240
    assert sizes.count(20) >= 2, "adaptation stopped for good"
    assert np.isfinite(job.controller.samples_seen)
