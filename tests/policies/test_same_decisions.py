"""Decisions stay what they were when the code that makes them gets faster.

`recorded_decisions.json` was written by the code before it was made faster for 1,024 workers. After a change that is
meant to decide otherwise, write it anew: `python tests/policies/test_same_decisions.py >
tests/policies/recorded_decisions.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamix.policies.goodput import Goodput, wish
from dynamix.policies.learned.policy import LearnedPolicy, ResidualNet
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


def decided(case: str) -> dict[str, Any]:
    """What the rule wishes, what it decides, and what a policy around it decides, window by window."""
    wishing, rule, learned, bounds = Goodput(), Goodput(), LearnedPolicy(_net()), _bounds(case)
    windows = _windows(case)
    return {
        "wish": [wish(wishing.fit_model(w), w, bounds).tolist() for w in windows],
        "goodput": [rule.decide(w, bounds).tolist() for w in windows],
        "residual": [learned.decide(w, bounds).tolist() for w in windows],
    }


@pytest.mark.parametrize("case", CASES)
def test_the_same_windows_lead_to_the_same_decisions_as_before(case: str) -> None:
    before, now = json.loads(RECORDED.read_text())[case], decided(case)
    np.testing.assert_allclose(now["wish"], before["wish"], rtol=1e-9)
    for policy in ("goodput", "residual"):
        # Whole samples: another processor's last bit may move one from one worker to another.
        moved = np.abs(np.array(now[policy]) - np.array(before[policy]))
        assert moved.max() <= 1
        assert (moved > 0).mean() <= 0.02


if __name__ == "__main__":
    print(json.dumps({case: decided(case) for case in CASES}))
