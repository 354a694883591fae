"""`checkpoint_due`: true on all ranks at the first meeting after so many optimizer steps, in every way of meeting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import ConfigError
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, apart, classes, classifier, in_turns
from tests.runtime.sync import test_apart, test_either
from tests.union import Script

EVERY = 5
STEPS = 3  # apart between meetings, in the mean
PIECE = {"auto": test_either.BATCH, "parameters": test_apart.PIECE}  # samples of a worker's own step
WAYS = {
    1: ("gradients", "parameters"),
    2: ("gradients", "accumulation", "pieces", "fsdp2", "parameters", "whole shares", "auto"),
    3: ("parameters", "auto"),
}


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


def each_way(rank: int, call: Callable[[int, str], Any], ways: tuple[str, ...]) -> dict[str, Any]:
    return {way: call(rank, way) for way in ways}


@pytest.mark.multiproc
@pytest.mark.parametrize("workers", WAYS)
def test_it_is_true_at_the_first_meeting_after_so_many_steps_on_all_ranks(workers: int) -> None:
    ranks = run_ranks(each_way, workers, asked, WAYS[workers])
    assert all(rank == ranks[0] for rank in ranks)
    for way, (told, between) in ranks[0].items():
        assert between == 0, way
        steps, before, wanted = 0.0, 0, []
        for samples, own, _ in told:
            steps += (samples - before) / (workers * PIECE[way]) if own and way in PIECE else 1
            before = samples
            wanted.append(steps >= EVERY - 1e-9)
            steps = 0.0 if wanted[-1] else steps
        assert sum(wanted) >= 3, way
        assert [due for *_, due in told] == wanted, way
        assert way not in PIECE or any(own for _, own, _ in told), way


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
def test_a_job_that_goes_on_counts_from_the_load() -> None:
    mine, theirs = run_ranks(each_way, 2, saved_and_gone_on, ("gradients", "parameters", "auto"))
    assert mine == theirs
    assert all(len(due) == 2 for due in mine.values()), mine


@pytest.mark.parametrize("every", [0, -3, 2.0, True, "100", None])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    controller = dynamix.Controller("static", 8)
    with pytest.raises(ConfigError, match=r"every=.*whole number, 1 or more"):
        controller.checkpoint_due(every=every)
