"""The controller's messages over rooms and heads: what arrives is what one flat group brings."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dynamix.errors import ConfigError, UsageError, WorkerLostError
from dynamix.runtime.ranks import group as control
from dynamix.runtime.ranks.group import HierarchicalGroup, require_descriptors
from dynamix.runtime.state.packing import unpack
from tests.ranks import refusal, run_ranks
from tests.runtime.jobs import Training, adaptive, classes
from tests.union import Script


def _train(flat_up_to: int, policy: Any, seed: int = 0) -> dict[str, Any]:
    """Over a group of its own."""
    control.FLAT_UP_TO = flat_up_to
    with mock.patch.object(control, "HierarchicalGroup", wraps=HierarchicalGroup) as rooms:
        controller = adaptive(policy, 4, process_group=dist.new_group())
    assert rooms.called == (controller.world_size > flat_up_to)
    job = Training(controller, classes(400), sampling={"seed": seed})
    plans = []
    for x, y in job.loader:
        plans.append(tuple(int(c) for c in job.sampler.plan().counts))
        job.train(x, y)
        if len(plans) == 7:
            state = controller.state_dict(gather=True)
    controller.close()
    return {"plans": plans, "weights": job.weights(), "ranks": repr(unpack(state["ranks"]).keys())}


def _jobs(rank: int) -> dict[str, Any]:
    script = [[6, 2, 4, 4, 3], [1, 7, 4, 4, 5]]
    return {
        "flat": _train(256, Script(script)),
        "rooms": _train(2, Script(script)),
        "each decides": _train(2, "stigmergic"),
        "odd seed": refusal(UsageError, _train, 2, Script(script), int(rank == 3)),
    }


@pytest.mark.timeout(120)
def test_a_job_over_two_levels_is_the_job_over_one() -> None:
    told = run_ranks(_jobs, 5, timeout_s=100)
    for of_rank in told:
        one, other = of_rank["flat"], of_rank["rooms"]
        assert one["plans"] == other["plans"]
        assert torch.equal(one["weights"], other["weights"])
        assert one["ranks"] == other["ranks"]
        assert "seed is 0 on ranks 0-2, 4, 1 on rank 3" in of_rank["odd seed"]
    assert len(set(told[0]["flat"]["plans"])) > 2
    assert len({tuple(of_rank["each decides"]["plans"]) for of_rank in told}) == 1


def _die(rank: int, victim: int) -> str:
    control.FLAT_UP_TO = 2
    job = Training(adaptive("static", 4, interval=1), classes(4000))
    try:
        for i, (x, y) in enumerate(job.loader):
            if i == 5 and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            job.backward(x, y)
            job.finish()
    except WorkerLostError as error:
        return str(error)
    return "went on"


@pytest.mark.timeout(120)
def test_a_dead_rank_is_named_over_two_levels() -> None:
    """It is the head of one behind it."""
    victim = 3
    outcomes = run_ranks(_die, 5, victim, group_timeout_s=15, expect_failure=True)
    others = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
    assert all(f"rank {victim} (" in said for said in others), outcomes


def test_too_few_descriptors_are_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(control.resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(control.resource, "setrlimit", lambda _, limits: asked.append(limits))
    require_descriptors(10, 11)
    assert not asked
    require_descriptors(500, 501)
    assert asked[0][1] == 4096
    assert asked[0][0] > 560
    with pytest.raises(ConfigError, match="ulimit -n 8192"):
        require_descriptors(5000, 5001)
