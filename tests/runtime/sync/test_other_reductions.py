"""What else reduces or applies gradients: refused by name if the gradient would be wrong, and allowed otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, optimizer_overlap_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from tests.ranks import run_cases, run_ranks
from tests.runtime.check.loops import Job, Loops
from tests.runtime.sync.apart_jobs import job
from tests.union import Deep, Script, larger

LOOPS = Loops()
wrong = LOOPS.wrong
pytestmark = pytest.mark.multiproc


def _steps_in_backward(net: nn.Module) -> None:
    from torch.distributed import optim

    optim._apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})


def _in_hooks(net: nn.Module) -> dict[Tensor, torch.optim.Optimizer]:
    """An optimizer for each parameter, which steps as soon as the gradient is there."""
    each: dict[Tensor, torch.optim.Optimizer] = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

    def hook(parameter: Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return each


def _only_backward(job: Job) -> None:
    for x, y in job.loader:
        job.loss(x, y).backward()
        job.step()


@wrong("_apply_optimizer_in_backward() makes DDP reduce and step")
def _optimizers_in_backward(job: Job) -> None:
    _steps_in_backward(job.net)
    job.ddp = DDP(job.net, process_group=job.group)
    job.wrap()


@wrong("_apply_optimizer_in_backward() makes DDP reduce and step")
def _optimizers_in_backward_after_wrap(job: Job) -> None:
    job.wrap()
    _steps_in_backward(job.net)
    _only_backward(job)


@wrong("DDP(mixed_precision=...) reduces gradients in a communication hook of its own")
def _mixed_precision_of_ddp(job: Job) -> None:
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    job.ddp = DDP(job.net, process_group=job.group, mixed_precision=half)
    job.wrap()


@wrong('optimize_ddp = "python_reducer" reduces each gradient')
def _the_reducer_of_compiled_autograd(job: Job) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        job.ddp = DDP(job.net, process_group=job.group)
    job.wrap()


@wrong("DDP(delay_all_reduce_named_params=...) reduces these parameters' gradients past the communication hook")
def _gradients_reduced_late(job: Job) -> None:
    (_, first), *others = job.net.named_parameters()
    late: dict[str, Any] = {"delay_all_reduce_named_params": others[1:], "param_to_hook_all_reduce": first}
    job.ddp = DDP(job.net, process_group=job.group, **late)
    job.wrap()


@wrong("_hook_then_optimizer steps the optimizer inside the communication hook")
def _a_hook_of_torch_that_steps(job: Job) -> None:
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, _in_place())
    job.controller.wrap(job.ddp, job.optimizer, hook=hook)


@wrong("optimizer.step() is called inside of backward()")
def _a_step_in_hooks_of_parameters(job: Job) -> None:
    _in_hooks(job.net)
    job.wrap()
    _only_backward(job)


@wrong("optimizer.step() is called inside of backward()")
def _a_step_in_hooks_of_parameters_of_connected_optimizers(job: Job) -> None:
    for optimizer in _in_hooks(job.net).values():
        job.controller.wrap(job.ddp, optimizer)
    _only_backward(job)


@wrong("optimizer.step() is called inside of backward()")
def _a_step_in_hooks_of_modules(job: Job) -> None:
    job.wrap()
    for layer in (job.net[0], job.net[2]):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def hook(*_: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        layer.register_full_backward_hook(hook)
    _only_backward(job)


@pytest.mark.filterwarnings("ignore::Warning")
def test_what_would_train_on_a_wrong_gradient_is_refused_by_name_on_every_rank() -> None:
    LOOPS.check_wrong(2)


# ------------------------------------------------------------ what is exact stays allowed


def _in_place() -> Any:
    """What a communication hook of torch applies gradients with."""

    class InPlace:
        def step_param(self, parameter: Tensor, gradient: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(gradient, alpha=0.1)

    return optimizer_overlap_hooks._OptimizerHookState(InPlace())


Update = Callable[[], None]


def _a_hook_of_ones_own_that_steps(net: nn.Module, controller: dynamix.Controller) -> tuple[nn.Module, Update]:
    each = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

    def hook(state: Any, bucket: Any) -> Any:
        def then(reduced: Any) -> Tensor:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                parameter.grad = gradient
                each[parameter].step()
            value: Tensor = reduced.value()[0]
            return value

        summed = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        assert summed is not None
        return summed.get_future().then(then)

    hook.__dict__.update(lossless=True, ordered=True)  # it is never left out
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return controller.wrap(DDP(net), optimizer, hook=hook), lambda: None


def _steps_in_hooks_under_fsdp(net: nn.Module, controller: dynamix.Controller) -> tuple[nn.Module, Update]:
    from torch.distributed.fsdp import fully_shard

    for part in (*net.layers[:1], net):  # type: ignore[index]
        fully_shard(part)
    for optimizer in _in_hooks(net).values():
        controller.wrap(net, optimizer)
    return net, lambda: None


ALLOWED = (_a_hook_of_ones_own_that_steps, _steps_in_hooks_under_fsdp)


def _trained(allowed: Callable[[nn.Module, dynamix.Controller], tuple[nn.Module, Update]]) -> float:
    """How far parameters come from those of a single process that trains on the union of all batches."""
    torch.manual_seed(1)
    dataset = TensorDataset(torch.randn(96, 6), torch.randn(96, 6))
    net = Deep(depth=3)
    whole, held = copy.deepcopy(net), [12, 4]
    applied = torch.optim.SGD(whole.parameters(), lr=0.1)
    controller = dynamix.Controller(Script([held]), 8, min_batch_size=held, max_batch_size=held)
    loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset, shuffle=False))
    model, update = allowed(net, controller)
    worst = 0.0
    for step, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        update()
        model.zero_grad()
        ux, uy = dataset[16 * step : 16 * (step + 1)]
        F.mse_loss(whole(ux), uy).backward()
        applied.step()
        applied.zero_grad()
        for mine, theirs in zip(net.parameters(), whole.parameters(), strict=True):
            apart = (mine.full_tensor() if hasattr(mine, "full_tensor") else mine).detach() - theirs.detach()
            worst = larger(worst, float(apart.norm() / theirs.detach().norm()))
        controller.step(loss=loss)
    controller.close()
    return worst


def test_what_has_the_gradient_of_the_union_is_allowed() -> None:
    for allowed, furthest in zip(ALLOWED, run_cases(_trained, 2, ALLOWED), strict=True):
        assert max(furthest) < 1e-5, allowed.__name__


def _apart(rank: int) -> list[Tensor]:
    """What parameters are after some rounds over parameters: with a step in the loop, and in hooks."""
    ends = []
    for in_hooks in (False, True):
        steps = job()
        each = _in_hooks(steps.net) if in_hooks else {}
        for x, y in steps.loader:
            with steps.controller.piece():
                steps.backward(x, y)
            if not each:
                steps.update()
            steps.controller.step()
        steps.controller.close()
        ends.append(steps.weights())
    return ends


def test_workers_that_step_apart_may_step_in_hooks() -> None:
    for in_the_loop, in_hooks in run_ranks(_apart, 2):
        torch.testing.assert_close(in_hooks, in_the_loop)
