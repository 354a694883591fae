"""An error of one rank ends all of them with its message, also before training and beside a store that hangs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.futures import Future

import dynamix
from dynamix.errors import ConfigError, StateError, UsageError, WorkerLostError
from dynamix.runtime.ranks import rendezvous as meeting
from dynamix.runtime.ranks import watch
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.ranks.watch import RankWatch
from tests.ranks import launched, refusal, run_ranks
from tests.runtime.check.loops import Job, Loops, data

LOOPS = Loops()
wrong, right, right_with = LOOPS.wrong, LOOPS.right, LOOPS.right_with


def _wait_in(watch: RankWatch, done_after_s: float | None = None) -> None:
    """For what is done after so long; None: never."""
    group: Any = SimpleNamespace(rank=watch.rank, workers=2)
    work = Future[None]()
    if done_after_s is not None:
        threading.Timer(done_after_s, work.set_result, args=(None,)).start()
    Ranks(group, watch).wait(work)


def test_a_store_that_hangs_keeps_nobody_waiting(store_server: tuple[int, int]) -> None:
    process, port = store_server
    one = RankWatch(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), 1, 2)
    one.all_have_come()
    assert one.told() is None
    os.kill(process, signal.SIGSTOP)
    try:
        began = time.monotonic()
        _wait_in(one, 1.0)
        assert one.told() is None
        one.end(UsageError("said to nobody"))
        assert time.monotonic() - began < 8.0
    finally:
        os.kill(process, signal.SIGCONT)
        one.leave()


# ------------------------------------------------------------ before training, on one rank


@wrong("make one Controller per loop")
def _a_second_sampler(job: Job) -> None:
    job.wrap()
    if job.rank:
        job.controller.batch_sampler(data())
    for x, y in job.loader:
        job.train(x, y)


@wrong("weight() was given a loss that it has weighted already")
def _weighted_twice(job: Job) -> None:
    job.controller.wrap(job.ddp, job.optimizer, weighting="loss")
    for x, y in job.loader:
        loss = job.controller.weight(job.loss(x, y))
        if job.rank and job.steps == 2:
            loss = job.controller.weight(loss)
        loss.backward()
        job.update()
        job.step()


# ------------------------------------------------------------ what all ranks must call, called by one


@wrong("another rank waits in controller.state_dict(gather=True), which this rank did not call")
def _a_state_of_all_is_asked_for_by_one(job: Job) -> None:
    for x, y in job.batches():
        job.train(x, y)
        if job.rank == 0 and job.steps == 3:
            job.controller.state_dict(gather=True)


@wrong("waits in")  # the others are at the comparison before the first pass meanwhile
def _limits_are_found_by_one(job: Job) -> None:
    job.wrap()
    if job.rank:
        job.controller.find_limits(lambda batch: job.loss(*batch).backward(), data()[:4])
    for x, y in job.loader:
        job.train(x, y)


@wrong("waits in")
def _one_warms_up(job: Job) -> None:
    job.wrap()
    if job.rank == 0:
        job.controller.warm_up(lambda: job.loss(*data()[:4]).backward())
    for x, y in job.loader:
        job.train(x, y)


@wrong("not to be saved")
def _a_state_of_all_fails_on_one(job: Job) -> None:
    for x, y in job.batches():
        job.train(x, y)
        if job.steps == 3:
            if job.rank:
                job.sampler.state_dict = _not_to_be_saved  # type: ignore[method-assign]
            with contextlib.suppress(ZeroDivisionError):
                job.controller.state_dict(gather=True)


def _not_to_be_saved() -> Any:
    raise ZeroDivisionError("not to be saved")


@wrong("waits in")
def _limits_are_asked_for_with_a_margin_that_is_none_on_one(job: Job) -> None:
    job.wrap()
    with contextlib.suppress(ConfigError):
        margin = 1.5 if job.rank else 0.1
        job.controller.find_limits(lambda batch: job.loss(*batch).backward(), data()[:4], margin=margin)
    for x, y in job.loader:
        job.train(x, y)


@wrong("count")
def _one_ends_the_job_while_others_are_in_backward(job: Job) -> None:
    job.wrap()
    try:
        for x, y in job.loader:
            if job.rank and job.steps == 2:
                job.step(count=77)
            job.loss(x, y).backward()
            job.update()
            job.step()
    finally:
        time.sleep(2.0 * job.rank)  # it is alive while the others wait


@right_with(decides_s=0.5)
def _all_ask_for_a_state_of_all_at_their_own_pace_while_a_decision_is_under_way(job: Job) -> None:
    for x, y in job.batches():
        job.train(x, y)
        if job.steps in (2, 3):
            time.sleep(1.0 * (job.rank == job.steps - 2))
            job.controller.state_dict(gather=True)


def _load(rank: int) -> str:
    watch.SETUP_ERROR_S = 1.5
    job = Job(rank)
    job.wrap()

    def train() -> None:
        if rank:
            job.controller.load_state_dict({})
        for x, y in job.loader:
            job.train(x, y)

    return refusal(StateError, train)


@pytest.mark.multiproc
def test_an_error_before_training_on_one_rank_ends_all() -> None:
    LOOPS.check_wrong(3)


@pytest.mark.multiproc
def test_what_all_ask_for_ends_nobody() -> None:
    LOOPS.check_right()


@pytest.mark.multiproc
def test_a_state_that_one_rank_cannot_load_ends_all() -> None:
    for told in run_ranks(_load, 2):
        assert "this is no state of a controller" in told


# ------------------------------------------------------------ before there is a controller


def _over_other_ranks(rank: int, odd: list[int]) -> tuple[str, float]:
    meeting.ELSEWHERE_S = 2.0
    groups: dict[int, Any] = {len(ranks): dist.new_group(ranks) for ranks in ([2], [1, 2])}
    began = time.monotonic()
    try:
        dynamix.Controller(
            "static", 4, process_group=groups[len(odd)] if rank == 2 else None, global_batch="adaptive"
        ).close()
        told = "made"
    except (UsageError, WorkerLostError) as error:
        told = str(error)
    return told, time.monotonic() - began


@pytest.mark.multiproc
def test_a_rank_with_another_process_group_is_named_after_the_groups_timeout() -> None:
    """It might have come later."""
    results = run_ranks(_over_other_ranks, 3, [2], timeout_s=60, group_timeout_s=6)
    for rank, (told, seconds) in enumerate(results):
        assert seconds < 20
        assert ("made" in told) if rank == 2 else ("process_group" in told), (rank, told)
        assert told == "made" or "ranks [2]" in told or "ranks [0, 1, 2]" in told


def _waiting_for_each_other(rank: int) -> list[str]:
    """By two ranks, then in a circle of three."""
    pair, _ = _over_other_ranks(rank, [1, 2])
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    make = functools.partial(dynamix.Controller, "static", 4, global_batch="adaptive")
    return [pair, refusal(UsageError, make, process_group=groups[rank])]


@pytest.mark.multiproc
def test_ranks_that_wait_for_each_other_are_told_at_once() -> None:
    for pair, circle in run_ranks(_waiting_for_each_other, 3, timeout_s=60, group_timeout_s=50):
        assert "process_group" in pair
        assert "ranks [1, 2]" in pair or "ranks [0, 1, 2]" in pair
        assert "process_group" in circle


def _later(rank: int) -> tuple[list[str], int]:
    """Two of three ranks are at work for a while before all of them are."""
    meeting.ELSEWHERE_S, meeting.WITHOUT_US_S, meeting.LOOK_AFTER_S = 0.5, 1.0, 0.2
    pair, log = dist.new_group([0, 1]), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dynamix").addHandler(handler)
    if rank < 2:
        first = dynamix.Controller("static", 4, process_group=pair, global_batch="adaptive")
        time.sleep(3.0)
        first.close()
    controller = dynamix.Controller("static", 4, global_batch="adaptive")
    controller.close()
    return log, controller.world_size


@pytest.mark.multiproc
def test_ranks_that_are_at_work_with_others_may_come_later() -> None:
    for rank, (log, workers) in enumerate(run_ranks(_later, 3, timeout_s=60)):
        assert workers == 3
        waits = [line for line in log if "makes its Controller over ranks [0, 1], and rank 2 waits for it" in line]
        assert len(waits) == (2 if rank == 2 else 0), log


# ------------------------------------------------------------ going back


def _rolled_back(rank: int) -> tuple[int, list[int], list[int]]:
    job = Job(rank, decides_s=0.5)
    job.wrap()
    state: Any = None
    windows, rounds = [], []
    for x, y in job.loader:
        job.train(x, y)
        if job.steps == 3:
            state = job.controller.state_dict()
        if job.steps == 6:  # its third window is closed, and the policy thinks
            job.controller.load_state_dict(state)
            break
    for x, y in job.loader:
        job.train(x, y)
        told = job.controller.metrics()
        windows.append(int(told["windows"]))
        rounds.append(int(told["step"]))
    job.controller.close()
    return state["progress"]["window"], windows, rounds


@pytest.mark.multiproc
def test_a_decision_under_way_is_not_put_into_a_state_that_is_loaded() -> None:
    first, second = run_ranks(_rolled_back, 2)
    assert first == second
    saved, windows, rounds = first
    assert rounds[0] == 4
    assert windows[0] == saved
    assert windows[-1] > saved + 2  # measuring goes on


LEFT = """
import atexit, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import dynamix
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, over = dist.get_rank(), Path(sys.argv[1])
controller = dynamix.Controller("static", 8)
sampler = controller.batch_sampler(torch.utils.data.TensorDataset(torch.ones(64, 4)))
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    controller.wrap(model, optimizer, weighting=("hook", "los")[rank])
    next(iter(sampler))
    model(torch.ones(8, 4))
except dynamix.DynamixError as error:
    print(f"rank {rank}: {error}", flush=True)
del controller, sampler, model, optimizer
dist.destroy_process_group()
if rank == 0:
    atexit.register(over.touch)
while rank and not over.exists():
    time.sleep(0.1)
"""


@pytest.mark.multiproc
def test_a_rank_that_leaves_others_in_a_message_ends_after_it_has_said_why(tmp_path: Path) -> None:
    """The message stays under way in a group that nobody closed, until the other rank's process ends.

    Then gloo's own thread may abort the process, so with what code it ends is not said.
    """
    (script := tmp_path / "train.py").write_text(LEFT)
    line = [sys.executable, script, tmp_path / "over"]
    ranks = [
        subprocess.Popen(line, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
        for env in launched(ranks=2)
    ]
    said = "".join(rank.communicate(timeout=100)[0] for rank in ranks)
    assert said.count("weighting='los' is not possible") == 2
    assert "rank 0: rank 1 ended the job" in said
