"""The same controller on a GPU: NCCL, CUDA events, the real SyncBatchNorm, and no synchronisation in `step()`."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.runtime.facts.parting import Parting
from dynamix.runtime.ranks.compare import PLACE
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, furthest, order_of
from tests.union import Script, hook_of, larger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
N = 512


def _data(width: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, width, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def test_nccl_step_never_synchronises_and_times_are_measured(tmp_path: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2)).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        events = tmp_path / "events.jsonl"
        policy = Script([[64], [16], [48]])
        controller = dynamix.Controller(
            policy, batch_size=32, interval=4, lr_rule="adascale", events=events, global_batch="adaptive"
        )
        sampler = controller.batch_sampler(_data())
        loader = DataLoader(_data(), batch_sampler=sampler, num_workers=1, pin_memory=True)
        model = controller.wrap(DDP(net), optimizer, scaler=scaler)
        for epoch in range(6):
            sampler.set_epoch(epoch)
            for host_x, host_y in loader:
                x, y = host_x.cuda(non_blocking=True), host_y.cuda(non_blocking=True)
                with torch.autocast("cuda", dtype=torch.float16):
                    logits = model(x)
                    loss = F.cross_entropy(logits, y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    controller.step(loss=loss, logits=logits, target=y)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        controller.close()
        from tests.runtime.jobs import decided

        windows = [dynamix.Window.from_dict(event["window"]) for event in decided(events)]
        assert len(windows) > 5
        last = windows[-1]
        assert 0 < last.compute[0] < 1
        assert 0 <= last.communication[0] < last.compute[0]
        assert 0 <= last.accuracy[0] <= 1
        assert last.noise > 0, "norms must carry no loss scale and have arrived without a synchronisation"
        assert 0 < last.device[0] <= 1 or torch.isnan(torch.tensor(last.device[0]))
    finally:
        dist.destroy_process_group()


def _union_on_gpu(rank: int, hook_name: str | None) -> float:
    torch.manual_seed(0)
    data = _data()
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 2)).cuda()
    hook, state = hook_of(hook_name)
    controller = adaptive(Script([[2, 14], [9, 5]]), max_batch_size=64, interval=3)
    job = Training(controller, data, net, lr=0.05, ddp={"bucket_cap_mb": 1e-3}, hook=hook, hook_state=state)
    worst, order = 0.0, order_of(N)
    for x, y in job.loader:
        plan = job.sampler.plan()
        loss = job.backward(x.cuda(), y.cuda())
        index = order[plan.start : plan.start + int(plan.counts.sum())]
        ux, uy = (t[index].cuda() for t in data.tensors)
        want = torch.autograd.grad(F.cross_entropy(net(ux), uy), list(net.parameters()))
        for parameter, true in zip(net.parameters(), want, strict=True):
            worst = larger(worst, float((parameter.grad - true).norm() / true.norm()))
        job.finish(loss=loss)
    controller.close()
    return worst


@pytest.mark.parametrize(("hook", "tolerance"), [(None, 1e-5), ("fp16_compress", 1e-2)])
def test_two_ranks_on_one_gpu_equal_the_one_big_batch(hook: str | None, tolerance: float) -> None:
    assert max(run_ranks(_union_on_gpu, 2, hook, timeout_s=100)) < tolerance


def _sync_batch_norm(rank: int) -> float:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).cuda().double()
    net = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole))
    data = _data()
    controller = adaptive(Script([[2, 14], [9, 5]]), max_batch_size=64, interval=3, lr_rule="none")
    job = Training(controller, data, net, lr=0.05, weighting="loss")
    other = torch.optim.SGD(whole.parameters(), lr=0.05)
    worst, order = 0.0, order_of(N)
    for x, y in job.loader:
        plan = job.sampler.plan()
        loss = job.loss(x.cuda().double(), y.cuda())
        controller.weight(loss).backward()
        index = order[plan.start : plan.start + int(plan.counts.sum())]
        ux, uy = (t[index].cuda() for t in data.tensors)
        other.zero_grad()
        F.cross_entropy(whole(ux.double()), uy).backward()
        worst = larger(worst, furthest(net, [p.grad for p in whole.parameters()]))
        job.finish(loss=loss)
        other.step()
    controller.close()
    return worst


def test_real_sync_batch_norm_on_the_loss_side() -> None:
    assert max(run_ranks(_sync_batch_norm, 2, timeout_s=100)) < 1e-8


def test_rates_and_parameters_on_a_device_are_compared_a_window_late_and_nobody_waits() -> None:
    nets, place = [nn.Linear(8, 4, device="cuda") for _ in range(2)], dict.fromkeys(PLACE, 0)
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1, device="cuda"), fused=True) for net in nets]
    parts = [Parting([optimizer], [net]) for optimizer, net in zip(optimizers, nets, strict=True)]

    def close(step: int) -> tuple[bool, str | None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            place[PLACE[0]] = step
            rows = [part.row(place) for part in parts]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        parts[0].look(np.array(rows))
        return parts[0].differ(), parts[0].wrong

    assert [close(step) for step in (10, 20, 30)] == [(False, None)] * 3
    optimizers[1].param_groups[0]["lr"].fill_(0.2)
    assert [close(step)[0] for step in (40, 50)] == [False, True]
    assert parts[1].facts(place)[0]["lr of parameter group 0"] == pytest.approx(0.2)
    optimizers[1].param_groups[0]["lr"].fill_(0.1)
    close(60)
    nets[1].weight.data.add_(1.0)
    close(70)
    assert "weight of rank 1 differs" in (close(80)[1] or "")
