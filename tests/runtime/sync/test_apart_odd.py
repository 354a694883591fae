"""Meeting over parameters: models, optimizers and moves that are out of the ordinary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dynamix.runtime.measure.pairs import ConsecutiveNoise
from tests.ranks import run_ranks
from tests.runtime.jobs import Training
from tests.runtime.sync.apart_jobs import SHARES, job, nesterov, net


class Odd(nn.Module):
    """Infinite buffers, complex and 0-dim parameters, an empty one, and a layer that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()
        self.some = nn.Linear(6, 3).double()
        self.other = nn.Linear(3, 3).double()
        self.turn = nn.Parameter(torch.tensor(1 + 1j, dtype=torch.complex128))
        self.none = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("least", torch.tensor(torch.inf, dtype=torch.float64))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        with torch.no_grad():
            self.get_buffer("least").copy_(torch.minimum(self.get_buffer("least"), x.min()))
        h: Tensor = self.net(x) * (self.turn * self.turn).imag + self.none.sum()
        return h + self.some(x) if self.passes % 2 else self.other(h)


class Rows(nn.Module):
    """A sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 3, sparse=True).double()

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table(x[:, 0].abs().mul(10).long().clamp(max=49))
        return rows


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _odd(rank: int) -> list[list[Tensor]]:
    """Some passes of the second do not go through the module's own call."""
    ends = []
    for kind, optimizer, how, method in (
        (Odd, adam, {}, False),
        (Odd, momentum, {"wire": "bfloat16"}, True),
        (Rows, momentum, {}, False),
    ):
        steps = job(SHARES, kind(), optimizer, how=how)
        for number, (x, y) in enumerate(steps.batches(2)):
            with steps.controller.piece():
                call = steps.net.forward if method and number % 3 != 2 else steps.model
                F.cross_entropy(call(x), y).backward()
            steps.finish()
        steps.controller.close()
        ends.append([t.detach() for t in (*steps.net.parameters(), *steps.net.buffers())])
    return ends


@pytest.mark.multiproc
def test_all_end_with_the_same() -> None:
    one, other = run_ranks(_odd, 2)
    for ends, others in zip(one, other, strict=True):
        assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(ends, others, strict=True))
    for *_, mask, least in one[:2]:
        assert torch.equal(mask, torch.full((2, 2), -torch.inf).triu(1))
        assert least.isfinite()


class Running(nn.Module):
    """Statistics by hand: after every pass the buffers are other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.passes = self.passes + 1
        y: Tensor = self.net(x - self.mean)
        return y


def _replaced(rank: int) -> int:
    """Every meeting's buffers against the mean by samples of what workers had."""
    steps, meetings = job(SHARES, Running()), 0
    for x, y in steps.loader:
        plan = steps.sampler.plan()
        with steps.controller.piece():
            steps.backward(x, y)
        steps.update()
        own, passes = steps.net.mean.clone(), steps.net.passes.clone()
        steps.controller.step()
        if steps.controller.met:
            own *= int(plan.counts[rank]) / plan.samples
            dist.all_reduce(own)
            dist.all_reduce(passes, dist.ReduceOp.MAX)
            torch.testing.assert_close(steps.net.mean, own, rtol=0, atol=1e-14)
            assert steps.net.passes == passes
            meetings += 1
    steps.controller.close()
    return meetings


@pytest.mark.multiproc
def test_buffers_that_passes_replace_are_averaged() -> None:
    assert min(run_ranks(_replaced, 2)) > 5


def _clamped(by_data: bool) -> Tensor:
    """Parameters changed between two rounds, perhaps where autograd does not see it, and an outer optimizer."""
    steps = job([[16]], optimizer=lambda ps: torch.optim.SGD(ps, lr=0.3), how={"outer": nesterov})
    for x, y in steps.loader:
        steps.train_piece(x, y)
        if steps.controller.met:
            with torch.no_grad():
                for parameter in steps.net.parameters():
                    (parameter.data if by_data else parameter).clamp_(-0.2, 0.2)
    steps.controller.close()
    return steps.weights()


def test_an_outer_optimizer_takes_no_change_between_rounds_for_a_move() -> None:
    assert torch.equal(_clamped(by_data=True), _clamped(by_data=False))


def _of_one_parameter(shares: list[list[int]], shape: Any, **options: Any) -> tuple[Training, nn.Parameter]:
    """Only one parameter is trained, at a learning rate of 1."""
    model, parameter = net(), nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    model.register_parameter("moved", parameter)
    return job(shares, model, lambda _: torch.optim.SGD([parameter], lr=1.0), **options), parameter


def test_pieces_that_memory_makes_smaller_are_smaller_steps() -> None:
    steps, parameter = _of_one_parameter([[16]], (), lr_rule="linear")

    def step(batch: Any) -> None:
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError
        parameter.backward()

    batch = next(iter(DataLoader(steps.loader.dataset, batch_size=4)))
    assert steps.controller.find_limits(step, batch, margin=0.0) == [2]
    for x, _ in steps.loader:
        before = parameter.item()
        with steps.controller.piece():
            (steps.net(x).sum() * 0 + parameter).backward()
        steps.update()
        assert before - parameter.item() == pytest.approx(len(x) / 4)  # of micro_batch
        steps.controller.step()
    steps.controller.close()


def _unfrozen(rank: int) -> Tensor:
    outer: list[torch.optim.Optimizer] = []

    def make(parameters: list[Tensor]) -> torch.optim.Optimizer:
        outer.append(torch.optim.SGD(parameters, lr=0.7, momentum=0.9))
        return outer[-1]

    model = net()
    first = next(model.parameters()).requires_grad_(False)
    steps = job([[24, 8]], model, how={"outer": make})
    for epoch in range(2):
        steps.sampler.set_epoch(epoch)
        first.requires_grad_(epoch == 1)
        for x, y in steps.loader:
            steps.train_piece(x, y)
            if len(outer) == 2 and not steps.controller.met:
                kept = [state["momentum_buffer"] for state in outer[0].state.values()]
                assert len(kept) == 3
                assert any(kept[0] is state.get("momentum_buffer") for state in outer[1].state.values())
    assert len(outer) == 2
    steps.controller.close()
    return steps.weights()


@pytest.mark.multiproc
def test_unfreezing_leaves_the_outer_optimizer_its_momentum() -> None:
    one, other = run_ranks(_unfrozen, 2)
    assert torch.equal(one, other)


def _grown(rank: int) -> list[float]:
    """How far the parameter moves in every round, where moves grow and shrink a billionfold, or stop."""
    steps, parameter = _of_one_parameter([[16, 16]], 4, how={"wire": "bfloat16"})
    moves, before, rates = [], 0.0, [1e-6, 1e3, 0.0, 1e-6, 1e3, 0.0, 0.0, 1e-6]
    for x, _ in steps.loader:
        with steps.controller.piece():
            (steps.net(x).sum() * 0 + parameter.sum()).backward()
        steps.optimizer.param_groups[0]["lr"] = rates[len(moves) % 8]
        steps.finish()
        if steps.controller.met:
            moves.append((before - parameter[0].item()) / 4)
            before = parameter[0].item()
    steps.controller.close()
    return moves[:7]


@pytest.mark.multiproc
def test_half_bytes_carry_moves_of_any_size() -> None:
    for moves in run_ranks(_grown, 2):
        assert moves == pytest.approx([1e-6, 1e3, 0.0, 1e-6, 1e3, 0.0, 0.0][: len(moves)], rel=2**-8, abs=1e-9)


def test_the_noise_of_parameters_that_take_turns() -> None:
    noise, one, other = ConsecutiveNoise(), torch.ones(2, 3), torch.ones(4)
    assert noise.observe([one, None], 4.0) is None
    assert noise.observe([None, other], 4.0) is None
    pair = noise.observe([None, 3 * other], 4.0)
    assert pair is not None
    assert [float(value) for value in pair] == [32.0, 12.0]
