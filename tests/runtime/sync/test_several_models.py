"""A generator and a discriminator under one controller: every applied gradient is that of the union batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.refused import refused
from tests.runtime.jobs import adaptive
from tests.union import Script, larger

pytestmark = pytest.mark.multiproc
SAMPLES = 120


def _judged(logits: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def _gan(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 3).double(), torch.randn(SAMPLES, 2).double())  # points, noise
    nets = {"generator": nn.Linear(2, 3).double(), "critic": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()}
    wholes = copy.deepcopy(nets)
    controller = adaptive(Script([[2, 9], [9, 3]]), 4, max_batch_size=16, lr_rule="linear", guard=False)
    sampler = controller.batch_sampler(data)
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.05) for name, net in nets.items()}
    models = {name: controller.wrap(DDP(net), optimizers[name]) for name, net in nets.items()}
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))
    worst, sizes, rates = 0.0, set(), {name: list[float]() for name in nets}
    for name, optimizer in optimizers.items():
        optimizer.register_step_pre_hook(lambda one, *_, of=rates[name]: of.append(one.param_groups[0]["lr"]))

    def compare(name: str, loss: Tensor) -> None:
        nonlocal worst
        want = torch.autograd.grad(loss, list(wholes[name].parameters()))
        for got, true in zip(nets[name].parameters(), want, strict=True):
            assert got.grad is not None
            worst = larger(worst, float((got.grad - true).norm() / true.norm()))

    for points, noise in DataLoader(data, batch_sampler=sampler):
        plan = sampler.plan()
        sizes.add(tuple(plan.counts.tolist()))
        union = order[plan.start : plan.start + int(plan.counts.sum())]
        all_points, all_noise = (tensor[union] for tensor in data.tensors)
        for name, net in nets.items():
            wholes[name].load_state_dict(net.state_dict())
        fake = models["generator"](noise)
        for _ in range(2):  # the critic twice on each batch
            optimizers["critic"].zero_grad()
            loss = _judged(models["critic"](points), 1.0) + _judged(nets["critic"](fake.detach()), 0.0)
            loss.backward()
            wholes["critic"].load_state_dict(nets["critic"].state_dict())
            all_fake = wholes["generator"](all_noise).detach()
            compare("critic", _judged(wholes["critic"](all_points), 1.0) + _judged(wholes["critic"](all_fake), 0.0))
            optimizers["critic"].step()
        wholes["critic"].load_state_dict(nets["critic"].state_dict())
        optimizers["generator"].zero_grad()
        with models["critic"].no_sync():
            _judged(models["critic"](fake), 1.0).backward()
        compare("generator", _judged(wholes["critic"](wholes["generator"](all_noise)), 1.0))
        optimizers["generator"].step()
        controller.step()
    noise_scale = controller.metrics()["noise_scale"]
    controller.close()
    same = [p.detach().clone() for net in nets.values() for p in net.parameters()]
    return {"worst": worst, "sizes": sizes, "rates": rates, "weights": same, "noise": noise_scale}


def test_every_models_gradient_is_that_of_the_union_batch() -> None:
    results = run_ranks(_gan, 2)
    for result in results:
        assert result["worst"] < 1e-12
        assert len(result["sizes"]) > 2, "the batch sizes never changed"
        assert len(set(result["rates"]["generator"])) > 1, "the learning rates never followed"
        assert result["rates"]["critic"][::2] == result["rates"]["generator"]
        for ours, theirs in zip(result["weights"], results[0]["weights"], strict=True):
            assert torch.equal(ours, theirs)
    assert results[0]["noise"] > 0


def test_what_several_models_cannot_have_is_refused() -> None:
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
    controller = dynamix.Controller("static", 8, global_batch="adaptive")
    controller.wrap(nets[0], first)
    refused(UsageError, "already called with this optimizer", controller.wrap, nets[0], first)
    refused(UsageError, "use weighting='hook' for several", controller.wrap, nets[1], second, weighting="loss")
    controller.wrap(nets[1], second)


class Counting:
    """The state of a communication hook."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def _counting(state: Counting, bucket: Any) -> Any:
    state.calls += 1
    return allreduce_hook(dist.group.WORLD, bucket)


def _hook_states(rank: int) -> list[list[int]]:
    """Calls of both hooks when saved, after a load before `wrap`, and after one behind it."""
    data = TensorDataset(torch.randn(SAMPLES, 3))
    saved: dict[str, Any] = {}
    told = []
    for when in ("saves", "before", "after"):
        nets, states = [nn.Linear(3, 1), nn.Linear(3, 1)], [Counting(), Counting()]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        controller = dynamix.Controller("static", 4, global_batch="adaptive")
        sampler = controller.batch_sampler(data)
        if when == "before":
            controller.load_state_dict(saved)
        models = [
            controller.wrap(DDP(net), optimizer, hook=_counting, hook_state=state)
            for net, optimizer, state in zip(nets, optimizers, states, strict=True)
        ]
        if when == "after":
            controller.load_state_dict(saved)
        if when == "saves":
            for i, (x,) in enumerate(DataLoader(data, batch_sampler=sampler)):
                models[0](x).sum().backward()
                if i % 2:
                    models[1](x).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                controller.step()
            saved = controller.state_dict()
        told.append([state.calls for state in states])
        controller.close()
    return told


def test_the_hook_states_of_all_models_are_in_the_checkpoint() -> None:
    for saved, before, after in run_ranks(_hook_states, 2):
        assert saved[0] > saved[1] > 0
        assert before == after == saved


def _short_of_memory(rank: int) -> tuple[list[int], float]:
    """Rank 1 has memory for 3 samples. Limits found, the critic's buffer."""
    torch.manual_seed(0)
    noise = torch.randn(SAMPLES, 2).double()
    generator, judge = nn.Linear(2, 3).double(), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    critic = judge.double().eval()
    critic.register_buffer("calls", torch.zeros(()))
    critic.register_forward_hook(lambda *_: critic.get_buffer("calls").add_(1) and None)
    controller = dynamix.Controller("static", 6, max_batch_size=16, global_batch="adaptive")
    models = [controller.wrap(DDP(net), torch.optim.SGD(net.parameters(), lr=0.01)) for net in (generator, critic)]

    def step_fn(part: list[Tensor]) -> None:
        judged = models[1](models[0](part[0]))
        if rank == 1 and len(part[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        judged.square().mean().backward()

    caps = controller.find_limits(step_fn, [noise[:2]])
    calls = float(critic.get_buffer("calls"))
    controller.close()
    return caps, calls


def test_memory_that_runs_out_behind_another_model_keeps_no_rank_waiting() -> None:
    for caps, calls in run_ranks(_short_of_memory, 2, timeout_s=90, group_timeout_s=20):
        assert caps[0] == 16
        assert caps[1] in (2, 3)
        assert calls == 0.0, "the search left a trace"
