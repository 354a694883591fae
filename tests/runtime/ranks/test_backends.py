"""A group that nobody named a back end for: it reduces CPU tensors by gloo, like one that is named so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import TensorDataset

import dynamix
from dynamix.runtime.ranks.process_groups import on_gloo
from tests.ranks import run_ranks
from tests.runtime.jobs import Training
from tests.union import Deep

MIXED = "cpu:gloo,cuda:fake"  # as "cpu:gloo,cuda:nccl" is for CPU tensors; a CPU build of torch has no NCCL


def test_a_back_end_is_asked_for_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    group: Any = object()
    assert on_gloo(group)
    assert not on_gloo(group, "cuda")
    assert not on_gloo(group, "xpu")


def _train(rank: int) -> dict[str, Any]:
    import torch.testing._internal.distributed.fake_pg  # registers the back end "fake"

    torch.manual_seed(3)
    x = torch.randn(96, 6)
    y = Deep(depth=2)(x).detach()
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2, min_compression_rate=0.1)
    used: dict[int, set[str]] = {}

    def spy(state: Any, bucket: Any) -> Any:
        used.setdefault(bucket.index(), set()).add(state.process_group.group_name)
        return powerSGD_hook.powerSGD_hook(state, bucket)

    controller = dynamix.Controller("static", batch_size=8, process_group=dist.new_group(backend=MIXED))
    hook = {"hook": spy, "hook_state": state, "ddp": {"bucket_cap_mb": 1e-4}}
    job = Training(controller, TensorDataset(x, y), Deep(), lr=0.05, **hook)
    for bx, by in job.loader:
        F.mse_loss(job.model(bx), by).backward()
        job.finish()
    controller.close()
    return {"weights": job.weights(), "used": used}


@pytest.mark.multiproc
def test_chained_hooks_get_a_group_a_bucket_there_too() -> None:
    first, second = run_ranks(_train, 2)
    assert torch.equal(first["weights"], second["weights"])
    assert len(first["used"]) > 1
    named = list(first["used"].values())
    own = [names.difference(*(other for other in named if other is not names)) for names in named]
    assert all(own)  # every bucket had a group of its own
