"""`controller.find_limits`: caps that every rank agrees on, and under which a job of unlike memories lives."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.probes.host import Cgroups
from tests.ranks import refusal, run_ranks
from tests.runtime.jobs import Training, classes

pytestmark = pytest.mark.multiproc
MIB = 2**20


def _counted(rank: int, most: tuple[int, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """A rank has memory for `most[rank]` samples."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    before = copy.deepcopy(net.state_dict())
    given = {"global_batch": "adaptive", "process_group": dist.new_group(), **arguments}
    controller = dynamix.Controller("static", batch_size=16, **given)
    job = Training(controller, classes(400), net, optimizer=torch.optim.Adam(net.parameters()))
    state = torch.get_rng_state()

    def step_fn(batch: tuple[Tensor, Tensor]) -> None:
        if len(batch[0]) > most[rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        job.backward(*batch)

    caps = controller.find_limits(step_fn, classes(3)[:3])
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    sizes, seen = controller.batch_sizes.tolist(), 0
    for x, y in job.loader:
        assert len(x) <= caps[rank]
        job.train(x, y)
        seen += len(x)
    controller.close()
    return {"caps": caps, "sizes": sizes, "samples": controller.samples_seen}


def test_only_one_rank_lacks_memory_and_the_others_take_over() -> None:
    results = run_ranks(_counted, 3, (10**6, 11, 10**6), {})
    assert all(result["caps"] == results[0]["caps"] for result in results)
    assert results[0]["caps"][0] == results[0]["caps"][2] == 128, "what the bounds allowed"
    assert 8 <= results[0]["caps"][1] <= 11
    assert sum(results[0]["sizes"]) == 48, "the global batch is kept"
    assert results[0]["sizes"][1] <= 11
    assert all(result["samples"] == 400 for result in results)


def _bug(rank: int) -> None:
    group = dist.new_group()
    controller = dynamix.Controller("static", batch_size=16, global_batch="adaptive", process_group=group)
    job = Training(controller, classes(400))

    def step_fn(batch: Tensor) -> None:
        if rank == 1 and len(batch) > 8:
            raise KeyError("a bug")

    job.controller.find_limits(step_fn, torch.zeros(2, 6))


def _failed(rank: int) -> list[str]:
    """What is said where the smallest batch does not fit, and where a step raises another error."""
    too_large = refusal(Exception, _counted, rank, (10**6, 7), {"min_batch_size": 8})
    return [too_large, refusal(Exception, _bug, rank)]


def test_a_search_that_fails_on_one_rank_ends_every_rank_with_the_reason() -> None:
    first, second = run_ranks(_failed, 2, timeout_s=50, group_timeout_s=60)
    for too_large, _ in (first, second):
        assert "min_batch_size=8 is not possible" in too_large
        assert "rank 1" in too_large
    assert "find_limits: step_fn failed on rank 1" in first[1]
    assert "a bug" in second[1]


WIDE = 16384  # activations of about 200 KiB a sample


def _wide(rank: int, group: str) -> list[int]:
    """Finds limits, and makes two steps at them, with little memory on rank 1."""
    torch.manual_seed(0)
    if rank == 1:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    data = TensorDataset(torch.randn(2400, 32), torch.randn(2400, 1))
    net = nn.Sequential(nn.Linear(32, WIDE), nn.Tanh(), nn.Linear(WIDE, 1))
    controller = dynamix.Controller("static", batch_size=100, max_batch_size=1600, global_batch="adaptive")
    job = Training(controller, data, net, optimizer=torch.optim.SGD(net.parameters(), lr=1e-5, momentum=0.9))
    caps = controller.find_limits(lambda b: F.mse_loss(job.model(b[0]), b[1]).backward(), data[:4])
    controller.close()
    x, y = data[: caps[rank]]
    for _ in range(2):  # and it is true
        F.mse_loss(net(x), y).backward()
        job.optimizer.step()
    return caps


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 220 MiB, version 1 or 2; none of it is left."""
    folder, why = _memory_root()
    if folder is None:
        if os.environ.get("CI") == "true" or os.environ.get("DYNAMIX_REQUIRE_EMULATOR") == "1":
            pytest.fail(f"privileged tests are required here, but: {why}")
        pytest.skip(why)
    group = folder / f"dynamix-test-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
        (group / name).write_text(str(220 * MIB))
        yield group
    finally:
        group.rmdir()


def _memory_root() -> tuple[Path | None, str]:
    folders = Cgroups.find().memory
    if os.geteuid() != 0 or not folders:
        return None, "control groups of memory need root and a mounted memory controller"
    for folder in folders[::-1]:
        if (folder / "memory.limit_in_bytes").exists():
            return folder, ""
        if (folder / "cgroup.subtree_control").exists() and "memory" in (folder / "cgroup.subtree_control").read_text():
            return folder, ""
    return None, "no control group here passes the memory controller on"


@pytest.mark.emulator
def test_a_control_group_that_would_kill_one_rank_only(small_group: Path) -> None:
    one, other = run_ranks(_wide, 2, str(small_group), timeout_s=110)
    assert one == other
    assert one[0] == 1600, "rank 0 has memory for all that the bounds allow"
    assert 50 < one[1] < 1000
