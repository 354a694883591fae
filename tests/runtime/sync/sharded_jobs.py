"""A job under FSDP2 whose every gradient is compared with that of the union batch."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

from tests.runtime.jobs import Training, adaptive
from tests.union import Script, larger

WIDTH = 6
TWO = ((16, 2), (2, 7), (9, 9), (5, 0))
FOUR = ((16, 2, 4, 7), (2, 9, 0, 5), (4, 4, 4, 4))


class Blocks(nn.Module):
    """Blocks of unlike shapes, with rows that two or four ranks do not divide, and one parameter at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale


@dataclass
class ShardedCase:
    script: Sequence[Sequence[int]] = TWO
    reshard: bool | None = None
    mesh: tuple[int, ...] = (2,)
    accumulate: int = 1
    micro_batch: int | None = None
    sync: str = "piece"  # how passes of all but the last batch are kept on the rank: piece, own, or none are
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    weighting: str = "hook"
    counts: bool = False  # the loss is a weighted mean, and its divisor is told
    clip: bool = False
    force_sum: bool = False
    epochs: int = 1
    samples: int = 110
    bound: float = 2e-5
    options: dict[str, Any] = field(default_factory=dict)

    def shard(self, net: nn.Module) -> Any:
        names = ("replicate", "shard")[-len(self.mesh) :]
        mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=names)
        policy = MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)
        for part in (*net.blocks, net):
            fully_shard(part, mesh=mesh, reshard_after_forward=self.reshard, mp_policy=policy)
            if self.force_sum:
                part.set_force_sum_reduction_for_comms(True)
        return net


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded_error(case: ShardedCase) -> float:
    """The largest relative error of any optimizer step's gradient; asserts that every sample came once an epoch."""
    torch.manual_seed(1)
    x, y = torch.randn(case.samples, WIDTH, dtype=case.dtype), torch.randn(case.samples, 3, dtype=case.dtype)
    weight = torch.rand(case.samples, dtype=case.dtype) * 9 + 1
    net = Blocks().to(case.dtype)
    reference = copy.deepcopy(net)
    in_passes = copy.deepcopy(net).to(case.param_dtype or case.dtype)
    model = case.shard(net)
    given = {"min_batch_size": 0, "max_batch_size": 64, "interval": 1, "lr_rule": "none", **case.options}
    cut = {"accumulate": case.accumulate, "micro_batch": case.micro_batch}
    controller = adaptive(Script(case.script, case.accumulate), 9, **given, **cut)
    data = TensorDataset(torch.arange(case.samples), x, y, weight)
    job = Training(controller, data, model, lr=0.05, sampling={"seed": 3}, weighting=case.weighting)

    def loss_of(net: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        if case.counts:
            return ((net(x).to(case.dtype) - y).square().mean(1) * weight).sum() / weight.sum()
        return F.mse_loss(net(x).to(case.dtype), y)

    worst, seen, allocations, mine = 0.0, list[int](), set[tuple[int, ...]](), list[Tensor]()
    for index, bx, by, bw in job.batches(case.epochs):
        piece = job.sampler.piece()
        model.set_requires_gradient_sync(piece.last or case.sync == "none")
        if case.sync == "piece":
            model.set_requires_gradient_sync(True)
        with controller.piece() if case.sync == "piece" else contextlib.nullcontext():
            loss = loss_of(model, bx, by, bw)
            told = loss if piece.samples else loss * float("nan")  # what a placeholder computes must not matter
            told = told / case.accumulate
            if case.weighting == "loss":
                told = controller.weight(told, count=float(bw.sum()) if case.counts else None)
            told.backward()
        if piece.samples:
            mine.append(index)
        if piece.last:
            allocations.add(tuple(piece.plan.counts.tolist()))
            shares: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(shares, mine)
            seen += [i for share in shares for part in share for i in part.tolist()]
            want = _union_gradient(reference, in_passes, model, case, loss_of, shares, x, y, weight)
            if case.clip:
                total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                norm = float(torch.cat([w.flatten() for w in want]).norm())
                assert abs(float(full(total)) / norm - 1) < 2e-5
                want = [w * min(1.0, 0.05 / (norm + 1e-6)) for w in want]
            for parameter, wanted in zip(model.parameters(), want, strict=True):
                apart = (full(parameter.grad) - wanted).norm() / wanted.norm().clamp_min(1e-6)
                worst = larger(worst, float(apart))
            mine = []
        assert controller.optimizer_due == piece.last
        job.finish(loss=loss)
    assert Counter(seen) == Counter(case.epochs * list(range(case.samples)))
    assert len(allocations) > 1
    controller.close()
    return worst


def _union_gradient(
    reference: nn.Module, in_passes: nn.Module, model: Any, case: ShardedCase, loss_of: Any, shares: Any, *data: Tensor
) -> list[Tensor]:
    """Of one batch; with half precision the weighted mean of what every rank's batch gives in it."""
    with torch.no_grad():
        for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
            mine.copy_(full(theirs))
    if case.param_dtype is None:
        reference.zero_grad()
        union = torch.cat([part for share in shares for part in share])
        loss_of(reference, *(d[union] for d in data)).backward()
        return [p.grad.clone() for p in reference.parameters()]
    in_passes.load_state_dict(reference.state_dict())
    total = sum(len(part) for share in shares for part in share)
    want = [torch.zeros_like(p) for p in reference.parameters()]
    for part in (part for share in shares for part in share):
        in_passes.zero_grad()
        x, *rest = (d[part] for d in data)
        loss_of(in_passes, x.to(case.param_dtype), *rest).backward()
        for mean, p in zip(want, in_passes.parameters(), strict=True):
            mean.add_(p.grad.to(case.dtype), alpha=len(part) / total)
    return want
