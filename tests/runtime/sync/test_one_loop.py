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

from tests.ranks import run_ranks
from tests.runtime.sync.one_loop import (
    OPTIMIZERS,
    Case,
    Job,
    Net,
    compared,
    the_loop,
    trained,
)

pytestmark = pytest.mark.multiproc
SWITCHES = 11
APART = ("parameters", "auto")
PIECES = {"micro_batch": 4, "max_batch_size": 64}

ALIKE = {
    "adamw": Case(optimizer="adamw"),
    "batchnorm in eval mode": Case(kind="batchnorm", in_eval=True),
    "loader workers": Case(num_workers=2, epochs=7),
    "bucket views": Case(ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
    "two forwards": Case(forwards=2),
    "two losses": Case(kind="twin"),
    "reentrant checkpoint": Case(kind="reentrant", optimizer="adamw"),
    "checkpoint": Case(kind="recomputed"),
    "evaluation in between": Case(evaluates=True, kind="batchnorm", optimizer="adamw"),
    "no share": Case(shares=((16, 0), (10, 6)), options={"min_batch_size": 0}),
}
IN_PIECES = ("adamw", "batchnorm in eval mode", "bucket views", "two forwards", "reentrant checkpoint", "no share")
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


def _check(told: dict[str, tuple[str, int, int]], asked: Any) -> None:
    assert {name: differs for name, (differs, _, _) in told.items() if differs} == {}
    assert [*told] == [*asked]


@pytest.mark.parametrize("cases", [ALIKE, UNUSED | COMPILED], ids=["alike", "unused and compiled"])
def test_the_plain_loop_trains_the_same_bits_over_many_changes_of_way(cases: dict[str, Case]) -> None:
    asked = {name: (the_loop, case) for name, case in cases.items()}
    for told in run_ranks(compared, 2, asked, timeout_s=100):
        _check(told, asked)
        assert min(switches for _, _, switches in told.values()) >= SWITCHES


def _in_both_modes(rank: int) -> list[str]:
    """How a net without modes that is trained in eval mode differs from one in training mode."""
    modes = {
        meet: [trained(the_loop, Case(meet, in_eval=mode), pieces=False) for mode in (False, True)] for meet in APART
    }
    return [in_eval.differs_from(training, 0.0) for training, in_eval in modes.values()]


def test_a_net_without_modes_trains_the_same_in_eval_mode() -> None:
    assert run_ranks(_in_both_modes, 2) == [["", ""]] * 2


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
    chosen = {name: (ALIKE | UNUSED)[name] for name in (*IN_PIECES, *UNUSED)}
    cut = {name: dataclasses.replace(case, options=case.options | PIECES, **given) for name, case in chosen.items()}
    asked = {name: (the_loop, case) for name, case in (cut | SHARDED).items()}
    asked["no_sync of its own"] = _under_no_sync_of_its_own, cut["adamw"]
    for told in run_ranks(compared, 2, asked, timeout_s=100):
        _check(told, asked)
        assert min(rounds for _, rounds, _ in told.values()) >= 12


Batch = tuple[Tensor, Tensor]


def _dealt(rank: int, shares: Sequence[Sequence[int]]) -> tuple[list[bool], list[list[Batch]], list[Tensor]]:
    """By round: its way, what this rank trained in it, and the model after it."""
    job = Job(Case(double=True, epochs=2, options={"lr_rule": "none"}, shares=shares))
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


@pytest.mark.parametrize("shares", [((12, 4), (10, 6), (14, 2)), ((12, 4, 8), (3, 14, 7))], ids=["two", "three"])
def test_the_plain_loop_trains_what_plain_words_say(shares: Sequence[Sequence[int]]) -> None:
    """In one process: the union batch's gradient, or steps of each worker's own and then the mean by samples."""
    ranks = run_ranks(_dealt, len(shares[0]), shares)
    assert len(set(ranks[0][0])) == 2
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
