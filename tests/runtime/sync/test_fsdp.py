"""FSDP2: weights enter in the reduce-scatter, and the loop stays as it is."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import UsageError, WorkerLostError
from dynamix.runtime.ranks import watch
from tests.ranks import Ok, refusal, run_cases, run_ranks
from tests.runtime.check import test_loop_passes
from tests.runtime.check.loops import Job, run_loops
from tests.runtime.jobs import Training, adaptive, classes, ends_apart
from tests.runtime.sync import test_pieces_loops
from tests.runtime.sync.sharded_jobs import FOUR, ShardedCase, full, sharded_error
from tests.union import Script, larger

pytestmark = pytest.mark.multiproc
BF16 = torch.bfloat16


TWO_RANKS = {
    "as it is": ShardedCase(clip=True),
    "resharded": ShardedCase(reshard=True, dtype=torch.float64),
    "not resharded": ShardedCase(reshard=False, force_sum=True),
    "accumulated": ShardedCase(accumulate=2, param_dtype=BF16, reduce_dtype=torch.float32),
    "accumulated by hand": ShardedCase(accumulate=2, sync="own", clip=True),
    "accumulated, all reduced": ShardedCase(accumulate=2, sync="none"),
    "pieces, resharded": ShardedCase(micro_batch=4, reshard=True, clip=True),
    "pieces, not resharded": ShardedCase(micro_batch=4, reshard=False, param_dtype=BF16, reduce_dtype=torch.float32),
    "loss side": ShardedCase(weighting="loss", micro_batch=4),
    "counts": ShardedCase(weighting="loss", counts=True),
    "bf16 reduced": ShardedCase(reduce_dtype=BF16, bound=1e-2),
}
FOUR_RANKS = {
    "replicas": ShardedCase(FOUR, mesh=(2, 2), clip=True),
    "replicas, accumulated": ShardedCase(FOUR, mesh=(2, 2), dtype=torch.float64, accumulate=2),
    "replicas, pieces": ShardedCase(FOUR, mesh=(2, 2), micro_batch=3, reshard=True),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("workers", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_every_gradient_is_that_of_the_union_batch(workers: int, cases: dict[str, ShardedCase]) -> None:
    for name, errors in zip(cases, run_cases(sharded_error, workers, cases.values(), timeout_s=150), strict=True):
        assert max(errors) <= cases[name].bound, name


def _net(mesh: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (2,)) if mesh is None else mesh
    for part in (net[0], net):
        fully_shard(part, mesh=mesh, **options)
    return net


class _Own:
    """A user's own reduce-scatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


def _wrapped(controller: Any, net: Any = None, **options: Any) -> Any:
    net = _net() if net is None else net
    controller.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1), **options)
    return net


def _own(controller: Any) -> None:
    net = _net()
    net.set_custom_reduce_scatter(_Own())
    _wrapped(controller, net)


def _replaced(controller: Any) -> None:
    net = _wrapped(controller)
    net[0].set_custom_reduce_scatter(_Own())
    _train(controller, net)


def _other_divisor(controller: Any) -> None:
    net = _wrapped(controller)
    net.set_gradient_divide_factor(1.0)
    _train(controller, net)


def _ignored(controller: Any) -> None:
    net: Any = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)), ignored_params={net[0].weight})
    _wrapped(controller, net)


def _other_ranks(controller: Any) -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    _wrapped(controller, _net(DeviceMesh.from_group(groups[dist.get_rank()], "cpu")), weighting="loss")


def _not_scattered(controller: Any) -> None:
    _wrapped(controller, _net(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))))


def _another_model(controller: Any) -> None:
    net, other = _net(), _net()
    controller.wrap(net, torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1))


def _fsdp1(controller: Any) -> None:
    net = nn.Linear(6, 3)
    net.__class__ = type("FullyShardedDataParallel", (nn.Linear,), {"__module__": "torch.distributed.fsdp"})
    _wrapped(controller, net)


def _closed(controller: Any) -> None:
    net = _wrapped(controller)
    controller.close()
    net(torch.ones(2, 6)).sum().backward()


def _given_back(controller: Any) -> None:
    job = Training(controller, DATA, _net())
    for (x,) in job.loader:
        with controller.piece():
            job.net(x).sum().backward()
        if not controller.optimizer_due and dist.get_rank() == 1:
            job.net.reshard()
        job.finish()


def _train(controller: Any, net: nn.Module) -> None:
    for (x,) in DataLoader(DATA, batch_sampler=controller.batch_sampler(DATA)):
        net(x).sum().backward()


DATA = TensorDataset(torch.ones(64, 6))
# what is tried -> how, options of the controller, what it is told
REFUSED: dict[str, tuple[Callable[[Any], object], dict[str, Any], str]] = {
    "a reduce-scatter of one's own": (_own, {}, "weighting='loss'"),
    "one that comes later": (_replaced, {}, "set_custom_reduce_scatter\\(\\) was called after"),
    "another divisor": (_other_divisor, {}, "leave it out"),
    "ignored parameters": (_ignored, {}, "does not shard 0.weight"),
    "other ranks": (_other_ranks, {}, "process_group=mesh.get_group"),
    "nothing scattered": (_not_scattered, {}, "shards over one rank.*weighting='loss'"),
    "in part": (lambda c: _wrapped(c, nn.Sequential(_net(), nn.Linear(3, 3))), {}, "on the whole model"),
    "another model": (_another_model, {}, "once for each model"),
    "a hook": (lambda c: _wrapped(c, hook=lambda state, bucket: None), {}, "hook="),
    "FSDP1": (_fsdp1, {}, r"removed in 0\.3: write fully_shard\(net\)"),
    "closed": (_closed, {}, "wrap the model with a new one"),
    "apart": (_wrapped, {"meet": "parameters"}, "no worker has a model of its own"),
    "given back": (_given_back, {"micro_batch": 2}, "where controller.optimizer_due"),
}


def _refused(rank: int) -> list[str]:
    told = []
    for tried, options, _ in REFUSED.values():
        controller = dynamix.Controller("static", 6, process_group=dist.new_group(), **options)
        told.append(refusal(UsageError, tried, controller))
        controller.close()
    return told


def test_what_would_be_weighted_wrongly_is_refused_on_every_rank() -> None:
    for told in run_ranks(_refused, 2, timeout_s=100):
        for (name, (_, _, words)), message in zip(REFUSED.items(), told, strict=True):
            assert re.search(words, message), (name, message)


def _a_second_model_with_its_own_optimizer(job: Job) -> None:
    job.wrap()
    second = _net(DeviceMesh.from_group(job.group, "cpu"))
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    for x, y in job.loader:
        job.loss(x, y).backward()
        second(x).sum().backward()
        job.update()
        other.step()
        other.zero_grad()
        job.step()


def _loops() -> list[tuple[Callable[[Any], None], str]]:
    """Wrong loops for DDP, and what they are told; passes beside its module cannot be under FSDP2.

    Nor are gradients there that could be set without a backward pass through it. A batch that one rank passes over is
    named otherwise: each of several passes crosses.
    """
    other = (
        "past_the_ddp_module",
        "_by_hand",
        "_two_losses_of_one_forward",
        "_a_pass_that_records_gradients",
        "_passed_over",
    )
    chosen = [*test_loop_passes.LOOPS.of_wrong, *test_pieces_loops.LOOPS.of_wrong]
    kept = [(loop, says) for loop, says in chosen if not any(word in loop.__name__ for word in other)]
    passed_over = test_loop_passes._passed_over_on_one_rank_and_not_the_last_of_a_step, "on all ranks or on none"
    return [*kept, passed_over, (_a_second_model_with_its_own_optimizer, "once for each model")]


def test_wrong_loops_end_on_every_rank_as_under_ddp() -> None:
    loops = _loops()
    for told in run_ranks(run_loops, 2, [loop for loop, _ in loops], True, timeout_s=150, group_timeout_s=40):
        for (loop, says), said in zip(loops, told, strict=True):
            assert said.startswith("UsageError"), (loop.__name__, said)
            assert says in said, (loop.__name__, said)


def _evaluates_late(rank: int) -> list[float]:
    watch.GONE_S = 0.5
    told = []
    for all_close in (True, False):
        controller = dynamix.Controller("static", 6, process_group=dist.new_group())
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        controller.wrap(net, optimizer)
        for (x,) in DataLoader(DATA, batch_sampler=controller.batch_sampler(DATA)):
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step()
        if all_close or rank == 1:
            controller.close()
        if rank == 1:
            time.sleep(4)  # such as for its part of a test set, or a checkpoint
        with torch.no_grad():
            told.append(float(net(torch.ones(2, 6)).sum()))
        controller.close()
    return told


def test_a_rank_that_closed_its_controller_may_come_late_to_an_evaluation() -> None:
    first, second = run_ranks(_evaluates_late, 2)
    assert first == second


def test_right_loops_are_silent() -> None:
    test_pieces_loops.LOOPS.check_right(sharded=True)


def _resumed(rank: int) -> float:
    def made() -> Training:
        net, controller = _net(), adaptive(Script([[9, 3], [2, 10], [7, 5]]), 6, process_group=dist.new_group())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return Training(controller, classes(90), net, optimizer=optimizer)

    return ends_apart(made, lambda meetings, piece: meetings == 4)


def test_a_job_resumes_within_an_epoch_to_the_last_bit() -> None:
    assert run_ranks(_resumed, 2) == [0.0, 0.0]


def _worst(net: nn.Module, reference: nn.Module) -> float:
    """The largest relative error of any whole gradient."""
    worst = 0.0
    for p, q in zip(reference.parameters(), net.parameters(), strict=True):
        assert p.grad is not None
        worst = larger(worst, float((full(q.grad) - p.grad).norm() / p.grad.norm()))
    return worst


def _alone(under_piece: bool) -> float:
    """Nothing is scattered over one rank: what was kept back of unequal pieces is weighted, under `piece()` or not."""
    net = _net(init_device_mesh("cpu", (1,)))
    reference = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    data = TensorDataset(torch.arange(50), torch.randn(50, 6))
    job = Training(dynamix.Controller("static", 13, micro_batch=4), data, net)
    worst, mine = 0.0, list[int]()
    for index, x in job.loader:
        with job.controller.piece() if under_piece else contextlib.nullcontext():
            net(x).square().mean().backward()
        mine += index.tolist()
        if job.controller.optimizer_due:
            reference.load_state_dict({name: full(value) for name, value in net.state_dict().items()})
            reference.zero_grad()
            reference(data.tensors[1][mine]).square().mean().backward()
            worst, mine = larger(worst, _worst(net, reference)), []
        job.finish()
    job.controller.close()
    return worst


def test_pieces_of_one_worker_make_the_gradient_of_its_batch() -> None:
    assert max(map(max, run_cases(_alone, 1, [False, True]))) < 2e-5


def _lost(rank: int) -> str:
    job = Training(dynamix.Controller("static", 4), DATA, _net())
    try:
        for i, (x,) in enumerate(job.loader):
            if rank == 1 and i == 2:
                os._exit(1)
            job.net(x).sum().backward()
            job.finish()
    except WorkerLostError as error:
        return str(error)
    return "not noticed"


def test_a_lost_rank_is_named() -> None:
    left = run_ranks(_lost, 2, expect_failure=True)[0]
    assert isinstance(left, Ok), left
    assert "rank 1" in left.value or "[1]" in left.value, left.value


def _tensor_parallel(micro_batch: int | None) -> tuple[float, str]:
    """The worst error of any gradient at 2 x 2 ranks with held shares; and what is said where shares may move."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3))
    group = mesh["dp"].get_group()

    def made() -> Any:
        net = copy.deepcopy(reference)
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(net, mesh=mesh["dp"])

    net, controller = made(), dynamix.Controller("static", 6, process_group=group)
    told = refusal(UsageError, controller.wrap, net, torch.optim.SGD(net.parameters(), lr=0.1))
    held = {"min_batch_size": [9, 2], "max_batch_size": [9, 2], "micro_batch": micro_batch}
    controller = dynamix.Controller("static", 6, process_group=group, **held)
    data = TensorDataset(torch.arange(96), torch.randn(96, 6), torch.randn(96, 3))
    job = Training(controller, data, made())
    worst, mine = 0.0, list[int]()
    for index, x, y in job.loader:
        with controller.piece():
            F.mse_loss(job.net(x), y).backward()
        mine += index.tolist()
        if controller.optimizer_due:
            every: list[Any] = [None, None]
            dist.all_gather_object(every, mine, group=group)
            union = torch.tensor([i for part in every for i in part])
            with torch.no_grad():
                for p, q in zip(reference.parameters(), job.net.parameters(), strict=True):
                    p.copy_(full(q))
            reference.zero_grad()
            F.mse_loss(reference(data.tensors[1][union]), data.tensors[2][union]).backward()
            worst, mine = larger(worst, _worst(job.net, reference)), []
        job.finish()
    controller.close()
    return worst, told


def test_workers_of_several_ranks_hold_their_shares() -> None:
    for ranks in run_cases(_tensor_parallel, 4, [None, 4]):
        for worst, told in ranks:
            assert worst < 2e-5
            assert "min_batch_size=sizes, max_batch_size=sizes" in told
