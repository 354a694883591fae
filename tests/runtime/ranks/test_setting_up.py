"""Setting up ends on every rank, in seconds, where one of them fails: as srun and mp.spawn start them.

The job's store is in rank 0's process here, and ends with it.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamix
from dynamix.runtime.ranks import opening, store
from tests.ranks import _CONTEXT, free_port

pytestmark = pytest.mark.multiproc

BEHIND_S = 2.0
WITHIN_S = 10.0  # of arriving
GONE = r"rank 0's store (127.0.0.1, port "
LOG = "is in rank 0's log"
Case = Callable[[int], None]


def _rank(case: Case, rank: int, ranks: int, port: int, folder: str, meet: bool) -> None:
    """A process that ends as Python does: what nobody catches goes to `sys.excepthook`."""
    torch.set_num_threads(1)
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    if meet:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        dist.barrier()
    began = time.monotonic()
    try:
        case(rank)
    except Exception:
        Path(folder, f"{rank}.s").write_text(str(time.monotonic() - began))
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]


def _start(
    case: Case, ranks: int, tmp_path: Path, *, meet: bool = True, most_s: float = 40.0
) -> tuple[list[str], list[float]]:
    """What each rank wrote, and after how many seconds its error came; a rank that hangs is killed after `most_s`."""
    known = ranks, free_port(), str(tmp_path), meet
    jobs = [_CONTEXT.Process(target=_rank, args=(case, rank, *known)) for rank in range(ranks)]
    try:
        for job in jobs:
            job.start()
        end = time.monotonic() + most_s
        for job in jobs:
            job.join(max(end - time.monotonic(), 0.0))
        hung = [rank for rank, job in enumerate(jobs) if job.is_alive()]
    finally:
        for job in jobs:
            job.kill()
            job.join(5)
    said = [(tmp_path / f"{rank}").read_text() + (" hung" if rank in hung else "") for rank in range(ranks)]
    took = [tmp_path / f"{rank}.s" for rank in range(ranks)]
    return said, [float(path.read_text()) if path.exists() else 0.0 for path in took]


def _make() -> dynamix.Controller:
    return dynamix.Controller("static", 4)


def _no_data() -> None:
    raise FileNotFoundError("no data set here")


def _first_fails_before(rank: int) -> None:
    if rank == 0:
        _no_data()
    time.sleep(BEHIND_S)
    _make()


def _first_is_killed_inside(rank: int) -> None:
    if rank == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(BEHIND_S * rank)
    _make()


def _be_late() -> None:
    """In the middle of this rank's constructor, before it has begun its watch."""
    begin = opening.RankWatch
    opening.RankWatch = lambda *of, **by: (time.sleep(BEHIND_S), begin(*of, **by))[1]  # type: ignore[misc,assignment]


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(_first_fails_before, 3), (_first_is_killed_inside, 2)],
)
def test_who_comes_when_the_first_ranks_store_is_gone_says_so(case: Case, ranks: int, tmp_path: Path) -> None:
    said, seconds = _start(case, ranks, tmp_path)
    for told, took in zip(said[1:], seconds[1:], strict=True):
        assert "WorkerLostError" in told
        assert GONE in told
        assert LOG in told
        assert took < BEHIND_S + WITHIN_S


def _late(rank: int) -> None:
    """The last one is late in the middle of its constructor, and the others wait there."""
    if rank == dist.get_world_size() - 1:
        _be_late()
    controller = _make()
    if rank == 0:
        _no_data()
    time.sleep(1.0)
    controller.wrap(model := DDP(nn.Linear(2, 1)), torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_first_rank_that_fails_stays_until_all_have_read_why(tmp_path: Path) -> None:
    said, seconds = _start(_late, 3, tmp_path)
    for told, took in zip(said[1:], seconds[1:], strict=True):
        assert "rank 0 (" in told
        assert "has ended (FileNotFoundError: no data set here)" in told
        assert took < BEHIND_S + WITHIN_S


def _first_is_no_member(rank: int) -> None:
    if rank == 0:
        dynamix.Controller("static", 4, process_group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
    time.sleep(BEHIND_S)
    _make()


def test_a_rank_that_is_refused_stays_until_all_have_read_why(tmp_path: Path) -> None:
    said, seconds = _start(_first_is_no_member, 3, tmp_path)
    for told, took in zip(said, seconds, strict=True):
        assert "rank 0 is not in process_group" in told
        assert took < BEHIND_S + WITHIN_S


def _last_fails_after(rank: int) -> None:
    controller = _make()
    if rank:
        _no_data()
    time.sleep(BEHIND_S)
    controller.wrap(model := DDP(nn.Linear(2, 1)), torch.optim.SGD(model.parameters(), lr=0.1))


def test_another_rank_that_fails_while_the_first_is_behind_is_named(tmp_path: Path) -> None:
    said, seconds = _start(_last_fails_after, 2, tmp_path)
    assert "rank 1 (" in said[0]
    assert "has ended (FileNotFoundError: no data set here)" in said[0]
    assert seconds[0] < BEHIND_S + WITHIN_S


def test_a_store_that_answers_leaves_errors_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="something else"), store.store_is_there():
        raise RuntimeError("something else")


# ------------------------------------------------------------ a controller that was made too early


def _early(rank: int, when: str, ranks: int = 2, **meeting: str) -> None:
    controller, data = dynamix.Controller("static", 4, global_batch="adaptive"), range(64)
    sampler = controller.batch_sampler(data) if when == "epoch" else None
    dist.init_process_group("gloo", rank=rank, world_size=ranks, **meeting)
    if when == "wrap":
        controller.wrap(model := DDP(nn.Linear(2, 1)), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in sampler or controller.batch_sampler(data):
        controller.step()


@pytest.mark.parametrize("when", ["wrap", "epoch"])
def test_a_controller_made_before_the_process_group_is_noticed(when: str, tmp_path: Path) -> None:
    for told in _start(functools.partial(_early, when=when), 2, tmp_path, meet=False)[0]:
        assert "UsageError: this controller was made before the process group of 2 ranks" in told
        assert "move torch.distributed.init_process_group(...) above dynamix.Controller(...)" in told


def test_a_process_group_of_one_rank_changes_nothing(tmp_path: Path) -> None:
    try:
        _early(0, "sampler", 1, init_method=f"file://{tmp_path / 'store'}")
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------ a rank that is lost before it can say so


def _last_fails_before(rank: int) -> None:
    if rank:
        _no_data()
    _make()


def _last_is_killed_between(rank: int) -> None:
    """After the ranks have met, and before they have made their group."""
    if rank:
        opening.open_control = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    _make()


def _first_stands_still(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.0)
    _make()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (_last_fails_before, "rank 1 has ended before it made a Controller"),
        (_last_is_killed_between, "not all ranks have made a Controller: rank 1"),
        (_first_stands_still, "not all ranks have made a Controller: the job's store has been silent"),
    ],
)
def test_a_rank_that_is_lost_while_others_set_up_keeps_nobody_waiting(case: Case, said: str, tmp_path: Path) -> None:
    odd = 0 if case is _first_stands_still else 1
    told, _ = _start(case, 2, tmp_path, most_s=BEHIND_S + WITHIN_S)
    assert "hung" not in told[1 - odd]
    assert f"WorkerLostError: {said}" in told[1 - odd]
