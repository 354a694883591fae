"""A group that nobody named a back end for: it reduces CPU tensors by gloo, like one that is named so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.runtime.ranks.process_groups import on_gloo
from tests.ranks import run_ranks
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

    group = dist.new_group(backend=MIXED)
    torch.manual_seed(3)
    x = torch.randn(96, 6)
    y, net = Deep(depth=2)(x).detach(), Deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    controller = dynamix.Controller("static", batch_size=8, process_group=group)
    sampler = controller.batch_sampler(x)
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2, min_compression_rate=0.1)
    used: dict[int, set[str]] = {}

    def spy(state: Any, bucket: Any) -> Any:
        used.setdefault(bucket.index(), set()).add(state.process_group.group_name)
        return powerSGD_hook.powerSGD_hook(state, bucket)

    model = controller.wrap(DDP(net, process_group=group, bucket_cap_mb=1e-4), optimizer, hook=spy, hook_state=state)
    for bx, by in DataLoader(TensorDataset(x, y), batch_sampler=sampler):
        F.mse_loss(model(bx), by).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    controller.close()
    return {"weights": torch.cat([p.detach().flatten() for p in net.parameters()]), "used": used}


@pytest.mark.multiproc
def test_chained_hooks_get_a_group_a_bucket_there_too() -> None:
    first, second = run_ranks(_train, 2)
    assert torch.equal(first["weights"], second["weights"])
    assert len(first["used"]) > 1
    named = list(first["used"].values())
    own = [names.difference(*(other for other in named if other is not names)) for names in named]
    assert all(own)  # every bucket had a group of its own
