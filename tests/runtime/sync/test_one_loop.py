"""The loop of the README serves every way of meeting: it trains what the loop of `controller.piece()` trains."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from tests.ranks import run_ranks
from tests.runtime.sync.one_loop import (
    OPTIMIZERS,
    WAYS,
    Case,
    Job,
    Net,
    compared,
    dataset,
    flat,
    shard,
    the_loop,
    trained,
)

pytestmark = pytest.mark.multiproc
SWITCHES = 11
PIECES = {"micro_batch": 4, "max_batch_size": 64}

ALIKE = {
    "sgd": Case(),
    "adamw": Case(optimizer="adamw"),
    "batchnorm": Case(kind="batchnorm", optimizer="adamw"),
    "batchnorm in eval mode": Case(kind="batchnorm", in_eval=True),
    "loader workers": Case(num_workers=2, epochs=7),
    "bucket views": Case(ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
    "two forwards": Case(forwards=2),
    "two losses": Case(kind="twin"),
    "reentrant checkpoint": Case(kind="reentrant", optimizer="adamw"),
    "checkpoint": Case(kind="recomputed"),
    "evaluation in between": Case(evaluates=True, kind="batchnorm"),
    "no share": Case(shares=((16, 0), (10, 6)), options={"min_batch_size": 0}),
}
UNUSED = {
    f"layers unused, bucket views {views}": Case(
        kind="sometimes", optimizer="adamw", ddp={"find_unused_parameters": True, "gradient_as_bucket_view": views}
    )
    for views in (False, True)
}
SHARDED = {
    f"sharded, {how}": Case("gradients", optimizer="adamw", sharded=True, reshard=reshard, epochs=1, options=PIECES)
    for how, reshard in (("as it is", None), ("resharded", True), ("not resharded", False))
}
COMPILED = {"compiled inside": Case(compiled="inside"), "compiled around": Case(compiled="around")}


@pytest.mark.parametrize("cases", [ALIKE, UNUSED, COMPILED], ids=["alike", "unused", "compiled"])
def test_the_plain_loop_trains_the_same_bits_over_many_changes_of_way(cases: dict[str, Case]) -> None:
    asked = {name: (the_loop, case) for name, case in cases.items()}
    for told in run_ranks(compared, 2, asked, timeout_s=100):
        assert {name: differs for name, (differs, _, _) in told.items() if differs} == {}
        assert [*told] == [*cases]
        assert min(switches for _, _, switches in told.values()) >= SWITCHES


def _in_both_modes(rank: int, meet: str) -> str:
    training, in_eval = (trained(the_loop, Case(meet, in_eval=mode), pieces=False) for mode in (False, True))
    return in_eval.differs_from(training, 0.0)


@pytest.mark.parametrize("meet", ["parameters", "auto"])
def test_a_net_without_modes_trains_the_same_in_eval_mode(meet: str) -> None:
    assert run_ranks(_in_both_modes, 2, meet) == ["", ""]


def _under_no_sync_of_its_own(job: Job) -> None:
    """As DDP's page has it, for all batches of a round but the last."""
    job.wrap()
    for x, y in job.batches():
        with contextlib.nullcontext() if job.controller.optimizer_due else job.model.no_sync():
            loss = job.backward(x, y)
        if job.controller.optimizer_due:
            job.update()
        job.step(loss)
    assert job.model.require_backward_grad_sync


def test_the_plain_loop_trains_the_same_bits_over_gradients_in_pieces() -> None:
    given = {"meet": "gradients", "epochs": 1}
    kept = {name: case for name, case in (ALIKE | UNUSED).items() if name != "loader workers"}
    cut = {name: dataclasses.replace(case, options=case.options | PIECES, **given) for name, case in kept.items()}
    asked = {name: (the_loop, case) for name, case in (cut | SHARDED).items()}
    asked["no_sync of its own"] = _under_no_sync_of_its_own, cut["adamw"]
    for told in run_ranks(compared, 2, asked, timeout_s=100):
        assert {name: differs for name, (differs, _, _) in told.items() if differs} == {}
        assert [*told] == [*asked]
        assert min(rounds for _, rounds, _ in told.values()) >= 12


def _alone(options: dict[str, int], *, sharded: bool, pieces: bool) -> Tensor:
    controller = dynamix.Controller("static", interval=2, **options)
    net, data = Net("plain"), dataset()
    if sharded:
        shard(net)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    controller.wrap(net, optimizer)
    for x, y in DataLoader(data, batch_sampler=controller.batch_sampler(data)):
        with controller.piece() if pieces else contextlib.nullcontext():
            (F.cross_entropy(net(x), y) / controller.accumulate).backward()
        if controller.optimizer_due:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        controller.step()
    controller.close()
    return flat(net)


def _alone_alike(rank: int) -> dict[str, bool]:
    found = {}
    for options in ({"batch_size": 10, "micro_batch": 4}, {"batch_size": 5, "accumulate": 3}):
        for sharded in (False, True):
            plain, pieces = (_alone(options, sharded=sharded, pieces=under) for under in (False, True))
            found[f"{options}, sharded: {sharded}"] = torch.equal(plain, pieces)
    return found


def test_one_worker_clips_what_its_optimizer_applies() -> None:
    (found,) = run_ranks(_alone_alike, 1)
    assert [name for name, alike in found.items() if not alike] == []


Batch = tuple[Tensor, Tensor]


def _dealt(rank: int, meet: str, shares: Sequence[Sequence[int]]) -> tuple[list[bool], list[list[Batch]], list[Tensor]]:
    """By round: its way, what this rank trained in it, and the model after it."""
    job = Job(Case(meet=meet, double=True, epochs=2, options={"lr_rule": "none"}, shares=shares))
    rounds: list[list[Batch]] = [[]]
    job.wrap()
    for x, y in job.batches():
        mine = job.sampler.piece().samples
        loss = job.backward(x, y)
        job.update()
        job.step(loss)
        rounds[-1] += [(x, y)] if mine else []
        if job.controller.met:
            rounds.append([])
    job.controller.close()
    return job.seen.apart, rounds[:-1], job.seen.weights


@pytest.mark.parametrize("meet", WAYS)
@pytest.mark.parametrize("shares", [((12, 4), (10, 6), (14, 2)), ((12, 4, 8), (3, 14, 7))], ids=["two", "three"])
def test_the_plain_loop_trains_what_plain_words_say(meet: str, shares: Sequence[Sequence[int]]) -> None:
    """In one process: the union batch's gradient, or steps of each worker's own and then the mean by samples."""
    ranks = run_ranks(_dealt, len(shares[0]), meet, shares)
    models = [Net("plain").double() for _ in ranks]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    for number, apart in enumerate(ranks[0][0]):
        dealt = [rounds[number] for _, rounds, _ in ranks]
        union = tuple(torch.cat(part) for part in zip(*(batch for of_rank in dealt for batch in of_rank), strict=True))
        for model, optimizer, own in zip(models, optimizers, dealt, strict=True):
            for x, y in own if apart else [union]:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        if apart:
            _average(models, optimizers, [sum(len(y) for _, y in own) for own in dealt])
        for _, _, weights in ranks:
            own = torch.cat([p.detach().flatten() for p in models[0].parameters()])
            torch.testing.assert_close(weights[number], own, rtol=0, atol=1e-12)


def _average(models: list[Net], optimizers: list[torch.optim.Optimizer], samples: list[int]) -> None:
    weights = np.array(samples) / sum(samples)
    with torch.no_grad():
        for same in zip(*(model.parameters() for model in models), strict=True):
            held = [same, [of.state[p].get("momentum_buffer") for of, p in zip(optimizers, same, strict=True)]]
            for tensors in held:
                mean = sum(w * t for w, t in zip(weights, tensors, strict=True) if t is not None)
                for tensor in tensors:
                    if tensor is not None:
                        tensor.copy_(torch.as_tensor(mean))


class _Alone:
    """A job of one worker, one temperature of the loss being beside the model; and what it should have made."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.controller = dynamix.Controller("static", interval=2, **options)
        self.net, self.beside = Net("plain").double(), torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        x, y = dataset().tensors
        self.data = TensorDataset(x.double(), y)
        self.parameters = [*self.net.parameters(), self.beside]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y) * torch.exp(-self.beside) + self.beside

    def train(self) -> float:
        """How far gradients are from those of whole batches, before the optimizer's step."""
        dealt, furthest = list[tuple[Tensor, Tensor]](), 0.0
        for x, y in DataLoader(self.data, batch_sampler=self.controller.batch_sampler(self.data)):
            dealt.append((x, y))
            (self.loss(x, y) / self.controller.accumulate).backward()
            if self.controller.optimizer_due:
                trained = [p for p in self.parameters if p.requires_grad]
                whole = self.loss(*(torch.cat(part) for part in zip(*dealt, strict=True)))
                wanted = torch.autograd.grad(whole, trained)
                for p, true in zip(trained, wanted, strict=True):
                    furthest = max(
                        furthest, float((torch.zeros(()) if p.grad is None else p.grad).sub(true).abs().max())
                    )
                self.optimizer.step()
                self.optimizer.zero_grad()
                dealt.clear()
            self.controller.step()
        self.controller.close()
        return furthest


ALONE = [{"batch_size": 10, "micro_batch": 4}, {"batch_size": 5, "accumulate": 3}]


@pytest.mark.parametrize("options", ALONE, ids=str)
@pytest.mark.parametrize("thawed", [False, True])
def test_one_worker_accumulates_all_that_its_optimizer_has(options: dict[str, int], thawed: bool) -> None:
    """Also parameters beside the model, and those that are thawed after `wrap`."""
    alone = _Alone(options)
    alone.net.first.requires_grad_(not thawed)
    alone.controller.wrap(alone.net, alone.optimizer)
    alone.net.first.requires_grad_(True)
    alone.net.middle.requires_grad_(not thawed)
    alone.net.last.requires_grad_(not thawed)
    alone.beside.requires_grad_(not thawed)
    assert alone.train() < 1e-10


def test_one_worker_clips_what_is_applied_after_a_backward_pass_that_broke_off() -> None:
    alone = _Alone({"batch_size": 10, "micro_batch": 4})
    alone.controller.wrap(alone.net, alone.optimizer)
    whole = alone.loss

    def breaks_off(x: Tensor, y: Tensor) -> Tensor:
        if alone.controller.optimizer_due and alone.loss is breaks_off:
            alone.loss = whole  # type: ignore[method-assign]
            before = [None if p.grad is None else p.grad.clone() for p in alone.parameters]
            hook = alone.net.first.weight.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                whole(x, y).backward()
            hook.remove()
            for p, gradient in zip(alone.parameters, before, strict=True):
                p.grad = gradient
        return whole(x, y)

    alone.loss = breaks_off  # type: ignore[method-assign]
    assert alone.train() < 1e-10
