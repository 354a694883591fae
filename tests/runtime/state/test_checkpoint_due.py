"""`checkpoint_due`: true on all ranks at the first meeting after so many optimizer steps, in every way of meeting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import ConfigError, UsageError
from tests.ranks import refusal, run_ranks
from tests.runtime.jobs import Training, apart, classes, classifier, in_turns
from tests.runtime.sync import test_apart, test_either
from tests.union import Script

EVERY = 5
STEPS = 3  # apart between meetings, in the mean
PIECE = {"auto": test_either.BATCH, "parameters": test_apart.PIECE}  # samples of a worker's own step
CASES = [
    *(("gradients", 2), ("gradients", 1), ("accumulation", 2), ("pieces", 2), ("fsdp2", 2)),
    *(("parameters", 2), ("parameters", 1), ("parameters", 3), ("whole shares", 2), ("auto", 2), ("auto", 3)),
]


def job_of(way: str) -> Training:
    """A job that meets so, with shares that move."""
    if way == "auto":
        in_turns()
        return test_either.made({})
    if way == "parameters":
        shares = test_apart.SHARES[dist.get_world_size()]
        controller = apart(Script(shares), sum(shares[0]) // len(shares[0]))
        return Training(
            controller, TensorDataset(torch.arange(test_apart.SAMPLES), *test_apart.data()), test_apart.net("")
        )
    given = {"accumulation": {"accumulate": 2}, "pieces": {"micro_batch": 4}, "whole shares": {"meet": "parameters"}}
    options: dict[str, Any] = given.get(way, {})
    shares = [[8] * dist.get_world_size(), [5, 11, 8][: dist.get_world_size()]]
    controller = dynamix.Controller(Script(shares, 2 if options.get("accumulate") else 1), 8, interval=2, **options)
    net = fully_shard(classifier()) if way == "fsdp2" else classifier()
    return Training(controller, classes(331), net)


def batches(job: Training, epochs: int = 2) -> Iterator[bool]:
    """Trains batch by batch; the loop's body comes after `controller.step()`. Whether the round was apart."""
    for *_, x, y in job.batches(epochs):
        own = job.sampler.piece().round.apart
        job.train_piece(x, y)
        yield own


def asked(rank: int, way: str) -> tuple[list[tuple[int, bool, bool]], int]:
    """For every meeting: samples, whether its round was apart, the answer; and what was answered between meetings."""
    job, told, between = job_of(way), [], 0
    controller = job.controller
    assert not controller.checkpoint_due(every=1)  # nothing was trained yet
    for own in batches(job):
        due = controller.checkpoint_due(every=EVERY)
        assert due == controller.checkpoint_due(every=EVERY)
        between += due and not controller.met
        if controller.met:
            told.append((controller.samples_seen, own, due))
        if due:  # all ranks are here, with the same model, and none between two meetings
            controller.state_dict(gather=True)
            if way != "fsdp2" and controller.world_size > 1:
                mine = job.weights()
                dist.broadcast(first := mine.clone(), 0)
                assert torch.equal(mine, first)
    controller.close()
    return told, between


@pytest.mark.multiproc
@pytest.mark.parametrize(("way", "workers"), CASES)
def test_it_is_true_at_the_first_meeting_after_so_many_steps_on_all_ranks(way: str, workers: int) -> None:
    ranks = run_ranks(asked, workers, way)
    told, between = ranks[0]
    assert all(rank == ranks[0] for rank in ranks)
    assert between == 0
    steps, before, wanted = 0.0, 0, []
    for samples, own, _ in told:
        steps += (samples - before) / (workers * PIECE[way]) if own and way in PIECE else 1
        before = samples
        wanted.append(steps >= EVERY - 1e-9)
        steps = 0.0 if wanted[-1] else steps
    assert sum(wanted) >= 3
    assert [due for *_, due in told] == wanted
    assert way not in PIECE or any(own for _, own, _ in told)


def saved_and_gone_on(rank: int, way: str) -> list[int]:
    """Samples at which it was due in a job that ends at its first checkpoint, and in the one that goes on from it."""
    job, due, state = job_of(way), [], {}
    for _ in batches(job):
        if job.controller.checkpoint_due(every=EVERY + 2):
            state, weights = job.controller.state_dict(gather=True), job.net.state_dict()
            due.append(job.controller.samples_seen)
            break
    job.controller.close()
    job = job_of(way)
    job.net.load_state_dict(weights)
    job.controller.load_state_dict(state)
    assert not job.controller.checkpoint_due(every=1)
    steps, before = 0.0, job.controller.samples_seen
    for own in batches(job):
        if job.controller.met:
            moved = job.controller.samples_seen - before
            steps, before = steps + (moved / (job.controller.world_size * PIECE[way]) if own else 1), before + moved
        if job.controller.checkpoint_due(every=EVERY + 2):
            due.append(job.controller.samples_seen)
            assert EVERY + 2 <= steps < EVERY + 2 + STEPS + 2
            break
    job.controller.close()
    return due


@pytest.mark.multiproc
@pytest.mark.parametrize("way", ["gradients", "parameters", "auto"])
def test_a_job_that_goes_on_counts_from_the_load(way: str) -> None:
    mine, theirs = run_ranks(saved_and_gone_on, 2, way)
    assert mine == theirs
    assert len(mine) == 2


def own_needs(rank: int, way: str) -> dict[str, Any]:
    """A loop that saves by time, evaluates together, saves after each epoch and ends at a limit of steps."""
    job = job_of(way)
    controller, evaluated, saved, ends = job.controller, [], [], []
    began_s = time.monotonic() - 1000 * rank  # clocks of hosts differ
    for epoch in range(3):
        job.sampler.set_epoch(epoch)
        for batch in job.loader:
            job.train_piece(*batch[-2:])
            if controller.checkpoint_due(every=4):
                score = job.weights().sum()
                dist.all_reduce(score)
                evaluated.append(float(score))
                late = torch.tensor([time.monotonic() - began_s > 0.01])
                dist.broadcast(late, 0)
                if late:
                    controller.state_dict(gather=True)
                    saved.append(controller.samples_seen)
                    began_s = time.monotonic()
            if controller.checkpoint_due(every=60):
                break
        else:
            controller.state_dict(gather=True)
            ends.append(controller.samples_seen)
            continue
        break
    done = controller.samples_seen
    controller.close()
    return {"evaluated": evaluated, "saved": saved, "ends": ends, "done": done}


@pytest.mark.multiproc
@pytest.mark.parametrize("way", ["pieces", "parameters", "auto"])
def test_loops_evaluate_save_by_time_and_end_at_a_limit_where_it_is_true(way: str) -> None:
    mine, theirs = run_ranks(own_needs, 2, way)
    assert mine == theirs
    assert len(mine["evaluated"]) > len(mine["ends"]) >= 1
    assert mine["saved"]
    assert mine["ends"] == [331 * (n + 1) for n in range(len(mine["ends"]))]  # an epoch ends with a meeting
    assert mine["done"] % 331


@pytest.mark.parametrize("every", [0, -3, 2.0, True, "100", None])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    controller = dynamix.Controller("static", 8)
    with pytest.raises(ConfigError, match=r"every=.*whole number, 1 or more"):
        controller.checkpoint_due(every=every)


def _between(rank: int) -> str:
    job = job_of("auto")

    def save() -> None:
        for _ in batches(job):
            if not job.controller.met:
                job.controller.state_dict()

    return refusal(UsageError, save)


@pytest.mark.multiproc
def test_a_state_between_meetings_is_refused_with_the_line_to_write() -> None:
    for told in run_ranks(_between, 2):
        assert "if controller.checkpoint_due(every=N):" in told
