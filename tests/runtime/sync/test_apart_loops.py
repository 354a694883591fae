"""Loops that meet over parameters: what is refused, what is resumed, and what travels."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.ranks import watch
from dynamix.runtime.sync.parameter_averaging import Averaging
from tests.ranks import refusal, run_cases, run_ranks
from tests.refused import refused
from tests.runtime.jobs import Training, apart, decided, ends_apart, recorded_times, wait_for_decisions
from tests.runtime.sync.apart_jobs import OPTIMIZERS, SHARES, job, nesterov, net, sgd

# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("meet", "options"),
    [
        ("parameters", {"weighting": "loss"}),
        ("parameters", {"hook": print}),
        ("parameters", {"batchnorm": "weighted"}),
        ("gradients", {"averaging": Averaging()}),
    ],
)
def test_what_belongs_to_the_other_way_of_meeting_is_refused(meet: str, options: dict[str, Any]) -> None:
    says = {"parameters": "meeting over gradients", "gradients": "meet='parameters'"}[meet]
    controller, model = apart("static", 16, meet=meet), net()
    refused(UsageError, says, controller.wrap, model, sgd(model.parameters()), **options)
    controller.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"wire": "int8"}, "wire"),
        ({"optimizer_state": "mean"}, "optimizer_state"),
        ({"outer": 3}, "outer"),
        *(({gone: True}, rf"{gone}=.*removed in 0\.3: write Averaging\(") for gone in ("early", "overlap")),
    ],
)
def test_averaging_refuses_what_it_does_not_know_or_no_longer_has(options: dict[str, Any], says: str) -> None:
    refused(ConfigError, says, Averaging, **options)


def test_backward_is_gone_and_says_what_to_write() -> None:
    controller = dynamix.Controller("static", 8)
    says = r"removed in 0\.3: write loss\.backward\(\).*find_limits.*micro_batch"
    refused(ConfigError, says, controller.backward, lambda batch: batch, [0])
    controller.close()


def _zero(parameters: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)


UNLIKE = {
    "outer": "averaging: outer is",
    "rate": r"optimizers: lr is \[0.1\] on rank 0, \[0.2\] on rank 1",
    "scaler": "averaging: scaler is",
    "model": r"rank 0 has weight \[3, 6\] .* where rank 1 has weight \[4, 6\]",
    "frozen": "the ranks are about to average models that differ",
    "weight": "a loss is the mean over the worker's own samples",
    "late": r"optimizer.step\(\) came after controller.step\(\)",
    "loaded": "0.weight was not the same on all ranks",
    "no step": r"optimizer.zero_grad\(\) for every piece",
    "optimizer saved apart": "models differ between two meetings",
    "lbfgs": "has no mean over workers",
    "zero": "steps on all ranks",
}


def _unlike(rank: int, kind: str) -> None:
    model, scaler = nn.Linear(6, 3 + rank).double() if kind == "model" else net(), None
    how: dict[str, Any] = {"outer": lambda ps: torch.optim.SGD(ps, lr=0.5 + rank)} if kind == "outer" else {}
    how |= {"optimizer_state": "kept"} if kind == "optimizer saved apart" else {}
    if kind == "scaler" and rank:
        scaler = torch.amp.GradScaler("cpu")
    made: Any = {"zero": _zero, "lbfgs": torch.optim.LBFGS}.get(kind)
    rate = 0.1 * (1 + rank * (kind == "rate"))
    made = made or (lambda ps: torch.optim.SGD(ps, lr=rate))
    steps = job(SHARES, model, made, how=how, scaler=scaler, process_group=dist.new_group())
    controller, optimizer = steps.controller, steps.optimizer
    for number, (x, y) in enumerate(steps.loader):
        if kind == "frozen" and rank and steps.sampler.consumed > 5:
            next(model.parameters()).requires_grad_(False)
        with controller.piece():
            loss = steps.loss(x, y)
            (controller.weight(loss) if kind == "weight" else loss).backward()
        if kind == "late":
            controller.step()
        if kind != "no step" or number % 2:
            optimizer.step(*([lambda loss=loss: loss] if kind == "lbfgs" else []))  # type: ignore[arg-type]
            optimizer.zero_grad()
        controller.step()
        if kind == "optimizer saved apart" and not controller.met:
            controller.optimizer_state(optimizer)
        if kind == "loaded" and controller.met and rank == 1:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def _all_unlike(rank: int) -> list[str]:
    watch.SETUP_ERROR_S = 1.5  # no rank goes on after an error here, so nobody needs to wait long for that
    return [refusal(UsageError, _unlike, rank, kind) for kind in UNLIKE]


@pytest.mark.multiproc
@pytest.mark.filterwarnings("ignore")
def test_wrong_loops_and_ranks_that_differ_are_told_so_on_every_rank() -> None:
    for told in run_ranks(_all_unlike, 2, timeout_s=100):
        for (kind, words), said in zip(UNLIKE.items(), told, strict=True):
            assert re.search(words, said), (kind, said)


def _warned(kind: str) -> list[str]:
    """Of a loop that trains beside the job, of one that is left within a round, and of a right one."""
    beside = nn.Linear(3, 3).double()
    another = torch.optim.SGD(beside.parameters(), lr=0.1)
    steps = job(SHARES, how={"outer": lambda ps: torch.optim.SGD(ps, lr=0.5)}, process_group=dist.new_group())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in steps.loader:
            with steps.controller.piece():
                F.cross_entropy(beside(steps.model(x)), y).backward()
            if kind == "beside":
                another.step()
                another.zero_grad()
            steps.finish()
            if kind == "left" and not steps.controller.met:
                break
        steps.controller.close()
    return [str(warning.message) for warning in caught]


@pytest.mark.multiproc
def test_what_leaves_workers_their_own_is_warned_of() -> None:
    beside, left, right = run_cases(_warned, 2, ["beside", "left", "right"])
    assert all(any("was not given to controller.wrap" in text for text in told) for told in beside)
    assert all(any("ended between two meetings" in text for text in told) for told in left)
    assert right == [[], []]


# ---------------------------------------------------------------- what is resumed, and what travels


def _resumed(rank: int) -> list[float]:
    return [
        ends_apart(
            lambda how=how: job(SHARES, optimizer=OPTIMIZERS["adamw"], how=how),  # type: ignore[misc]
            lambda meetings, piece: meetings == 3,
        )
        for how in ({}, {"optimizer_state": "kept", "outer": nesterov}, {"optimizer_state": "reset"})
    ]


@pytest.mark.multiproc
def test_a_job_saved_at_a_meeting_goes_on_exactly() -> None:
    assert run_ranks(_resumed, 2) == [[0.0] * 3] * 2


def _scaled(rank: int) -> tuple[float, list[Tensor]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    steps = job(SHARES, net().float(), lambda ps: torch.optim.SGD(ps, lr=1e-2), scaler=scaler)
    for number, (x, y) in enumerate(steps.loader):
        with steps.controller.piece():
            bad = float("inf") if rank == 1 and number == 1 else 1.0
            scaler.scale(steps.loss(x, y) * bad).backward()
        scaler.step(steps.optimizer)
        scaler.update()
        steps.optimizer.zero_grad()
        steps.controller.step()
    steps.controller.close()
    return scaler.get_scale(), [p.detach() for p in steps.net.parameters()]


@pytest.mark.multiproc
def test_a_rank_that_skips_a_piece_lowers_every_ranks_scale() -> None:
    ran = run_ranks(_scaled, 2)
    assert [scale for scale, _ in ran] == [512.0, 512.0]
    for a, b in zip(ran[0][1], ran[1][1], strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


PLACEHOLDERS: dict[str, Any] = {
    "averaged": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.5),
    "kept": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.5),
    "reset": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=2),  # it goes through the model again in a closure
}


def _placeholder(state: str) -> Tensor:
    """Rank 1 gets nothing to train; its optimizer must not move, nor pollute the mean, whatever the loss."""
    steps = job([[32, 0], [24, 8]], optimizer=PLACEHOLDERS[state], how={"optimizer_state": state})
    for x, y in steps.loader:
        mine, before = steps.sampler.piece().samples, steps.weights().clone()

        def passes(x: Tensor = x, y: Tensor = y, mine: int = mine) -> Tensor:
            steps.optimizer.zero_grad()
            with steps.controller.piece():
                loss = steps.loss(x, y) * (1.0 if mine else float("nan"))
                loss.backward()
            return loss

        if state == "reset":
            steps.optimizer.step(passes)  # type: ignore[arg-type]
        else:
            passes()
            steps.optimizer.step()
        steps.optimizer.zero_grad()
        assert torch.equal(before, steps.weights()) == (mine == 0), state
        steps.controller.step()
    steps.controller.close()
    return steps.weights()


@pytest.mark.multiproc
def test_a_placeholder_trains_nothing() -> None:
    for one, other in run_cases(_placeholder, 2, PLACEHOLDERS):
        assert torch.equal(one, other)
        assert one.isfinite().all()


# ---------------------------------------------------------------- what policies see


def _sizes_learned(steps: Training, epochs: int) -> list[int]:
    """In the end."""
    for x, y in steps.batches(epochs):
        steps.train_piece(x, y)
    sizes: list[int] = steps.controller.batch_sizes.tolist()
    steps.controller.close()
    return sizes


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _learned(rank: int, folder: Path) -> tuple[dict[str, list[int]], list[int], list[int]]:
    """Of policies whose global batch is fixed; of one that adapts it, where meetings take long, and where not."""
    wait_for_decisions()
    with recorded_times((1e-3, 4e-3)[rank], (0.03, 1e-5)[rank]):  # the faster one waits
        policies = "lb_bsp", "dbs", "goodput", "dynamix", "stigmergic"
        fixed = {policy: _sizes_learned(job(policy, optimizer=slow_sgd, min_batch_size=4), 4) for policy in policies}
    given = {"global_batch": "adaptive", "batch_size": 8, "min_batch_size": 1, "max_batch_size": None}
    told = []
    for name, meeting_s in (("seldom", 0.05), ("often", 1e-5)):
        with recorded_times((1e-3, 3e-3)[rank], meeting_s):
            steps = job("dynamix", optimizer=slow_sgd, **given, events=folder / f"{name}.jsonl")
            told.append(_sizes_learned(steps, 8))
    return fixed, told[0], told[1]


@pytest.mark.multiproc
def test_policies_give_the_faster_worker_more_steps_and_rounds_grow_where_meetings_take_long(tmp_path: Path) -> None:
    first, second = run_ranks(_learned, 2, tmp_path, timeout_s=100)
    assert first == second
    fixed, seldom, often = first
    for policy, sizes in fixed.items():
        assert sum(sizes) == 32, policy
        assert sizes[0] > sizes[1], policy
    assert sum(seldom) > 1.5 * sum(often)
    assert seldom[0] > seldom[1]
    last = decided(tmp_path / "seldom.jsonl")[-1]["rounds"]
    assert last["meeting_s"] == pytest.approx(0.05)
    assert last["steps"] > 4


def _noisy(rank: int, events: str) -> None:
    x = torch.randn(4000, 60, generator=torch.Generator().manual_seed(9))
    linear = nn.Linear(1, 60, bias=False)
    torch.nn.init.constant_(linear.weight, 1.0)
    controller = dynamix.Controller("lb_bsp", 64, micro_batch=8, interval=4, meet="parameters", events=events)
    steps = Training(controller, TensorDataset(x), linear, lr=1e-9)
    for (target,) in steps.batches(8):
        with controller.piece():
            (steps.model(torch.ones(len(target), 1)) - target).square().sum(1).mean().div(2).backward()
        steps.finish()
    controller.close()


@pytest.mark.multiproc
def test_the_noise_scale_is_known_where_no_gradient_crosses_ranks(tmp_path: Path) -> None:
    """Gradients are w - x with x of unit variance in 60 dimensions: tr(Sigma) = 60, and |G|^2 = 60 at w = 1."""
    run_ranks(_noisy, 2, str(tmp_path / "events.jsonl"))
    last = decided(tmp_path / "events.jsonl")[-1]
    assert last["noise"] == pytest.approx(60.0, rel=0.3)
    assert last["signal"] == pytest.approx(60.0, rel=0.3)
