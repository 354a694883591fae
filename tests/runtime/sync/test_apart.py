"""Meeting over parameters: every piece is a worker's own step, and a round ends in the mean by samples of what moved.

What an optimizer remembers moves too, and what a loop moves by itself: a momentum teacher for one.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import dynamix
from dynamix.runtime.sync.parameter_averaging import Averaging
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, apart, in_turns, wait_for_decisions
from tests.runtime.sync.apart_jobs import MEMORY, OPTIMIZERS, nesterov
from tests.union import Script

pytestmark = pytest.mark.multiproc
SHARES = {1: [[24], [24]], 2: [[32, 4], [9, 27]], 3: [[32, 4, 0], [8, 5, 23]]}
PIECE, SAMPLES = 4, 331
MINE = 151  # samples of the jobs below


class Taught(nn.Module):
    """A student, and a teacher that follows it and that is part of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3).double(), nn.Linear(6, 3).double().requires_grad_(False)
        self.backbone = nn.Linear(6, 6).double().requires_grad_(False)  # which nobody moves

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.backbone(x))
        told: Tensor = self.student(h) + self.teacher(h)
        return told


def net(kind: str = "plain") -> Any:
    torch.manual_seed(3)
    if kind == "taught":
        return Taught()
    layers: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)]
    if kind == "batchnorm":
        layers.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*layers).double()


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


def data(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


TAUGHT: dict[str, Any] = {"kind": "taught", "lr_rule": "none"}
CASES: dict[str, dict[str, Any]] = {
    "momentum": {},
    "nadam": {"optimizer": "nadam"},
    "adamw": {"optimizer": "adamw"},
    "kept": {"optimizer": "adamw", "how": {"optimizer_state": "kept"}},
    "reset": {"optimizer": "adamw", "how": {"optimizer_state": "reset"}},
    "batchnorm": {"kind": "batchnorm"},
    "ddp": {"ddp": True, "kind": "batchnorm"},
    "outer": {"how": {"outer": nesterov}, "optimizer": "adamw"},
    "loader workers": {"num_workers": 2},
    "in place": {**TAUGHT, "follow": in_place},
    "by data": {**TAUGHT, "follow": by_data},
    "inside data": {**TAUGHT, "follow": inside_data},
    "replaced": {**TAUGHT, "follow": replaced},
    "only the bias": {**TAUGHT, "follow": only_the_bias},
    "schedule-free": {**TAUGHT, "optimizer": "schedule-free", "follow": in_place},
    "schedule-free, reset": {**TAUGHT, "optimizer": "schedule-free", "how": {"optimizer_state": "reset"}},
    "tensors": {**TAUGHT, "optimizer": "tensors"},
}
ASKED = {1: ["momentum"], 2: [*CASES], 3: ["nadam", "batchnorm", "outer", "in place", "schedule-free", "tensors"]}


def _trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Replay:
    """The same training in one process, in plain words: W models, each stepped on its pieces, then averaged."""

    def __init__(self, workers: int, case: dict[str, Any]) -> None:
        self.case, self.how = case, Averaging(**case.get("how", {}))
        self.models = [net(case.get("kind", "plain")) for _ in range(workers)]
        make = OPTIMIZERS[case.get("optimizer", "momentum")]
        self.optimizers = [make(_trained_parameters(model)) for model in self.models]
        self.mean = [p.detach().clone() for p in self.models[0].parameters()]
        self.outer = None if self.how.outer is None else self.how.outer(self.mean)

    def round(self, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
        """One round: the pieces of every worker."""
        for model, optimizer, pieces in zip(self.models, self.optimizers, batches, strict=True):
            for x, y in pieces:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                scale = len(x) / PIECE  # a part of a piece is a smaller step
                self._step(optimizer, scale if isinstance(optimizer, torch.optim.SGD) else scale**0.5)
                self.case.get("follow", lambda model: None)(model)
        counts = np.array([sum(len(x) for x, _ in pieces) for pieces in batches], dtype=float)
        weights = (counts / counts.sum()).tolist()
        self._average(weights)
        if self.how.optimizer_state == "averaged":
            self._average_state(weights)
        if self.how.optimizer_state == "reset":
            for optimizer in self.optimizers:
                optimizer.state.clear()
        if self.how.optimizer_state != "kept":
            self._average_groups(weights)

    def _step(self, optimizer: Optimizer, factor: float) -> None:
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate if "lr_rule" in self.case else rate * factor
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate

    @torch.no_grad()
    def _average(self, weights: list[float]) -> None:
        moved = [[*model.parameters()] for model in self.models]
        for number, before in enumerate(self.mean):
            pairs = zip(weights, (own[number] for own in moved), strict=True)
            move = sum((w * (p - before) for w, p in pairs), torch.zeros_like(before))
            if self.outer is None:
                self.mean[number] = before + move
            before.grad = -move
        if self.outer is not None:
            self.outer.step()
        for own in moved:
            for parameter, mean in zip(own, self.mean, strict=True):
                parameter.copy_(mean)
        for buffers in zip(*(m.buffers() for m in self.models), strict=True):
            floating = buffers[0].is_floating_point()
            agreed = sum(w * b for w, b in zip(weights, buffers, strict=True)) if floating else max(buffers)
            for buffer in buffers:
                buffer.copy_(torch.as_tensor(agreed))

    def _average_state(self, weights: list[float]) -> None:
        of_each = ([o.state[p] for p in _trained_parameters(m)] for o, m in self._pairs())
        for states in zip(*of_each, strict=True):
            for name in {name for state in states for name in state}:
                known = [(w, state[name]) for w, state in zip(weights, states, strict=True) if name in state and w]
                product = name == "mu_product"
                values = [(w, v.double().log() if product else v.double()) for w, v in known]
                mean = sum(w * v for w, v in values) / sum(w for w, _ in known)
                for state in states:
                    state[name] = (mean.exp() if product else mean).to(known[0][1].dtype, copy=True)

    def _average_groups(self, weights: list[float]) -> None:
        groups = [optimizer.param_groups[0] for optimizer in self.optimizers]
        for name in set(groups[0]) & set(MEMORY):
            mean = sum(w * group[name] for w, group in zip(weights, groups, strict=True))
            for group in groups:
                group[name] = round(mean) if isinstance(group[name], int) else mean

    def _pairs(self) -> Any:
        return zip(self.optimizers, self.models, strict=True)


def _train(case: dict[str, Any]) -> dict[str, list[Any]]:
    """A job as a user writes it; what was trained in every round, and what model and optimizer were after it."""
    model, workers = net(case.get("kind", "plain")), dist.get_world_size()
    if dist.get_rank() and not case.get("ddp"):
        with torch.no_grad():
            next(model.parameters()).add_(1.0)  # all begin as the first rank's
    optimizer = OPTIMIZERS[case.get("optimizer", "momentum")](_trained_parameters(model))
    shares, rule = SHARES[workers], {name: case[name] for name in ("lr_rule",) if name in case}
    controller = apart(Script(shares), sum(shares[0]) // workers, micro_batch=PIECE, **rule)
    given = {"optimizer": optimizer, "sampling": {"seed": 1}, "averaging": Averaging(**case.get("how", {}))}
    dataset, wrapped = TensorDataset(torch.arange(MINE), *data(MINE)), DDP(model) if case.get("ddp") else model
    job = Training(controller, dataset, wrapped, **given, num_workers=case.get("num_workers", 0))
    under_way, found = list[list[int]](), dict[str, list[Any]](rounds=[], weights=[], groups=[])
    for index, x, y in job.batches(2):
        mine = job.sampler.piece().samples
        with controller.piece():
            loss = job.backward(x, y)
        assert controller.optimizer_due
        job.update()
        if mine:
            case.get("follow", lambda model: None)(model)
            under_way.append(index.tolist())
        controller.step(loss=loss)
        if controller.met:
            found["rounds"].append(under_way)
            found["weights"].append([t.detach().clone() for t in (*model.parameters(), *model.buffers())])
            group = optimizer.param_groups[0]
            found["groups"].append({name: copy.deepcopy(group[name]) for name in MEMORY if name in group})
            under_way = []
    controller.close()
    return found


def _train_all(rank: int, names: list[str]) -> dict[str, dict[str, list[Any]]]:
    return {name: _train(CASES[name]) for name in names}


@pytest.fixture(scope="module", params=ASKED)
def ran(request: pytest.FixtureRequest) -> list[dict[str, dict[str, list[Any]]]]:
    """Of each rank by case."""
    return run_ranks(_train_all, request.param, ASKED[request.param], timeout_s=150)


def test_a_round_ends_in_the_mean_of_what_workers_trained_apart(ran: list[dict[str, dict[str, list[Any]]]]) -> None:
    (x, y), seen = data(MINE), list[int]()
    for name in ran[0]:
        case, ranks = CASES[name], [of_rank[name] for of_rank in ran]
        replay, seen = Replay(len(ranks), case), []
        assert len(ranks[0]["rounds"]) > 5
        for number, pieces in enumerate(zip(*(of_rank["rounds"] for of_rank in ranks), strict=True)):
            seen += [i for of_rank in pieces for piece in of_rank for i in piece]
            replay.round([[(x[i], y[i]) for i in of_rank] for of_rank in pieces])
            expected = [*replay.models[0].parameters(), *replay.models[0].buffers()]
            for of_rank in ranks:
                for own, first in zip(of_rank["weights"][number], ranks[0]["weights"][number], strict=True):
                    assert torch.equal(own, first), (name, number)
                for own, wanted in zip(of_rank["weights"][number], expected, strict=True):
                    torch.testing.assert_close(own, wanted.detach(), rtol=0, atol=1e-11, msg=f"{name}, round {number}")
                for key, value in of_rank["groups"][number].items():
                    wanted = replay.optimizers[0].param_groups[0][key]
                    torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12, check_dtype=False)
        assert sorted(seen) == sorted([*range(MINE)] * 2), name


def _with_others(rank: int) -> dict[str, list[Tensor]]:
    """A teacher, and fewer bytes, a layer that is thawed within a round, or an optimizer that is given more."""
    return {kind: _with(kind) for kind in ("outer", "bfloat16", "thawed", "added")}


def _with(kind: str) -> list[Tensor]:
    model, steps = net("taught"), nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
    model.register_parameter("steps", steps)
    how = {"outer": {"outer": nesterov}, "bfloat16": {"wire": "bfloat16"}}.get(kind, {})
    controller = apart(Script(SHARES[2]), 18, micro_batch=PIECE)
    added = nn.Parameter(torch.ones(3, dtype=torch.float64))
    job = Training(controller, TensorDataset(*data(MINE)), model, lr=0.05, averaging=Averaging(**how))
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
    assert not torch.equal(model.teacher.weight, net("taught").teacher.weight)
    assert steps > 5
    return [t.detach() for t in (*model.parameters(), added)]


def test_all_end_with_the_same_whatever_else_moves() -> None:
    one, other = run_ranks(_with_others, 2)
    for kind, ends in one.items():
        assert all(torch.equal(a, b) for a, b in zip(ends, other[kind], strict=True)), kind
        moved = not torch.equal(ends[-1], torch.ones(3, dtype=torch.float64))
        assert moved == (kind == "added")


def _either(rank: int) -> list[int]:
    """Rounds over gradients and rounds apart: after each, the teacher is the mean by samples of what workers had."""
    wait_for_decisions()
    in_turns()
    return [_ways("momentum"), _ways("schedule-free")]


def _ways(optimizer: str) -> int:
    model = net("taught")
    made = OPTIMIZERS[optimizer](_trained_parameters(model))
    controller = dynamix.Controller(Script([[10, 6], [5, 11]]), 8, interval=4, meet="auto", lr_rule="none")
    job, ways = Training(controller, TensorDataset(*data()), model, optimizer=made, sampling={"seed": 1}), set()
    for x, y in job.loader:
        plan = job.sampler.plan()
        with controller.piece():
            job.backward(x, y)
        job.update()
        in_place(model)
        own = model.teacher.weight.detach() * int(plan.counts[dist.get_rank()]) / plan.samples
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


def test_what_moves_is_averaged_where_workers_meet_in_both_ways() -> None:
    assert run_ranks(_either, 2) == [[2, 2], [2, 2]]
