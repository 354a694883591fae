"""Loops that meet over parameters: what is refused, what is resumed, and what travels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.sync.parameter_averaging import Averaging
from tests.ranks import Ok, run_ranks
from tests.runtime.jobs import Training, apart, classes, decided, recorded_times, wait_for_decisions
from tests.union import Script

SHARES = [[24, 8], [12, 20]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def net() -> nn.Module:
    """With the same weights on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def job(
    shares: list[list[int]] | str = "static",
    model: nn.Module | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    how: Averaging | None = None,
    scaler: Any = None,
    **options: Any,
) -> Training:
    """A training that meets over parameters; `options` are the controller's."""
    model = net() if model is None else model
    x, y = classes(240).tensors
    data = TensorDataset(x.to(next(p.dtype for p in model.parameters() if p.is_floating_point())), y)
    controller = apart(shares if isinstance(shares, str) else Script(shares), **{"batch_size": 16, **options})
    given = {"optimizer": optimizer(model.parameters()), "sampling": {"seed": 1}}
    return Training(controller, data, model, **given, averaging=how, scaler=scaler)


def _wrong(rank: int, kind: str) -> None:
    steps = job(model=net())
    for number, (x, y) in enumerate(steps.loader):
        steps.backward(x, y)
        if kind != "no step" or number % 2:
            steps.update()
        steps.controller.step()
        if kind == "saved apart" and not steps.controller.met:
            steps.controller.state_dict()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no step", "every piece has an optimizer step"),
        ("saved apart", "models differ between two meetings"),
    ],
)
def test_wrong_loops_are_refused_on_all_ranks(kind: str, words: str) -> None:
    outcomes = run_ranks(_wrong, 2, kind, expect_failure=True)
    for outcome in outcomes:
        assert not isinstance(outcome, Ok), kind
    assert any(re.search(words, str(outcome)) for outcome in outcomes), outcomes
    assert all("UsageError" in str(outcome) for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    "options",
    [{"meet": "nowhere"}, {"micro_batch": None, "global_batch": "adaptive"}, {"accumulate": 2, "micro_batch": None}],
    ids=["meet", "adaptive", "accumulate"],
)
def test_impossible_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        job(**options)


@pytest.mark.parametrize("options", [{"weighting": "loss"}, {"hook": print}, {"batchnorm": "weighted"}])
def test_what_is_about_gradients_is_refused(options: dict[str, Any]) -> None:
    controller, model = apart("static", 16), net()
    with pytest.raises(UsageError, match="meeting over gradients"):
        controller.wrap(model, sgd(model.parameters()), **options)
    controller.close()


def test_averaging_needs_a_meeting_over_parameters() -> None:
    controller, model = apart("static", 16, meet="gradients"), net()
    with pytest.raises(UsageError, match="meet='parameters'"):
        controller.wrap(model, sgd(model.parameters()), averaging=Averaging())
    controller.close()


@pytest.mark.parametrize("options", [{"wire": "int8"}, {"optimizer_state": "mean"}, {"outer": 3}])
def test_averaging_refuses_what_it_does_not_know(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Averaging(**options)


@pytest.mark.parametrize(
    "options",
    [{"early": True}, {"overlap": True}, {"sparse": False}, {"steps": "normalized"}, {"wire": "float16"}],
    ids=str,
)
def test_what_averaging_no_longer_has_says_what_to_write(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}=.*removed in 0\.3: write Averaging\("):
        Averaging(**options)


def test_backward_is_gone_and_says_what_to_write() -> None:
    controller = dynamix.Controller("static", 8)
    with pytest.raises(ConfigError, match=r"removed in 0\.3: write loss\.backward\(\).*find_limits.*micro_batch"):
        controller.backward(lambda batch: batch, [0])
    controller.close()


def _resumed(rank: int, stop: int | None, state: Any, how: dict[str, Any]) -> tuple[list[Tensor], Any]:
    """Train two epochs, or up to a meeting; go on from `state` = (model, optimizer, controller)."""
    steps = job(SHARES, optimizer=adamw, how=Averaging(**how))
    first = 0
    if state is not None:
        steps.net.load_state_dict(state[rank][0])
        steps.optimizer.load_state_dict(state[rank][1])
        steps.controller.load_state_dict(state[rank][2])
        first = state[rank][3]
    meetings, saved = 0, None
    for epoch in range(first, 2):
        steps.sampler.set_epoch(epoch)
        for x, y in steps.loader:
            steps.train_piece(x, y)
            meetings += steps.controller.met
            if steps.controller.met and meetings == stop:
                saved = (*(part.state_dict() for part in (steps.net, steps.optimizer, steps.controller)), epoch)
                break
        if saved:
            break
    steps.controller.close()
    return [p.detach() for p in steps.net.parameters()], saved


def nesterov(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("how", [{}, {"optimizer_state": "kept", "outer": nesterov}, {"optimizer_state": "reset"}])
def test_a_job_saved_at_a_meeting_goes_on_exactly(how: dict[str, Any]) -> None:
    whole = run_ranks(_resumed, 2, None, None, how)
    begun = run_ranks(_resumed, 2, 3, None, how)
    resumed = run_ranks(_resumed, 2, None, [of_rank[1] for of_rank in begun], how)
    for one, other in zip(whole, resumed, strict=True):
        for a, b in zip(one[0], other[0], strict=True):
            assert torch.equal(a, b)


def _wired(rank: int, wire: str | None) -> list[Tensor]:
    how = Averaging(wire=wire)  # type: ignore[arg-type]
    steps = job(SHARES, net().float(), lambda ps: torch.optim.SGD(ps, lr=1e-3), how=how)
    for x, y in steps.loader:
        steps.train_piece(x, y)
    steps.controller.close()
    return [p.detach() for p in steps.net.parameters()]


def test_moves_travel_in_half_the_bytes() -> None:
    exact, narrow = run_ranks(_wired, 2, None), run_ranks(_wired, 2, "bfloat16")
    for a, b, c, before in zip(narrow[0], narrow[1], exact[0], net().float().parameters(), strict=True):
        assert torch.equal(a, b)
        moved = (c - before.detach()).abs().max()
        assert 0 < (a - c).abs().max() < 2**-8 * moved  # of the move, not of the parameter


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


def test_a_rank_that_skips_a_piece_lowers_every_ranks_scale() -> None:
    ran = run_ranks(_scaled, 2)
    assert [scale for scale, _ in ran] == [512.0, 512.0]
    for a, b in zip(ran[0][1], ran[1][1], strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


def _placeholder(rank: int, optimizer_state: str) -> list[float]:
    """Rank 1 gets nothing to train; its optimizer must not move, nor pollute the mean, whatever the loss."""
    how = Averaging(optimizer_state=optimizer_state)  # type: ignore[arg-type]
    steps = job([[32, 0], [24, 8]], optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.5), how=how)
    for x, y in steps.loader:
        mine, before = steps.sampler.piece().samples, steps.weights().clone()
        with steps.controller.piece():
            (steps.loss(x, y) * (1.0 if mine else float("nan"))).backward()
        steps.update()
        assert mine or torch.equal(before, steps.weights())
        steps.controller.step()
    steps.controller.close()
    return [float(p.detach().square().sum()) for p in steps.net.parameters()]


@pytest.mark.parametrize("optimizer_state", ["averaged", "kept"])
def test_a_placeholder_trains_nothing(optimizer_state: str) -> None:
    one, other = run_ranks(_placeholder, 2, optimizer_state)
    assert one == other
    assert all(map(math.isfinite, one))


def _closure(rank: int) -> list[float]:
    """An optimizer that goes through the model again must not train a placeholder either."""
    how = Averaging(optimizer_state="reset")
    steps = job([[32, 0], [24, 8]], optimizer=lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=2), how=how)
    for x, y in steps.loader:
        mine, before = steps.sampler.piece().samples, steps.weights().clone()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            steps.optimizer.zero_grad()
            with steps.controller.piece():
                return steps.backward(x, y)

        steps.optimizer.step(closure)  # type: ignore[arg-type]
        steps.optimizer.zero_grad()
        moved = not torch.equal(before, steps.weights())
        assert moved == (mine > 0), (mine, moved, steps.sampler.consumed)
        steps.controller.step()
    steps.controller.close()
    return [float(p.detach().square().sum()) for p in steps.net.parameters()]


def test_an_optimizer_with_a_closure() -> None:
    one, other = run_ranks(_closure, 2)
    assert one == other


def _no_mean(rank: int, kind: str) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if kind == "lbfgs":
            return torch.optim.LBFGS(parameters, max_iter=2)
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)

    steps = job([[24, 8]], optimizer=optimizer)
    for x, y in steps.loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            steps.optimizer.zero_grad()
            return steps.backward(x, y)

        steps.optimizer.step(closure)  # type: ignore[arg-type]
        steps.controller.step()


@pytest.mark.parametrize(("kind", "words"), [("lbfgs", "has no mean over workers"), ("zero", "steps on all ranks")])
def test_optimizers_whose_state_has_no_mean_are_refused(kind: str, words: str) -> None:
    for outcome in run_ranks(_no_mean, 2, kind, expect_failure=True):
        assert re.search(words, str(outcome)), outcome


def _sliced(rank: int) -> list[float]:
    net = nn.Linear(2, 2)
    net.register_buffer("columns", torch.arange(12.0).view(4, 3)[:, 1] * (rank + 1))
    dynamix.weighted_average(net, [1.0, 3.0][rank])
    values: list[float] = net.get_buffer("columns").tolist()
    return values


def test_buffers_that_are_views_are_averaged() -> None:
    for values in run_ranks(_sliced, 2):
        assert values == pytest.approx([1.75 * v for v in (1.0, 4.0, 7.0, 10.0)])


def _sizes_learned(steps: Training, epochs: int) -> list[int]:
    """In the end."""
    for x, y in steps.batches(epochs):
        steps.train_piece(x, y)
    sizes: list[int] = steps.controller.batch_sizes.tolist()
    steps.controller.close()
    return sizes


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _learned(rank: int) -> dict[str, list[int]]:
    wait_for_decisions()
    with recorded_times((1e-3, 4e-3)[rank], (0.03, 1e-5)[rank]):  # the faster one waits
        policies = "lb_bsp", "dbs", "goodput", "dynamix", "stigmergic"
        return {policy: _sizes_learned(job(policy, optimizer=slow_sgd, min_batch_size=4), 4) for policy in policies}


def test_policies_give_the_faster_worker_more_steps() -> None:
    for learned in run_ranks(_learned, 2):
        for policy, sizes in learned.items():
            assert sum(sizes) == 32, policy
            assert sizes[0] > sizes[1], policy


def _adaptive(rank: int, policy: str, folder: Path) -> dict[str, tuple[list[int], float]]:
    wait_for_decisions()
    given = {"global_batch": "adaptive", "batch_size": 8, "min_batch_size": 1, "max_batch_size": None}
    told = {}
    for name, meeting_s in (("seldom", 0.05), ("often", 1e-5)):
        with recorded_times((1e-3, 3e-3)[rank], meeting_s):
            steps = job(policy, optimizer=slow_sgd, **given, events=folder / f"{name}.jsonl")
            told[name] = _sizes_learned(steps, 8), steps.optimizer.param_groups[0]["lr"]
    return told


@pytest.mark.parametrize("policy", ["lb_bsp", "dynamix"])
def test_adaptive_rounds_grow_where_meetings_take_long(policy: str, tmp_path: Path) -> None:
    first, second = run_ranks(_adaptive, 2, policy, tmp_path)
    assert first == second
    (seldom, _), (often, _) = first["seldom"], first["often"]
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


def test_the_noise_scale_is_known_where_no_gradient_crosses_ranks(tmp_path: Path) -> None:
    """Gradients are w - x with x of unit variance in 60 dimensions: tr(Sigma) = 60, and |G|^2 = 60 at w = 1."""
    run_ranks(_noisy, 2, str(tmp_path / "events.jsonl"))
    last = decided(tmp_path / "events.jsonl")[-1]
    assert last["noise"] == pytest.approx(60.0, rel=0.3)
    assert last["signal"] == pytest.approx(60.0, rel=0.3)
