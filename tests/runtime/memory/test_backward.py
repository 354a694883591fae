"""`controller.backward`: gradients of the union batch whatever runs out of memory where, and no rank left waiting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.runtime.gradients import GradientHook
from tests.ranks import Ok, run_ranks
from tests.union import Deep, Script, larger

pytestmark = pytest.mark.multiproc


class FullOnTheWayBack(torch.autograd.Function):
    """Passes on; its backward runs out of memory with more than `most` samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if len(gradient) > ctx.most:
            torch.empty(2**60)  # the allocator's own error, in the autograd engine
        return gradient, None


@dataclass
class Case:
    weighting: str = "hook"
    accumulate: int = 1
    most: tuple[int, ...] = (100, 3, 100, 5)  # samples that each rank has memory for
    forward: bool = False  # runs out on the way there instead
    ddp: dict[str, Any] = field(default_factory=dict)


class WithBuffers(nn.Module):
    """A model with a buffer, so that DDP broadcasts when a forward pass begins, and one unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.unused = Deep(), nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
        return self.deep(x)


def worst_error(rank: int, case: Case) -> tuple[float, int, int, int]:
    """Largest relative error of a step's gradient; hook calls, optimizer steps, passes of loss_fn."""
    torch.manual_seed(1)
    x, y = torch.randn(2, 90, 6, dtype=torch.float64)
    unused = bool(case.ddp.get("find_unused_parameters"))
    net: nn.Module = (WithBuffers() if unused else Deep()).double()
    reference = copy.deepcopy(net)
    world = dist.get_world_size()
    script = Script([[4, 12, 6, 9][:world], [10, 2, 8, 4][:world]], case.accumulate)
    controller = dynamix.Controller(
        script,
        batch_size=8,
        max_batch_size=32,
        interval=2,
        accumulate=case.accumulate,
        guard=False,
        global_batch="adaptive",
    )
    sampler = controller.batch_sampler(TensorDataset(x, y), seed=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    calls = [0, 0, 0]

    whole = GradientHook.__call__

    def counted(self: GradientHook, state: Any, bucket: Any) -> Any:
        calls[0] += bucket.index() == 0
        return whole(self, state, bucket)

    ddp = DDP(net, bucket_cap_mb=1e-4, **case.ddp)
    model = controller.wrap(ddp, optimizer, weighting=case.weighting)
    GradientHook.__call__ = counted  # type: ignore[method-assign]
    worst = 0.0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = torch.randperm(90, generator=torch.Generator().manual_seed(3 + epoch))
        for batch in DataLoader(TensorDataset(x, y), batch_sampler=sampler):
            plan = sampler.plan()

            def loss_fn(part: list[Tensor], idle: bool = plan.counts[rank] == 0) -> Tensor:
                calls[2] += 1
                if case.forward and len(part[0]) > case.most[rank]:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                out = model(part[0])
                out = out if case.forward else FullOnTheWayBack.apply(out, case.most[rank])
                loss = F.mse_loss(out, part[1]) / case.accumulate
                return loss * float("nan") if idle else loss

            loss = controller.backward(loss_fn, batch)
            mine = plan.counts[rank]
            assert mine == 0 or torch.isclose(loss * case.accumulate, F.mse_loss(net(batch[0]), batch[1]))
            if plan.micro == case.accumulate - 1:
                begin = plan.start + int(plan.counts.sum()) - int(plan.group.sum())
                union = order[begin : begin + int(plan.group.sum())]
                reference.load_state_dict(net.state_dict())
                reference.zero_grad()
                F.mse_loss(reference(x[union]), y[union]).backward()
                for got, want in zip(net.parameters(), reference.parameters(), strict=True):
                    if want.grad is not None:
                        assert got.grad is not None
                        worst = larger(worst, float((got.grad - want.grad).norm() / want.grad.norm()))
                    else:
                        assert got.grad is None or not got.grad.any()
                optimizer.step()
                optimizer.zero_grad()
                calls[1] += 1
            controller.step(loss=loss)
    assert controller.samples_seen == 180
    controller.close()
    GradientHook.__call__ = whole  # type: ignore[method-assign]
    return worst, calls[0], calls[1], calls[2]


CASES = [
    Case(),
    Case(weighting="loss", forward=True),
    Case(accumulate=2, ddp={"gradient_as_bucket_view": True}),
    Case(forward=True, ddp={"find_unused_parameters": True}),
]


def _all_cases(rank: int) -> list[tuple[float, int, int, int]]:
    return [worst_error(rank, case) for case in CASES]


@pytest.mark.parametrize("world", [1, 3])
def test_the_gradient_is_the_union_batchs_and_crosses_the_hook_once_a_step(world: int) -> None:
    results = run_ranks(_all_cases, world)
    for ranks in zip(*results, strict=True):
        assert max(worst for worst, *_ in ranks) < 1e-12
        assert all(hooked == steps for _, hooked, steps, _ in ranks)
        if world > 1:
            assert ranks[1][3] > ranks[0][3] * 1.5, "rank 1 was to need pieces"


def _job(rank: int, loss_fn: Callable[[int, nn.Module, list[Tensor]], Tensor], hook: Any = None) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 6), torch.randn(96, 6))
    net = Deep()
    controller = dynamix.Controller("static", batch_size=8, global_batch="adaptive")
    sampler = controller.batch_sampler(data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = controller.wrap(DDP(net), optimizer, hook=hook)
    for batch in DataLoader(data, batch_sampler=sampler):
        loss = controller.backward(lambda part: loss_fn(rank, model, part), batch)
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)


def _never_fits(rank: int, model: nn.Module, part: list[Tensor]) -> Tensor:
    if rank == 1:
        raise MemoryError
    return F.mse_loss(model(part[0]), part[1])


def _has_a_bug(rank: int, model: nn.Module, part: list[Tensor]) -> Tensor:
    if rank == 2:
        raise ValueError("a bug on rank 2")
    return F.mse_loss(model(part[0]), part[1])


def _plain(rank: int, model: nn.Module, part: list[Tensor]) -> Tensor:
    return F.mse_loss(model(part[0]), part[1])


def _full_hook(state: Any, bucket: Any) -> Any:
    if dist.get_rank() == 1:
        torch.empty(2**60)
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def test_where_not_one_sample_fits_every_rank_ends_with_the_reason() -> None:
    outcomes = run_ranks(_job, 3, _never_fits, expect_failure=True, timeout_s=50, group_timeout_s=60)
    assert all("rank 1 ran out of memory even with one sample at a time" in outcome for outcome in outcomes)


def test_another_error_of_the_loss_function_ends_every_rank_with_the_reason() -> None:
    outcomes = run_ranks(_job, 3, _has_a_bug, expect_failure=True, timeout_s=50, group_timeout_s=60)
    assert "ValueError: a bug on rank 2" in outcomes[2]
    assert all("loss_fn failed on rank 2" in outcome for outcome in outcomes[:2])


def test_running_out_while_reducing_names_the_cap_and_leaves_nobody_waiting() -> None:
    outcomes = run_ranks(_job, 2, _plain, _full_hook, expect_failure=True, timeout_s=50, group_timeout_s=60)
    assert "rank 1 ran out of memory while its gradient was being reduced" in outcomes[1]
    assert "max_batch_size=[...]" in outcomes[1]
    assert outcomes[0] != "hung"
    assert not isinstance(outcomes[0], Ok)


def _own_loop(rank: int) -> None:
    data = TensorDataset(torch.randn(96, 6), torch.randn(96, 6))
    net = Deep()
    controller = dynamix.Controller("static", batch_size=8, global_batch="adaptive")
    sampler = controller.batch_sampler(data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = controller.wrap(DDP(net), optimizer)
    for step, (x, y) in enumerate(DataLoader(data, batch_sampler=sampler)):
        out = model(x)
        if rank == 1 and step == 3:
            torch.empty(2**60)
        F.mse_loss(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()


def test_running_out_in_ones_own_loop_ends_all_ranks() -> None:
    outcomes = run_ranks(_own_loop, 2, expect_failure=True, timeout_s=50, group_timeout_s=60)
    assert "DefaultCPUAllocator" in outcomes[1]
    assert outcomes[0] != "hung"
    assert not isinstance(outcomes[0], Ok)


def _times(rank: int) -> Any:
    """What rank 0 measures when rank 1 is slow: waiting for it to agree must not count as computing."""
    import time

    data = TensorDataset(torch.randn(192, 6), torch.randn(192, 6))
    net = Deep()
    controller = dynamix.Controller("static", batch_size=8, interval=3, global_batch="adaptive")
    rows: list[Any] = []
    if rank == 0:
        decider: Any = controller._coordinator.channel.judge  # type: ignore[union-attr]
        decide = decider.decide
        decider.decide = lambda r, about=None: (rows.append(r.copy()), decide(r, about))[1]
    sampler = controller.batch_sampler(data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = controller.wrap(DDP(net), optimizer)

    def loss_fn(part: list[Tensor]) -> Tensor:
        out = model(part[0])
        time.sleep(0.1 * rank)
        return F.mse_loss(out, part[1])

    for batch in DataLoader(data, batch_sampler=sampler):
        loss = controller.backward(loss_fn, batch)
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
    controller.close()
    from dynamix.runtime.observation import ROW

    return [row[:, [ROW.index("compute")]].ravel().tolist() for row in rows]


def test_waiting_for_the_others_to_agree_is_no_computing() -> None:
    measured = run_ranks(_times, 2)[0][1:]
    assert len(measured) > 1
    assert min(slow for _, slow in measured) > 0.1
    assert min(fast for fast, _ in measured) < 0.09  # waiting that counted would be in every window
