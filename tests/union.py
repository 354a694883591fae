"""Compares every optimizer step of a weighted job with the gradient of the one big batch."""

from __future__ import annotations

import contextlib
import copy
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.compression import CompressionState, compression_hook
from dynamix.window import Bounds, Window
from tests.ranks import run_ranks


class Script:
    """A policy that answers from a list, again and again."""

    def __init__(self, answers: Sequence[Sequence[int]], pieces: int = 1) -> None:
        self.answers, self.asked = [pieces * np.asarray(a) for a in answers], 0

    def decide(self, window: Window, bounds: Bounds) -> Any:
        self.asked += 1
        return self.answers[(self.asked - 1) % len(self.answers)]

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class Watching(Script):
    """A script that keeps what it was shown."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        super().__init__(answers)
        self.windows: list[Window] = []
        self.bounds: list[Bounds] = []

    def decide(self, window: Window, bounds: Bounds) -> Any:
        self.windows.append(window)
        self.bounds.append(bounds)
        return super().decide(window, bounds)


class Deep(nn.Module):
    """Enough layers for eight buckets and more."""

    def __init__(self, width: int = 6, depth: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


class Embedded(nn.Module):
    """Sparse embeddings: one below a dense layer, one beside it whose gradient is a view of what the layer gets."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.tables = nn.Linear(6, 6), nn.ModuleList(nn.Embedding(50, 6, sparse=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        at = x[:, 0].abs().mul(10).long().clamp(max=49)
        return self.out(self.tables[0](at)) + self.tables[1](at)


class Headless(Deep):
    """Its last layers, whose buckets DDP reduces first, are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))


class Checkpointed(Deep):
    """The middle layers' backward passes are run within the whole model's."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:-1]:
            x = checkpoint(layer, x, use_reentrant=True) + x
        return self.layers[-1](x)


MODELS: dict[str, type[nn.Module]] = {
    "deep": Deep,
    "embedded": Embedded,
    "headless": Headless,
    "checkpointed": Checkpointed,
}


@dataclass
class Case:
    script: Sequence[Sequence[int]]
    batch_size: int = 4
    samples: int = 100
    epochs: int = 2
    accumulate: int = 1
    micro_batch: int | None = None  # shares are cut into pieces of so many
    hook: str | None = None
    weighting: str = "hook"
    model: str = "deep"
    dtype: torch.dtype = torch.float64
    interval: int = 2
    num_workers: int = 0
    prefetch_factor: int | None = None
    min_batch_size: int = 1
    divide: bool = True
    lr: float = 0.01
    max_batch_size: int = 64
    global_batch: Literal["fixed", "adaptive"] = "adaptive"
    lengths: bool = False  # samples of unlike cost, log-normal, by which rounds are cut
    padded: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)  # options of DistributedDataParallel
    warm_up: bool = False
    synchronised: int = 0  # optimizer steps at the beginning in which every micro-batch is reduced, without no_sync


def hook_of(name: str | None) -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name is None:
        return None, None
    if name in ("dense", "gather"):
        return compression_hook, CompressionState(name)
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=6, start_powerSGD_iter=3, min_compression_rate=0.1
        )
        return powerSGD_hook.powerSGD_hook, state
    return getattr(default_hooks, f"{name}_hook"), None


def larger(worst: float, error: float) -> float:
    """The larger error; NaN is the largest, where Python's `max` would pass over it."""
    assert not math.isnan(error), "an error that is not a number"
    return max(worst, error)


def flat_gradient(net: nn.Module) -> Tensor:
    """One flat tensor; a parameter without a gradient has none in it."""
    return torch.cat([p.grad.to_dense().flatten() for p in net.parameters() if p.grad is not None])


def worst_error(rank: int, case: Case) -> float:
    """The largest relative error of any optimizer step's gradient; trains on with the true gradient applied."""
    torch.manual_seed(1)
    x = torch.randn(case.samples, 6, dtype=case.dtype)
    y = torch.randn(case.samples, 6, dtype=case.dtype)
    net = MODELS[case.model]().to(case.dtype)
    reference, group = copy.deepcopy(net), dist.new_group()
    own = ("batch_size", "min_batch_size", "max_batch_size", "interval", "accumulate", "micro_batch", "global_batch")
    options: dict[str, Any] = {name: getattr(case, name) for name in own}
    controller = dynamix.Controller(policy=Script(case.script, case.accumulate), process_group=group, **options)
    dataset = TensorDataset(x, y)
    lengths = torch.randn(case.samples, generator=torch.Generator().manual_seed(4)).exp() if case.lengths else None
    sampler = controller.batch_sampler(dataset, seed=3, lengths=lengths, padded=case.padded)
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=case.num_workers, prefetch_factor=case.prefetch_factor
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=case.lr)
    hook, state = hook_of(case.hook)
    ddp = DDP(net, process_group=group, bucket_cap_mb=1e-4, **case.ddp)
    model = controller.wrap(ddp, optimizer, hook=hook, hook_state=state, weighting=case.weighting)
    if case.warm_up:
        controller.warm_up(lambda: model(x[:2]).sum().backward())
    worst, seen = 0.0, []
    for epoch in range(case.epochs):
        sampler.set_epoch(epoch)
        order = torch.randperm(case.samples, generator=torch.Generator().manual_seed(3 + epoch))
        for bx, by in loader:
            piece = sampler.piece()
            plan, last = piece.plan, piece.last
            assert len(bx) == (piece.samples or 2)
            scale = 1 / case.accumulate if case.divide else 1.0

            def backward(bx: Tensor = bx, by: Tensor = by, scale: float = scale, plan: Any = plan) -> Tensor:
                loss = F.mse_loss(model(bx), by)
                if plan.counts[rank] == 0:
                    loss = loss * float("nan")  # what a placeholder computes must not matter
                scaled = loss * scale
                (controller.weight(scaled) if case.weighting == "loss" else scaled).backward()
                return loss

            crosses = last or len(seen) < case.synchronised
            with controller.piece() if case.micro_batch else contextlib.nullcontext() if crosses else model.no_sync():
                loss = backward()
            assert controller.optimizer_due == last
            if last:
                seen.append(tuple(int(c) for c in plan.counts))
                begin = plan.start + int(plan.counts.sum()) - int(plan.round.counts.sum())
                union = order[begin : begin + int(plan.round.counts.sum())]
                reference.load_state_dict(net.state_dict())
                reference.zero_grad()
                factor = 1.0 if case.divide else case.accumulate
                (F.mse_loss(reference(x[union]), y[union]) * factor).backward()
                got, want = flat_gradient(net), flat_gradient(reference)
                worst = larger(worst, float((got - want).norm() / want.norm()))
                optimizer.step()
                optimizer.zero_grad()
            controller.step(loss=loss)
    assert controller.samples_seen == case.epochs * case.samples, controller.samples_seen
    assert len(set(seen)) > 1, "the case never changed the allocation"
    return worst


def errors_of(cases: Mapping[str, tuple[int, Case]]) -> dict[str, list[float | str]]:
    """By name and rank `worst_error`, or the traceback that a case ended with; all of a world size in one launch."""
    told: dict[str, list[float | str]] = {}
    for workers in {workers for workers, _ in cases.values()}:
        mine = {name: case for name, (of, case) in cases.items() if of == workers}
        for of_rank in run_ranks(_errors, workers, mine, timeout_s=400):
            for name, error in of_rank.items():
                told.setdefault(name, []).append(error)
    return told


def _errors(rank: int, cases: dict[str, Case]) -> dict[str, float | str]:
    told: dict[str, float | str] = {}
    for name, case in cases.items():
        try:
            told[name] = worst_error(rank, case)
        except Exception:
            told[name] = traceback.format_exc()
    return told
