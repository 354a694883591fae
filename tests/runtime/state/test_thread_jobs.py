"""Jobs of ranks in threads: what they decide, compare, save and go on with, without a model and without processes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynamix.runtime.state.packing import checksum
from tests.runtime.ranks.wires import over_threads
from tests.runtime.thread_job import ThreadJob
from tests.union import Script

SAMPLES = 400


class Restless(Script):
    """Answers at random."""

    def __init__(self) -> None:
        super().__init__([])
        self.random = np.random.default_rng(0)

    def decide(self, window: Any, bounds: Any) -> Any:
        return self.random.integers(2, 12, size=window.workers)


@pytest.mark.parametrize("workers", [2, 4])
def test_same_step_same_allocation_however_far_loaders_read_ahead(workers: int) -> None:
    def train(ranks: Any) -> ThreadJob:
        return ThreadJob(ranks, Restless(), samples=SAMPLES, ahead=3 * (ranks.rank % 2)).train(3)

    jobs = over_threads(train, workers)
    assert all(job.plans == jobs[0].plans for job in jobs)
    assert len({shares for *_, shares in jobs[0].plans}) > 8, "allocations hardly ever changed"
    assert Counter(index for job in jobs for index in job.seen) == Counter([*range(SAMPLES)] * 3)


# ---------------------------------------------------------------- ranks that each decide for themselves


def stigmergic(ranks: Any, rounds: int = 0, *, state: Any = None, gather: bool = True) -> tuple[ThreadJob, Any, Any]:
    """A job until its end or so many rounds, what it saved after them, and what its policy remembered then."""
    speeds = np.linspace(1000.0, 300.0, ranks.workers)
    job = ThreadJob(ranks, "stigmergic", samples=SAMPLES, speeds=speeds, lr_rule="adascale", state=state)
    for plan in job.rounds():
        if plan.index + 1 == rounds:
            saved = job.job.state_dict(gather=gather)
            return job.close(), saved, job.policy.state_dict()
    return job.close(), None, None


def test_a_job_whose_ranks_decide_goes_on_with_every_sample_once() -> None:
    first = over_threads(lambda ranks: stigmergic(ranks, 15), 3)
    state = first[0][1]
    after = over_threads(lambda ranks: stigmergic(ranks, state=state), 3)
    assert Counter(index for job, *_ in first + after for index in job.seen) == Counter(range(SAMPLES))
    assert all(job.plans == after[0][0].plans for job, *_ in after)
    assert after[0][0].plans[0][0] == 15


@pytest.mark.parametrize("gather", [False, True])
def test_averages_of_the_noise_are_in_checkpoints(gather: bool) -> None:
    saved = over_threads(lambda ranks: stigmergic(ranks, 15, gather=gather), 3)

    def load(ranks: Any) -> Any:
        state = saved[0 if gather else ranks.rank][1]
        return ThreadJob(ranks, "stigmergic", samples=SAMPLES, lr_rule="adascale", state=state).policy.state_dict()

    for (_, _, before), after in zip(saved, over_threads(load, 3), strict=True):
        assert before["habit"]["heard"][1] > 0.0
        assert repr(after) == repr(before)  # NaN included
    assert len({repr(before["habit"]) for *_, before in saved}) > 1  # each has its own


# ---------------------------------------------------------------- what the last rank has otherwise


def states(workers: int) -> list[Any]:
    """What a job saved after 2, after 3 rounds, and at the end of its epoch."""

    def save(ranks: Any) -> list[Any]:
        job, saved = ThreadJob(ranks, samples=60, batch_size=12 // workers), []
        for plan in job.rounds():
            saved += [job.job.state_dict()] if plan.index in (1, 2) else []
        saved.append(job.job.state_dict())
        job.close()
        return saved

    return over_threads(save, workers)[0]


def changed(state: Any, change: Callable[[Any], None]) -> Any:
    change(state)
    state["checksum"] = checksum(state)
    return state


def later(state: Any) -> None:
    state["progress"]["window"] += 1


def smaller(state: Any) -> None:
    state["ledger_sizes"][-1] = [1] * len(state["ledger_sizes"][-1])


Odd = dict[str, Any]
# By case: options of all ranks, of the last one, epochs, and what the message says.
UNLIKE: dict[str, tuple[Odd, Odd, int, list[str]]] = {
    "length": ({}, {"samples": 58}, 1, ["dataset_size is 60 on", "58 on rank {last}", "whole data set"]),
    "shuffle": ({}, {"sampling": {"shuffle": False}}, 1, ["shuffle is true on", "false on rank {last}"]),
    "partition": ({}, {"sampling": {"partition": "contiguous"}}, 1, ['"stream"', '"contiguous" on rank {last}']),
    "epoch": ({}, {"first": 1}, 2, ["epoch is 0 on", "1 on rank {last}"]),
    "steps": ({"load": 0}, {"load": 1}, 1, ["consumed is 2 on", "3 on rank {last}", "checkpoint of the same step"]),
    "finished": ({"load": 0}, {"load": 2}, 2, ["epoch is 0 on", "1 on rank {last}", "checkpoint of the same step"]),
    "one loads": ({}, {"load": 0}, 1, ["consumed is 0 on", "2 on rank {last}"]),
    "window": ({"load": 1}, {"load": 1, "change": later}, 1, ["progress: window is 1 on", "2 on rank {last}"]),
    "ledger": ({"load": 0}, {"load": 0, "change": smaller}, 1, ["batch sizes is"]),
}


@pytest.mark.parametrize("case", UNLIKE)
@pytest.mark.parametrize("workers", [2, 3])
def test_what_differs_is_named_on_every_rank_with_its_values(case: str, workers: int) -> None:
    every, odd, epochs, says = UNLIKE[case]
    saved = states(workers) if "load" in odd else []

    def train(ranks: Any) -> None:
        given = {"samples": 60, "batch_size": 12 // workers, **(odd if ranks.rank == workers - 1 else every)}
        load, change, first = (given.pop(name, None) for name in ("load", "change", "first"))
        state = None if load is None else saved[load]
        job = ThreadJob(ranks, state=state if change is None else changed(copy.deepcopy(state), change), **given)
        for _ in job.rounds(epochs, first=first):
            pass

    for words in over_threads(train, workers):
        assert words.startswith("UsageError: ")
        for part in says:
            assert part.format(last=workers - 1) in words
