"""The stigmergic rule: equal workers stay equal, unlike ones finish together, nobody leaves its bounds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamix.errors import PolicyFileError
from dynamix.policies.goodput import GROWTH
from dynamix.policies.registry import make_policy
from dynamix.policies.stigmergic.policy import RANGES, Parameters, StigmergicPolicy, pretrained
from dynamix.policies.stigmergic.traces import TRACES, Own, TraceKind, noise_part
from dynamix.window import Bounds, Window

RULES = {"by hand": StigmergicPolicy, "learned": pretrained}


class Affine:
    """A steady cluster: seconds are alpha + beta b, an exchange on top; the noise scale is `phi` samples."""

    def __init__(self, beta: Any, *, alpha: float = 0.01, exchange_s: float = 0.02, phi: float | None = None) -> None:
        self.beta, self.alpha, self.exchange_s, self.phi = np.asarray(beta), alpha, exchange_s, phi
        self.base = 64 * self.beta.shape[-1]

    def seconds(self, sizes: Any) -> Any:
        return self.alpha + self.beta * sizes

    def window(self, sizes: Any) -> Window:
        busy = self.seconds(sizes)
        noise = {} if self.phi is None else {"noise": self.phi, "signal": 1.0}
        known = {"compute": busy, "compute_std": 0.01 * busy, "wait": busy.max(-1, keepdims=True) - busy, **noise}
        return Window.of(sizes, **known, communication=self.exchange_s, steps=5, base_batch=self.base)

    def run(self, policy: StigmergicPolicy, bounds: Bounds, windows: int) -> Any:
        sizes = np.full(self.beta.shape, 64)
        for _ in range(windows):
            sizes = policy.decide(self.window(sizes), bounds)
        return sizes


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_equal_workers_stay_equal(make: Any) -> None:
    world = Affine(np.full(6, 1e-3), phi=2000.0)
    sizes = np.full(6, 64)
    policy = make()
    for _ in range(20):
        sizes = policy.decide(world.window(sizes), Bounds.of(6, 1, 512))
        assert len(set(sizes.tolist())) == 1


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
@pytest.mark.parametrize("workers", [2, 3, 8, 200])
def test_unlike_workers_finish_together_within_four_windows(make: Any, workers: int) -> None:
    world = Affine(1e-3 * np.linspace(1.0, 3.0, workers), phi=30.0 * workers)
    sizes = world.run(make(), Bounds.of(workers, 1, 512), 4)
    busy = world.seconds(sizes)
    assert busy.max() / busy.mean() < 1.06
    assert world.seconds(np.full(workers, 64)).max() / world.seconds(np.full(workers, 64)).mean() > 1.3


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_the_global_batch_follows_the_noise_scale_and_stays_near_the_base_without_one(make: Any) -> None:
    beta, bounds = 1e-3 * np.linspace(1.0, 2.0, 8), Bounds.of(8, 1, 512)
    little, much, unknown = (
        Affine(beta, exchange_s=0.05, phi=phi).run(make(), bounds, 40).sum() for phi in (30.0, 20_000.0, None)
    )
    assert 2 * little < much
    assert much > 1.5 * 512
    assert 0.75 * 512 < unknown < 1.35 * 512


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_shares_are_even_again_three_windows_after_a_slowdown(make: Any) -> None:
    beta, bounds, policy = 1e-3 * np.linspace(1.0, 2.0, 6), Bounds.of(6, 1, 512), make()
    sizes = Affine(beta, phi=400.0).run(policy, bounds, 12)
    slowed = Affine(beta * np.array([1, 1, 2.5, 1, 1, 1]), phi=400.0)
    uneven = slowed.seconds(sizes)
    for _ in range(3):
        sizes = policy.decide(slowed.window(sizes), bounds)
    busy = slowed.seconds(sizes)
    assert uneven.max() / uneven.mean() > 1.5
    assert busy.max() / busy.mean() < 1.1


@pytest.mark.parametrize(("every", "less"), [(4, True), (1000, False)])
def test_who_is_often_slowed_down_takes_less_also_while_it_is_fast(every: int, less: bool) -> None:
    shares = []
    for wary in (0.0, 10.0):
        policy, sizes = StigmergicPolicy(Parameters(wary=wary)), np.full(4, 64)
        for window in range(50):
            slow = 2.5 if window % every in (2, 3) else 1.0
            sizes = policy.decide(
                Affine(1e-3 * np.array([slow, 1, 1, 1]), phi=400.0).window(sizes), Bounds.of(4, 1, 512)
            )
        shares.append(sizes[0] / sizes.sum())  # after two windows in which it was fast
    assert shares[1] < 0.85 * shares[0] if less else shares[1] == shares[0]


def test_who_is_at_its_bound_leaves_the_rest_to_the_others() -> None:
    world = Affine(1e-3 * np.array([1.0, 1.0, 1.0, 0.2]), exchange_s=0.3, phi=4000.0)
    high = np.array([512, 512, 512, 80])
    sizes = world.run(StigmergicPolicy(), Bounds.of(4, 1, high), 40)
    free = world.run(StigmergicPolicy(), Bounds.of(4, 1, 4096), 40)
    assert sizes[3] == 80 < free[3]
    assert len(set(sizes[:3].tolist())) == 1
    assert sizes[0] > 1.1 * 64


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_sizes_at_their_bounds_do_not_make_the_global_batch_jump(make: Any) -> None:
    world = Affine(1e-3 * np.array([0.3, 0.3, 0.3, 3.0]), alpha=0.002, exchange_s=0.005, phi=4000.0)
    policy, bounds, sizes, totals = make(), Bounds.of(4, 1, np.array([80, 80, 80, 4096])), np.full(4, 64), []
    for _ in range(60):
        sizes = policy.decide(world.window(sizes), bounds)
        totals.append(int(sizes.sum()))
    assert max(totals[-20:]) < 1.25 * min(totals[-20:])


def test_nobody_waits_for_less_than_the_fixed_costs_of_the_slowest() -> None:
    class OneHeavy(Affine):
        def seconds(self, sizes: Any) -> Any:
            return np.array([0.2, 0.01, 0.01, 0.01]) + self.beta * sizes

    # Small batches teach most, but no step is shorter than 0.2 s.
    world = OneHeavy(np.full(4, 1e-3), exchange_s=1e-3, phi=40.0)
    sizes = world.run(StigmergicPolicy(), Bounds.of(4, 1, 512), 40)
    assert sizes[0] <= 8
    assert world.seconds(sizes)[1:].min() > 0.15


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_the_global_batch_grows_slowly_beyond_what_training_has_met(make: Any) -> None:
    world, bounds, policy = Affine(np.full(4, 1e-3), exchange_s=0.5, phi=1e5), Bounds.of(4, 1, 4096), make()
    sizes, largest = np.full(4, 64), 256
    for _ in range(30):
        sizes = policy.decide(world.window(sizes), bounds)
        assert sizes.sum() <= 1.03 * largest * np.exp(GROWTH * 5) + 4
        largest = max(largest, int(sizes.sum()))
    assert largest > 2 * 256


def test_who_runs_out_of_memory_shrinks_alone_and_the_crowd_does_not_grow() -> None:
    world, bounds = Affine(np.full(4, 1e-3), exchange_s=0.1, phi=5000.0), Bounds.of(4, 1, 512)
    window = world.window(np.full(4, 64))
    sizes = {}
    for name, fits in (("ample", np.inf), ("short", 40.0)):
        policy = StigmergicPolicy()
        own = dataclasses.replace(Own.of(window), fits=np.array([np.inf, fits, np.inf, np.inf]))
        sense, left = policy.observe(own)
        assert left[..., TraceKind.OOM].tolist() == [0, fits < 64, 0, 0]
        sizes[name] = policy.choose(own, sense, left.sum(0)[None], bounds)
    assert (sizes["ample"] > 64).all()
    assert sizes["short"][1] == 40
    assert (sizes["short"][[0, 2, 3]] >= 64).all()
    assert (sizes["short"] < sizes["ample"]).all()


def test_without_traces_every_size_stays() -> None:
    policy, window = StigmergicPolicy(), Affine([1e-3, 5e-3]).window(np.array([30, 90]))
    own = Own.of(window)
    sense, _ = policy.observe(own)
    unknown = np.full((1, len(TRACES)), np.nan)
    assert policy.choose(own, sense, unknown, Bounds.of(2)).tolist() == [30, 90]


def test_unmeasured_windows_count_as_the_last_one_did() -> None:
    world, bounds = Affine(1e-3 * np.linspace(1, 4, 4), phi=200.0), Bounds.of(4, 1, 512)
    policy = StigmergicPolicy()
    sizes = world.run(policy, bounds, 10)
    window = world.window(sizes)
    unknown = np.full(4, np.nan)
    hidden = dataclasses.replace(window, compute=unknown, compute_std=unknown, wait=unknown)
    after = policy.decide(hidden, bounds)
    np.testing.assert_allclose(after, sizes, rtol=0.05, atol=1)


def test_a_file_keeps_the_numbers_and_refuses_impossible_ones(tmp_path: Path) -> None:
    path = tmp_path / "rule.safetensors"
    StigmergicPolicy(Parameters(push=0.5), about={"seed": 7}).save(path)
    loaded = make_policy(str(path))
    assert isinstance(loaded, StigmergicPolicy)
    assert loaded.parameters == Parameters(push=0.5)
    assert loaded.about["seed"] == 7
    StigmergicPolicy(Parameters(push=99.0)).save(path)
    with pytest.raises(PolicyFileError, match="push"):
        make_policy(str(path))
    assert set(RANGES) == {field.name for field in dataclasses.fields(Parameters)}
    assert isinstance(make_policy("stigmergic"), StigmergicPolicy)


def own(noise: float, square: float = 1.0) -> Own:
    """Two equal workers' windows."""
    known = {"size": 64.0, "unit": 64.0, "busy": 0.1, "blocked": 0.005, "least": 0.005, "jitter": 0.01, "steps": 5.0}
    known |= {"noise": noise, "square": square, "fits": np.inf}
    return Own(**{name: np.full(2, value) for name, value in known.items()}, workers=2)


def test_a_slip_of_the_own_search_is_taken_back() -> None:
    sizes = []
    for slip in (0.0, 0.1):
        policy = StigmergicPolicy(Parameters(push=0.0))
        for _ in range(4):
            sense, left = policy.observe(own(0.5))
        total = left.sum(-2)
        total[[TraceKind.AIM, TraceKind.AIMING]] = 0.0, 2.0
        policy.target = np.full(1, slip)  # this worker's; all found 0
        sizes.append(policy.choose(own(0.5), sense, total[None], Bounds.of(2, 1, 4096)).tolist())
    assert sizes == [[64, 64], [58, 58]]  # 64 exp(-0.1)


@pytest.mark.parametrize("part", [(0.5, 0.5), (0.15, 0.85)])
@pytest.mark.parametrize("grows", [1.0, 1.1, 2.0, 0.8])
def test_the_noise_scale_stays_while_the_batch_moves(grows: float, part: tuple[float, float]) -> None:
    """Of gradients whose noise is known exactly, workers of unequal batches leave what gives it back."""
    per_sample, signal, weight = 300.0, 0.15, np.array(part)
    policies = [StigmergicPolicy() for _ in part]
    for window in range(6):
        total = 100.0 * grows**window
        local, whole = signal + per_sample / (weight * total), signal + per_sample / total
        shares = noise_part(weight, local, np.array(whole), 2)
        heard = [p.habit.steady(float(n), whole, total, total) for p, n in zip(policies, shares, strict=True)]
        left = sum(p.observe(own(*of_one))[1][0] for p, of_one in zip(policies, heard, strict=True))
        assert left[TraceKind.NOISE] / left[TraceKind.HEARD] == pytest.approx(per_sample / total / whole)
        assert heard[0] == policies[0].habit.steady(float("nan"), whole, total, total)  # what was not measured
