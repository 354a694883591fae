"""The controller's messages over rooms and heads: what arrives is what one flat group brings."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dynamix.errors import ConfigError, WorkerLostError
from dynamix.runtime.ranks import group as control
from dynamix.runtime.ranks.group import HierarchicalGroup, open_control, require_descriptors
from dynamix.runtime.state.packing import unpack
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes
from tests.union import Script


def _messages(rank: int, flat_up_to: int) -> list[Any]:
    control.FLAT_UP_TO = flat_up_to
    workers = dist.get_world_size()
    group = open_control(list(range(workers)))
    assert isinstance(group, HierarchicalGroup) == (workers > flat_up_to)
    told: list[Any] = []
    for k in range(30):
        row, answer = torch.tensor([rank, k, 0.5], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        if rank == 0:
            rows = torch.zeros(workers, 3, dtype=torch.float64)
            group.collect(row, rows).wait()
            told.append(rows.tolist())
            answer[:] = rows.sum() + k
            group.answer(answer).wait()
        else:
            work = group.send(row, answer)
            while not work.done():
                time.sleep(1e-4)
            work.wait()
        told.append(answer.tolist())
        every = torch.zeros(workers, 2, dtype=torch.int64)
        group.all_gather(torch.tensor([k, rank * rank]), every).wait()
        told.append(every.tolist())
    first = torch.tensor([rank + 1, k])
    group.broadcast(first).wait()
    told.append(first.tolist())
    for of_mine in group.release():
        dist.destroy_process_group(of_mine)
    return told


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [5, 7])
def test_two_levels_bring_what_one_brings(workers: int) -> None:
    flat, rooms = run_ranks(_messages, workers, 256), run_ranks(_messages, workers, 2)
    assert rooms == flat
    assert flat[1][-1] == [1, 29]


def _train(rank: int, flat_up_to: int, policy: str, odd: bool = False) -> dict[str, Any]:
    control.FLAT_UP_TO = flat_up_to
    script = Script([[6, 2, 4, 4, 3], [1, 7, 4, 4, 5]])
    with mock.patch.object(control, "HierarchicalGroup", wraps=HierarchicalGroup) as rooms:
        controller = adaptive(script if policy == "script" else policy, 4)
    assert rooms.called == (controller.world_size > flat_up_to)
    job = Training(controller, classes(400), sampling={"seed": int(odd and rank == 3)})
    plans = []
    for x, y in job.loader:
        plans.append(tuple(int(c) for c in job.sampler.plan().counts))
        job.train(x, y)
        if len(plans) == 7:
            state = controller.state_dict(gather=True)
    controller.close()
    return {"plans": plans, "weights": job.weights(), "ranks": repr(unpack(state["ranks"]).keys())}


@pytest.mark.timeout(120)
def test_a_job_over_two_levels_is_the_job_over_one() -> None:
    flat, rooms = run_ranks(_train, 5, 256, "script"), run_ranks(_train, 5, 2, "script")
    for one, other in zip(flat, rooms, strict=True):
        assert one["plans"] == other["plans"]
        assert torch.equal(one["weights"], other["weights"])
        assert one["ranks"] == other["ranks"]
    assert len(set(flat[0]["plans"])) > 2


@pytest.mark.timeout(120)
def test_ranks_that_decide_for_themselves_agree_over_two_levels() -> None:
    told = run_ranks(_train, 5, 2, "stigmergic")
    assert len({tuple(of_rank["plans"]) for of_rank in told}) == 1


@pytest.mark.timeout(120)
def test_what_differs_is_told_over_two_levels() -> None:
    outcomes = run_ranks(_train, 5, 2, "script", True, expect_failure=True)
    assert all("seed is 0 on ranks 0-2, 4, 1 on rank 3" in str(outcome) for outcome in outcomes), outcomes


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
@pytest.mark.parametrize("victim", [3, 4])  # a head, and one behind it
def test_a_dead_rank_is_named_over_two_levels(victim: int) -> None:
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
