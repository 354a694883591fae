"""What is not sent is kept and sent later: nothing is lost for good, whatever the batches, steps and infinities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamix
from dynamix.compression import CompressionState
from dynamix.errors import ConfigError, StateError, UsageError
from dynamix_homomorphic.lossy import ErrorFeedback, LossyState, lossy_hook, lossy_topk_hook
from tests.ranks import run_ranks

SIZE = 60


@given(
    steps=st.integers(1, 12),
    n=st.integers(1, 200),
    seed=st.integers(0, 1 << 20),
    how=st.sampled_from([{"keep": 0.01}, {"keep": 0.3}, {"keep": 1.0}, {"threshold": 3.0}, {"threshold": 1e9}]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
@settings(max_examples=100, deadline=None)
def test_sent_and_held_are_all_that_ever_came(
    steps: int, n: int, seed: int, how: dict[str, float], dtype: torch.dtype
) -> None:
    generator, feedback = torch.Generator().manual_seed(seed), ErrorFeedback(**how)
    came, sent = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for _ in range(steps):
        gradient = torch.randint(-8, 9, (n,), generator=generator).to(dtype)  # sums of these are exact
        came += gradient.double()
        items, held = feedback.take_(gradient, "w")
        assert set(gradient.nonzero().squeeze(1).tolist()) <= set(items.tolist())
        feedback.commit([("w", held)])
        sent += gradient.double()
    assert torch.equal(sent + feedback.memory["w"].double(), came)
    if how == {"keep": 1.0}:
        assert not feedback.memory["w"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_step_splits_gradient_and_memory_without_rounding(dtype: torch.dtype) -> None:
    generator, feedback = torch.Generator().manual_seed(1), ErrorFeedback(keep=0.1)
    for _ in range(20):
        gradient = torch.randn(500, generator=generator).to(dtype)
        whole = gradient.float() + feedback.memory.get("w", torch.zeros(500))
        items, held = feedback.take_(gradient, "w")
        assert torch.equal(gradient.float() + held, whole), "half types' rounding is held, too"
        assert whole[items].abs().min() >= held.abs().max() - 0.01 * whole.abs().max()
        feedback.commit([("w", held)])


def test_a_changed_loss_scale_changes_nothing_that_is_held() -> None:
    scales = iter([4.0, 4.0, 2.0, 1024.0])
    now = 1.0
    feedback = ErrorFeedback(keep=0.25, loss_scale=lambda: now)
    came, applied = torch.zeros(8), torch.zeros(8)
    for now in scales:
        gradient = torch.randint(-8, 9, (8,)).float()
        came += gradient
        scaled = gradient * now
        _, held = feedback.take_(scaled, "w")
        feedback.commit([("w", held)])
        applied += scaled / now
    assert torch.equal(applied + feedback.memory["w"], came)


def test_descent_with_one_element_in_twenty_arrives_where_the_whole_gradient_does() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted, curvature = torch.randn(400, generator=generator), torch.linspace(0.2, 1.0, 400)

    def error(how: ErrorFeedback | None, *, forgetful: bool = False) -> float:
        x = torch.zeros(400)
        for _ in range(1500):
            gradient = curvature * (x - wanted)
            if how is not None:
                _, held = how.take_(gradient, "x")
                how.commit([] if forgetful else [("x", held)])
            x -= 0.02 * gradient
        return float((x - wanted).norm() / wanted.norm())

    assert error(ErrorFeedback(keep=0.05)) < 0.03
    assert error(ErrorFeedback(threshold=0.5)) < 0.03
    assert error(ErrorFeedback(threshold=0.5), forgetful=True) > 0.2, "without memory small gradients never count"


class Sums(nn.Module):
    """Its gradient is its input, so that integers make exact gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first * x[:SIZE]).sum() + (self.second * x[SIZE:]).sum()


def _input(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-64, 65, (SIZE + 7,), generator=generator).float() * 2


def _gradient(net: Sums) -> Tensor:
    return torch.cat([p.grad.clone() for p in net.parameters() if p.grad is not None])


def _make(kind: str) -> tuple[Sums, DDP, LossyState, Any]:
    net = Sums()
    if kind == "gathered":
        state, hook = LossyState(net, keep=0.1), lossy_topk_hook
    elif kind == "threshold":
        state = LossyState(net, threshold=100.0, hook_state=CompressionState("lhc"))
        hook = lossy_hook
    else:
        state, hook = LossyState(net, keep=0.1, hook_state=CompressionState("compaction")), lossy_hook
    return net, DDP(net), state, hook


def _held(state: LossyState) -> Tensor:
    return torch.cat([state.feedback.memory["first"], state.feedback.memory["second"]])


def _conserve(rank: int, kind: str) -> dict[str, Tensor]:
    """Unequal batches of 1 and 3 samples, and every third step two micro-batches."""
    net, model, state, hook = _make(kind)
    model.register_comm_hook(state, dynamix.weighted(hook, count=lambda: (1 + 2 * rank, 4)))
    came, applied = torch.zeros(SIZE + 7), torch.zeros(SIZE + 7)
    for step in range(9):
        net.zero_grad()
        x = _input(rank, step)
        if step % 3 == 0:
            with model.no_sync():
                model(_input(rank, 50 + step)).backward()
            came += _input(rank, 50 + step) * (0.5 + rank)
        model(x).backward()
        came += x * (0.5 + rank)
        applied += _gradient(net)
    return {"came": came, "applied": applied, "held": _held(state)}


def _resume(rank: int, kind: str) -> bool:
    def run(model: DDP, net: Sums, steps: range) -> list[Tensor]:
        found = []
        for step in steps:
            net.zero_grad()
            model(_input(rank, step)).backward()
            found.append(_gradient(net))
        return found

    net, model, state, hook = _make(kind)
    model.register_comm_hook(state, hook)
    run(model, net, range(4))
    saved = state.state_dict()
    rest = run(model, net, range(4, 8))
    net, model, state, hook = _make(kind)
    state.load_state_dict(saved)
    model.register_comm_hook(state, hook)
    return all(torch.equal(a, b) for a, b in zip(run(model, net, range(4, 8)), rest, strict=True))


def _not_finite(rank: int, kind: str) -> dict[str, Any]:
    net, model, state, hook = _make(kind)
    model.register_comm_hook(state, hook)
    held, finite = [], []
    for step in range(4):
        net.zero_grad()
        x = _input(rank, step)
        if step == 2 and rank == 1:
            x[3] = float("inf")
        model(x).backward()
        held.append(_held(state).clone())
        finite.append(bool(torch.isfinite(_gradient(net)).all()))
    return {"held": held, "finite": finite}


def _all(rank: int) -> dict[str, Any]:
    return {
        "conserve": {kind: _conserve(rank, kind) for kind in ("gathered", "threshold", "compaction")},
        "resume": _resume(rank, "compaction"),
        "not finite": {kind: _not_finite(rank, kind) for kind in ("gathered", "compaction")},
    }


@pytest.mark.multiproc
def test_on_two_ranks() -> None:
    one, other = run_ranks(_all, 2, timeout_s=100)
    for kind in one["conserve"]:
        parts = [found["conserve"][kind] for found in (one, other)]
        assert torch.equal(parts[0]["applied"], parts[1]["applied"])
        came, held = (sum(part[name] for part in parts) for name in ("came", "held"))
        assert held.any()
        assert torch.equal(2 * parts[0]["applied"] + held, came), f"{kind}: applied and held are all that came"
    for found in (one, other):
        assert found["resume"], "a resumed job goes on bit for bit"
        for kind, seen in found["not finite"].items():
            assert seen["finite"] == [True, True, False, True]
            assert torch.equal(seen["held"][2], seen["held"][1]), (
                f"{kind}: a step that cannot be applied leaves no trace"
            )
            assert torch.isfinite(seen["held"][3]).all()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        ErrorFeedback()
    with pytest.raises(ConfigError, match="exactly one"):
        LossyState(Sums(), keep=0.1, threshold=1.0)
    with pytest.raises(ConfigError, match="keep=0"):
        ErrorFeedback(keep=0)
    with pytest.raises(ConfigError, match="threshold"):
        ErrorFeedback(threshold=float("nan"))
    feedback = ErrorFeedback(keep=0.5)
    feedback.commit([("w", torch.zeros(3))])
    with pytest.raises(StateError, match="w has 4 elements"):
        feedback.take_(torch.zeros(4), "w")


class Bucket:
    def __init__(self, *parameters: Tensor) -> None:
        self._parameters = list(parameters)

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def buffer(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self._parameters])


def test_another_models_bucket_is_refused() -> None:
    with pytest.raises(UsageError, match="another model"):
        LossyState(Sums(), keep=0.1).sparsify_(Bucket(torch.zeros(4)))  # type: ignore[arg-type]
