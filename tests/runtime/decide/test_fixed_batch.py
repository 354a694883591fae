"""`global_batch="fixed"`: the total stays what it is at the start, the loader's length is true, only shares move."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

import dynamix
from dynamix.errors import ConfigError
from dynamix.runtime.config import JobConfig
from dynamix.runtime.facts.job_facts import JobFacts
from tests.runtime.ranks.wires import over_threads
from tests.runtime.thread_job import ThreadJob
from tests.union import Script

SAMPLES = 500


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"global_batch": 64}, ["global_batch=64", "set a size by batch_size="]),
        ({"global_batch": "constant"}, ["global_batch='constant'", "'adaptive' or 'fixed'"]),
        ({"global_batch": "fixed", "max_global_batch": 64}, ["max_global_batch=64", "leave max_global_batch out"]),
        ({"global_batch": "fixed", "min_global_batch": 1}, ["min_global_batch=1", "global_batch='adaptive'"]),
        ({"global_batch": "fixed", "batch_size": 100, "quantum": 32}, ["batch_size=100", "steps of 32"]),
    ],
)
def test_what_contradicts_a_fixed_total_is_refused_with_the_fix(arguments: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        dynamix.Controller(**{"policy": "static", "batch_size": 8, **arguments})
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize("policy", ["noise_scale", "pollux"])
def test_a_policy_that_moves_the_global_batch_alone_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"global_batch='fixed'.*'adaptive' with '{policy}'"):
        dynamix.Controller(policy, 8)
    dynamix.Controller(policy, 8, global_batch="adaptive").close()


def test_a_resumed_job_keeps_the_total_it_began_with() -> None:
    job = JobFacts(JobConfig(2, "static", 32, "fixed"))
    job.resume(128, step=0, samples=0, shares={})  # it began with four ranks of 32
    assert (job.base_batch, int(job.bounds.total_low), int(job.bounds.total_high)) == (128, 128, 128)
    with pytest.raises(ConfigError, match=r"global batch=1024 .* 2 to 512"):
        job.resume(1024, step=0, samples=0, shares={})


@pytest.mark.parametrize("workers", [2, 3])
def test_the_total_is_constant_the_length_exact_and_the_shares_move_also_at_another_world_size(workers: int) -> None:
    """The script asks for a total of its own in every window; only its proportions may be followed."""

    def train(ranks: Any, state: Any = None, *, save: bool = False) -> tuple[ThreadJob, Any, int]:
        script = Script([[100, 20, 7, 3][: ranks.workers], [1, 8, 1, 9][: ranks.workers]])
        job = ThreadJob(
            ranks, script, samples=SAMPLES, batch_size=24 // ranks.workers, global_batch="fixed", state=state
        )
        expected = len(job.sampler)
        for plan in job.rounds():
            if save and plan.index == 8:
                return job.close(), job.job.state_dict(gather=True), expected
        return job.close(), None, expected

    begun = over_threads(partial(train, save=True), 4)
    gone_on = over_threads(partial(train, state=begun[0][1]), workers)
    for job, _, _ in begun + gone_on:
        shares = [shares for *_, shares in job.plans]
        assert {sum(of_round) for of_round in shares[:-1]} == {24}
        assert len(set(shares)) >= 2
    assert Counter(index for job, *_ in begun + gone_on for index in job.seen) == Counter(range(SAMPLES))
    for job, _, expected in over_threads(train, workers):
        assert len(job.plans) == expected
