"""`global_batch="fixed"`: the total stays what it is at the start, the loader's length is true, only shares move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.config import JobConfig
from dynamix.runtime.facts.job_facts import JobFacts
from dynamix.runtime.state.packing import checksum, pack
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, classes
from tests.union import Script

SAMPLES = 500


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
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


def _train(rank: int, policy: Any) -> dict[str, Any]:
    controller = dynamix.Controller(policy, batch_size=16, interval=3, global_batch="fixed")
    data = TensorDataset(*classes(SAMPLES).tensors, torch.arange(SAMPLES))
    job = Training(controller, data, sampling={"seed": 3})
    seen, sizes, steps, expected = [], [], 0, len(job.loader)
    for x, y, index in job.loader:
        sizes.append(controller.batch_sizes.tolist())
        if job.sampler.plan().counts[rank]:
            seen += index.tolist()
        job.backward(x, y)
        job.finish()
        steps += 1
    controller.close()
    return {"seen": seen, "sizes": sizes, "steps": steps, "expected": expected}


@pytest.mark.multiproc
def test_the_total_is_constant_the_length_exact_and_the_shares_move() -> None:
    # The script asks for a total of its own in every window; only its proportions may be followed.
    results = run_ranks(_train, 2, Script([[100, 20], [8, 1], [40, 40], [10, 90]]))
    for result in results:
        assert {sum(sizes) for sizes in result["sizes"]} == {32}
        assert len({tuple(sizes) for sizes in result["sizes"]}) >= 3
        assert result["steps"] == result["expected"]
    assert Counter(i for r in results for i in r["seen"]) == Counter(range(SAMPLES))


def _other_world(rank: int) -> dict[str, Any]:
    """What two ranks go on with after a job that began with four."""
    controller = dynamix.Controller("lb_bsp", batch_size=16, global_batch="fixed")
    sampler = controller.batch_sampler(classes(SAMPLES))
    state = controller.state_dict()
    state |= {"world_size": 4, "base_batch": 64, "ledger_sizes": [[10, 20, 30, 4]]}
    state |= {"hosts": pack({"names": [], "shares": {}})}
    state["source"] |= {"taken": [0] * 4}
    state["checksum"] = checksum(state)
    controller.load_state_dict(state)
    return {"sizes": controller.batch_sizes.tolist(), "total": int(controller.bounds.total_high), "len": len(sampler)}


@pytest.mark.multiproc
def test_at_another_world_size_the_total_stays() -> None:
    for result in run_ranks(_other_world, 2):
        assert result == {"sizes": [32, 32], "total": 64, "len": 8}


def _disagree(rank: int) -> None:
    dynamix.Controller("static", batch_size=16, global_batch=("fixed", "adaptive")[rank])  # type: ignore[arg-type]


@pytest.mark.multiproc
def test_ranks_that_disagree_about_it_are_told() -> None:
    outcomes = run_ranks(_disagree, 2, expect_failure=True)
    assert all(UsageError.__name__ in outcome for outcome in outcomes)
