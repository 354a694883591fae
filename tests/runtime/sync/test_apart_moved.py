"""Meeting over parameters: what a loop or an optimizer moves by itself travels too, a momentum teacher for one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import dynamix
from dynamix.runtime.sync.parameter_averaging import Averaging
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, apart, in_turns, wait_for_decisions
from tests.runtime.sync.test_apart import PIECE, SAMPLES, SHARES, data
from tests.runtime.sync.test_apart_loops import nesterov
from tests.union import Script

pytestmark = pytest.mark.multiproc


class Taught(nn.Module):
    """A student, and a teacher that follows it and that is part of the answer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.student, self.teacher = nn.Linear(6, 3).double(), nn.Linear(6, 3).double().requires_grad_(False)
        self.backbone = nn.Linear(6, 6).double().requires_grad_(False)  # which nobody moves

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.backbone(x))
        told: Tensor = self.student(h) + self.teacher(h)
        return told


def _pairs(model: Taught) -> list[tuple[Tensor, Tensor]]:
    return list(zip(model.teacher.parameters(), model.student.parameters(), strict=True))


@torch.no_grad()
def in_place(model: Taught) -> None:
    for teacher, student in _pairs(model):
        teacher.mul_(0.7).add_(student, alpha=0.3)


def by_data(model: Taught) -> None:
    """As MoCo has it: the memory is another one each time."""
    for teacher, student in _pairs(model):
        teacher.data = teacher.data * 0.7 + student.data * 0.3


def inside_data(model: Taught) -> None:
    """As DINO has it: autograd counts no change."""
    for teacher, student in _pairs(model):
        teacher.data.mul_(0.7).add_(student.data, alpha=0.3)


def replaced(model: Taught) -> None:
    for name, student in model.student.named_parameters():
        moved = 0.7 * getattr(model.teacher, name).data + 0.3 * student.data
        setattr(model.teacher, name, nn.Parameter(moved, requires_grad=False))


@torch.no_grad()
def only_the_bias(model: Taught) -> None:
    model.teacher.bias.lerp_(model.student.bias, 0.3)


class ScheduleFree(Optimizer):
    """SGD whose average takes the place of a schedule (arXiv 2405.15682): its weights are in the group."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9, warmup: int = 4) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["lr"] * min(1.0, (group["k"] + 1) / group["warmup"])
            group["lr_max"] = max(group["lr_max"], rate)
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            part, beta = weight / group["weight_sum"], group["beta"]
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, part).add_(p.grad, alpha=rate * (beta * (1 - part) - 1))
                z.sub_(p.grad, alpha=rate)
            group["k"] += 1


class Prodigy(Optimizer):
    """Learns how far it has to go (arXiv 2306.06101, without moments); what it knows of that is in the group."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "d0": d0})
        for group in self.param_groups:
            group |= {"d": d0, "numerator": 0.0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            d, denominator = float(group["d"]), 0.0
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                first, s = state.setdefault("p0", p.detach().clone()), state.setdefault("s", torch.zeros_like(p))
                group["numerator"] = group["numerator"] + d * group["lr"] * float((p.grad * (first - p)).sum())
                s.add_(p.grad, alpha=d * group["lr"])
                denominator += float(s.abs().sum())
                p.sub_(p.grad, alpha=d * group["lr"])
            if denominator:
                found = max(d, 2 * float(group["numerator"]) / denominator)
                group["d"] = torch.full_like(group["d"], found) if isinstance(group["d"], Tensor) else found


class InTensors(Prodigy):
    """The same, in tensors, one of them with a place for every step; beside what a scheduler puts into a group."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            zero = torch.zeros((), dtype=torch.float64)
            group |= {"d": zero + group["d0"], "numerator": zero, "past": torch.zeros(3, dtype=torch.float64)}
            group |= {"initial_lr": 0.1, "name": "all", "fused": None}

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["past"] = torch.cat([group["past"][1:], group["d"].reshape(1)])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "schedule-free": ScheduleFree,
    "prodigy": Prodigy,
    "tensors": InTensors,
}
MEMORY = ("k", "weight_sum", "lr_max", "d", "numerator", "past")


class Replay:
    """The same training in one process, in plain words: W models, each stepped on its pieces, then averaged."""

    def __init__(self, workers: int, optimizer: str, follow: Callable[[Taught], None] | None, state: str) -> None:
        self.models, self.follow, self.state = [Taught() for _ in range(workers)], follow, state
        self.optimizers = [OPTIMIZERS[optimizer]([*m.student.parameters()]) for m in self.models]

    def round(self, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
        counts = [sum(len(x) for x, _ in pieces) for pieces in batches]
        for model, optimizer, pieces in zip(self.models, self.optimizers, batches, strict=True):
            for x, y in pieces:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if self.follow is not None:
                    self.follow(model)
        weights = [count / sum(counts) for count in counts]
        for same in zip(*(m.parameters() for m in self.models), strict=True):
            self._average([p.data for p in same], weights)
        if self.state == "reset":
            for optimizer in self.optimizers:
                optimizer.state.clear()
        if self.state == "kept":
            return
        for name in {name for o in self.optimizers for s in o.state.values() for name in s}:
            for ps in zip(*(m.student.parameters() for m in self.models), strict=True):
                states = [o.state[p] for o, p in zip(self.optimizers, ps, strict=True)]
                known = [(w, s[name]) for w, s in zip(weights, states, strict=True) if name in s]
                mean = sum(w * v for w, v in known if w) / sum(w for w, _ in known)
                for state in states:
                    state[name] = mean.clone()
        groups = [o.param_groups[0] for o in self.optimizers]
        for name in set(groups[0]) & set(MEMORY):
            mean = sum(w * group[name] for w, group in zip(weights, groups, strict=True))
            for group in groups:
                group[name] = round(mean) if isinstance(group[name], int) else mean

    @staticmethod
    def _average(tensors: list[Tensor], weights: list[float]) -> None:
        mean = sum((w * t for w, t in zip(weights, tensors, strict=True)), torch.zeros_like(tensors[0]))
        for tensor in tensors:
            tensor.copy_(mean)


def _remembered(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(group[name]) for name in MEMORY if name in group}


def _train(rank: int, workers: int, case: dict[str, Any]) -> dict[str, Any]:
    """A job as a user writes it; what was trained in every round, and what model and optimizer were after it."""
    model, follow, shares = Taught(), case.get("follow"), SHARES[workers]
    controller = apart(Script(shares), sum(shares[0]) // workers, micro_batch=PIECE, lr_rule="none")
    optimizer = OPTIMIZERS[case.get("optimizer", "sgd")]([*model.student.parameters()])
    given = {"optimizer": optimizer, "sampling": {"seed": 1}, "averaging": Averaging(**case.get("how", {}))}
    job = Training(controller, TensorDataset(torch.arange(SAMPLES), *data()), model, **given)
    rounds: list[list[list[int]]] = [[]]
    found: dict[str, list[Any]] = {"weights": [], "groups": [], "saved": []}
    for index, inputs, target in job.loader:
        mine = job.sampler.piece().samples
        with controller.piece():
            job.backward(inputs, target)
        job.update()
        if follow is not None and mine:
            follow(model)
        controller.step()
        if mine:
            rounds[-1].append(index.tolist())
        if controller.met:
            rounds.append([])
            found["weights"].append([t.detach().clone() for t in model.parameters()])
            found["groups"].append(_remembered(optimizer.param_groups[0]))
            if "saved" in case and len(rounds) > case["saved"]:
                found["saved"].append(controller.optimizer_state(optimizer)["param_groups"][0])
                assert _remembered(optimizer.param_groups[0]) == found["groups"][-1]  # it stays as it was
                break
    controller.close()
    return found | {"rounds": rounds[:-1]}


CASES: dict[str, dict[str, Any]] = {
    "in place": {"follow": in_place},
    "by data": {"follow": by_data},
    "inside data": {"follow": inside_data},
    "replaced": {"follow": replaced},
    "only the bias": {"follow": only_the_bias},
    "schedule-free": {"optimizer": "schedule-free"},
    "schedule-free and a teacher": {"optimizer": "schedule-free", "follow": in_place},
    "schedule-free, reset": {"optimizer": "schedule-free", "how": {"optimizer_state": "reset"}},
    "prodigy": {"optimizer": "prodigy"},
    "tensors": {"optimizer": "tensors"},
}


@pytest.mark.parametrize(
    ("workers", "name"), [*((2, name) for name in CASES), (3, "in place"), (3, "prodigy"), (3, "schedule-free")]
)
def test_a_round_ends_in_the_mean_of_all_that_moved(workers: int, name: str) -> None:
    case, (x, y) = CASES[name], data()
    ran = run_ranks(_train, workers, workers, case)
    state = case.get("how", {}).get("optimizer_state", "averaged")
    replay = Replay(workers, case.get("optimizer", "sgd"), case.get("follow"), state)
    backbone = [p.clone() for p in replay.models[0].backbone.parameters()]
    assert len(ran[0]["rounds"]) > 5
    for number in range(len(ran[0]["rounds"])):
        replay.round([[(x[i], y[i]) for i in of_rank["rounds"][number]] for of_rank in ran])
        for of_rank in ran:
            for own, first in zip(of_rank["weights"][number], ran[0]["weights"][number], strict=True):
                assert torch.equal(own, first)
            for own, wanted in zip(of_rank["weights"][number], replay.models[0].parameters(), strict=True):
                torch.testing.assert_close(own, wanted.detach(), rtol=0, atol=1e-11)
            assert all(torch.equal(p, q) for p, q in zip(of_rank["weights"][number][-2:], backbone, strict=True))
            group = replay.optimizers[0].param_groups[0]
            for key, value in of_rank["groups"][number].items():
                torch.testing.assert_close(value, group[key], rtol=1e-9, atol=1e-12, check_dtype=False)


def test_the_state_to_save_has_the_mean_of_what_groups_remember() -> None:
    one, other = run_ranks(_train, 2, 2, {"optimizer": "schedule-free", "how": {"optimizer_state": "kept"}, "saved": 4})
    counts = [sum(map(len, of_rank["rounds"][-1])) for of_rank in (one, other)]
    for name, value in one["saved"][0].items():
        assert other["saved"][0][name] == value
        if name in ("weight_sum", "lr_max"):
            own = [of_rank["groups"][-1][name] for of_rank in (one, other)]
            assert value == pytest.approx(sum(n * v for n, v in zip(counts, own, strict=True)) / sum(counts))
    assert one["groups"][-1]["k"] != other["groups"][-1]["k"]


def _with_others(rank: int, kind: str) -> list[Tensor]:
    """A teacher, and an outer optimizer, fewer bytes, or a layer that is thawed within a round."""
    model, steps = Taught(), nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
    model.register_parameter("steps", steps)
    how = {"outer": {"outer": nesterov}, "bfloat16": {"wire": "bfloat16"}}.get(kind, {})
    controller = apart(Script(SHARES[2]), 18, micro_batch=PIECE)
    added = nn.Parameter(torch.ones(3, dtype=torch.float64))
    job = Training(controller, TensorDataset(*data()), model, lr=0.05, averaging=Averaging(**how))
    for number, (x, y) in enumerate(job.loader):
        if kind == "thawed" and number >= 3 and not controller.met:
            model.backbone.requires_grad_(True)
        if kind == "added" and controller.met and number > 3 and len(job.optimizer.param_groups) == 1:
            job.optimizer.add_param_group({"params": [added]})
        with controller.piece():
            F.cross_entropy(job.model(x) * added, y).backward()
        job.update()
        inside_data(model)
        steps += job.sampler.piece().samples > 0
        controller.step()
    controller.close()
    assert not torch.equal(model.teacher.weight, Taught().teacher.weight)
    assert steps > 5
    return [t.detach() for t in (*model.parameters(), added)]


@pytest.mark.parametrize("kind", ["outer", "bfloat16", "thawed", "added"])
def test_all_end_with_the_same(kind: str) -> None:
    one, other = run_ranks(_with_others, 2, kind)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
    moved = not torch.equal(one[-1], torch.ones(3, dtype=torch.float64))
    assert moved == (kind == "added")


def _either(rank: int, optimizer: str) -> int:
    """Rounds over gradients and rounds apart: after each, the teacher is the mean by samples of what workers had."""
    model = Taught()
    made = OPTIMIZERS[optimizer]([*model.student.parameters()])
    wait_for_decisions()
    in_turns()
    controller = dynamix.Controller(Script([[10, 6], [5, 11]]), 8, interval=4, meet="auto", lr_rule="none")
    job, ways = Training(controller, TensorDataset(*data()), model, optimizer=made, sampling={"seed": 1}), set()
    for x, y in job.loader:
        plan = job.sampler.plan()
        with controller.piece():
            job.backward(x, y)
        job.update()
        in_place(model)
        own = model.teacher.weight.detach() * int(plan.counts[rank]) / plan.samples
        controller.step()
        if controller.met:
            ways.add(plan.round.apart)
            dist.all_reduce(own)
            torch.testing.assert_close(model.teacher.weight.detach(), own, rtol=0, atol=1e-13)
            numbers = [torch.tensor(0.0)] * 2
            dist.all_gather(numbers, torch.tensor(float(made.param_groups[0].get("weight_sum", 0.0))))
            assert numbers[0] == numbers[1]
    controller.close()
    return len(ways)


@pytest.mark.parametrize("optimizer", ["sgd", "schedule-free"])
def test_where_workers_meet_in_both_ways(optimizer: str) -> None:
    assert run_ranks(_either, 2, optimizer) == [2, 2]
