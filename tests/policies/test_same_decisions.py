"""Decisions stay what they were when the code that makes them changes.

`recorded_decisions.json` was written by the code before. After a change that is meant to decide otherwise, write it
anew: `python tests/policies/test_same_decisions.py > tests/policies/recorded_decisions.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamix.policies.goodput import Goodput, wish
from dynamix.policies.guard import Guard
from dynamix.policies.learned.policy import LearnedPolicy, ResidualNet
from dynamix.policies.proportional import LBBSP
from dynamix.policies.stigmergic.policy import Parameters, StigmergicPolicy, pretrained
from dynamix.policies.stigmergic.traces import Own
from dynamix.policies.stigmergic.worker import Sense
from dynamix.window import Bounds, Window

RECORDED = Path(__file__).with_name("recorded_decisions.json")
WINDOWS = 9
# name -> shape of a window, what limits the global batch (of the largest possible), whether there is a noise scale
CASES: dict[str, tuple[tuple[int, ...], float, bool]] = {
    "three": ((3,), 1.0, True),
    "many": ((24,), 1.0, True),
    "many, limited": ((24,), 0.2, True),
    "many, no noise scale": ((24,), 1.0, False),
    "clusters": ((3, 4), 0.5, True),
}


def _bounds(case: str) -> Bounds:
    shape, part, _ = CASES[case]
    high = np.where(np.arange(shape[-1]) % 3 == 0, 200, 400)
    return Bounds.of(shape[-1], 2, high, total_high=round(part * int(high.sum())))


def _windows(case: str) -> list[Window]:
    """Affine workers that slow down and recover, with jitter, lost times and a noise scale that grows with the
    batch.
    """
    shape, _, noisy = CASES[case]
    rng = np.random.default_rng([17, *shape])
    alpha, beta = rng.uniform(0, 0.05, shape), rng.uniform(5e-4, 4e-3, shape)
    slow, sizes, windows = np.ones(shape), np.full(shape, 64), []
    for i in range(WINDOWS):
        slow = np.where(rng.random(shape) < 0.2, rng.uniform(1, 3, shape), slow)
        busy = (alpha + beta * sizes) * slow * np.exp(0.03 * rng.normal(size=shape))
        lost = rng.random(shape) < 0.05
        total = sizes.sum(-1)
        slowest = busy.max(-1, keepdims=True)
        known: dict[str, Any] = {"compute": np.where(lost, np.nan, busy), "wait": slowest - busy, "cpu": 0.5}
        known |= {"compute_std": 0.05 * busy * rng.uniform(0.5, 4, shape), "communication": 0.05, "data": 0.001}
        known |= {"steps": 5.0, "base_batch": 64.0 * shape[-1], "noise": np.nan, "signal": 1.0}
        if noisy and i:
            known["noise"] = 3000.0 * (total / 200) ** 0.4 * np.exp(0.1 * rng.normal(size=shape[:-1]))
        windows.append(Window.of(sizes, **known, loss_change=rng.normal(size=shape)))
        sizes = np.clip(np.rint(sizes * np.exp(0.3 * rng.normal(size=shape))), 2, 200).astype(np.int64)
    return windows


def _net() -> ResidualNet:
    """Weights from NumPy's generator: the same whatever torch's is."""
    net, rng = ResidualNet(), np.random.default_rng(5)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.from_numpy(0.2 * rng.normal(size=tuple(weight.shape))))
    return net


def _decided(case: str) -> dict[str, Any]:
    """What the rule wishes, what it decides, and what policies around it decide, window by window."""
    wishing, rule, learned, watched = Goodput(), Goodput(), LearnedPolicy(_net()), Guard(LBBSP())
    windows, bounds = _windows(case), _bounds(case)
    return {
        "wish": [wish(wishing.fit_model(w), w, bounds).tolist() for w in windows],
        "goodput": [rule.decide(w, bounds).tolist() for w in windows],
        "residual": [learned.decide(w, bounds).tolist() for w in windows],
        "guarded": [watched.decide(w, bounds).tolist() for w in windows],
    }


# ------------------------------------------------------------ the stigmergic rule, whose own sizes come back to it

BOUNDED = Bounds.of(5, 16, [64, 128, 200, 512, 512], total_low=160, total_high=900, quantum=4, max_change=1.5)
HESITANT = {"eager": 0.2, "wary": 16.0, "still": 0.03, "ahead": 0.2}
RULES: dict[str, tuple[Callable[[], StigmergicPolicy], int, Bounds]] = {
    "by hand": (StigmergicPolicy, 5, Bounds.of(5, 1, 512)),
    "learned": (pretrained, 24, Bounds.of(24, 1, 300)),
    "within bounds": (lambda: StigmergicPolicy(Parameters(push=0.6, wary=3.0, kin=1.0)), 5, BOUNDED),
    "hesitant": (lambda: StigmergicPolicy(Parameters(**HESITANT)), 5, Bounds.of(5, 1, 512)),
    "alone": (lambda: StigmergicPolicy(shared=False), 3, Bounds.of(3, 1, 512)),
}


def _ruled(name: str, before: list[list[int]] | None) -> dict[str, Any]:
    """Its sizes and traces; a window has the sizes that were answered `before`, so that one difference stays one.

    Workers stall once, slow down and recover; the noise scale is lost for a while, and later measured by norms of
    gradients; the exchange becomes dear.
    """
    make, workers, bounds = RULES[name]
    policy, left = make(), list[Any]()
    observe = policy.observe

    def watched(own: Own) -> tuple[Sense, Any]:
        sense, traces = observe(own)
        left[:] = [traces.sum(0) if policy.shared else traces]
        return sense, traces

    policy.observe = watched  # type: ignore[method-assign]
    rng, sizes = np.random.default_rng(workers), np.full(workers, 64)
    alpha, beta = rng.uniform(0, 0.05, workers), rng.uniform(5e-4, 4e-3, workers)
    told: dict[str, Any] = {"sizes": [], "traces": []}
    for i in range(24):
        slow = np.where(np.arange(workers) == 1, 3.0 if i == 9 else 1.9 if 14 <= i < 19 else 1.0, 1.0)
        busy = (alpha + beta * sizes) * slow * np.exp(0.02 * rng.normal(size=workers))
        noise = np.nan if i in (0, 11, 12) else 2000.0 * np.exp(0.1 * rng.normal())
        known = {"compute": np.where(rng.random(workers) < 0.03, np.nan, busy), "compute_std": 0.04 * busy, "steps": 5}
        known |= {"wait": busy.max() - busy, "communication": 0.02 if i < 17 else 0.3, "noise": noise, "signal": 1.0}
        if i >= 20:
            known |= {"gradient_norm_sq": 2.0 + 900.0 / sizes * np.exp(0.1 * rng.normal(size=workers))}
            known |= {"global_norm_sq": 2.0 + 900.0 / sizes.sum()}
        answer = policy.decide(Window.of(sizes, **known, data=0.001, base_batch=64 * workers), bounds)
        told["sizes"].append(answer.tolist())
        told["traces"].append([float(f"{trace:.9g}") for trace in left[0].flat])
        sizes = answer if before is None else np.array(before[i])
    return told


def _require_alike(now: Any, before: Any) -> None:
    """Whole samples: another processor's last bit may move one from one worker to another."""
    moved = np.abs(np.array(now) - np.array(before))
    assert moved.max() <= 1
    assert (moved > 0).mean() <= 0.02


@pytest.mark.parametrize("case", CASES)
def test_the_same_windows_lead_to_the_same_decisions_as_before(case: str) -> None:
    before, now = json.loads(RECORDED.read_text())[case], _decided(case)
    np.testing.assert_allclose(now["wish"], before["wish"], rtol=1e-9)
    for policy in ("goodput", "residual", "guarded"):
        _require_alike(now[policy], before[policy])


@pytest.mark.parametrize("name", RULES)
def test_the_stigmergic_rule_leaves_the_same_traces_and_takes_the_same_sizes_as_before(name: str) -> None:
    before = json.loads(RECORDED.read_text())[name]
    now = _ruled(name, before["sizes"])
    np.testing.assert_allclose(now["traces"], before["traces"], rtol=1e-7, atol=1e-9)
    _require_alike(now["sizes"], before["sizes"])


if __name__ == "__main__":
    print(json.dumps({case: _decided(case) for case in CASES} | {name: _ruled(name, None) for name in RULES}))
