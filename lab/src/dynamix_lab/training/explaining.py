"""What a learned policy does: how far it leaves the rule, which features move it, and where to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError
from dynamix.policies.learned.policy import INPUTS, LearnedPolicy
from dynamix.window import Floats
from dynamix_lab.simulator import sample_clusters
from dynamix_lab.simulator.env import ClusterEnv

POINTS = (0.05, 0.25, 0.5, 0.75, 0.95)  # quantiles of a feature at which answers are shown
_MOST_ROWS = 1_500  # windows of a cluster that features are permuted over


@dataclass(frozen=True)
class SeenActions:
    """What a policy saw and did in the simulator: observations (N, W, F), log changes by its net, and its answers."""

    observed: NDArray[np.float32]
    total: Floats  # (N,) its global batch over the rule's
    moved: Floats  # (N,) part of the round that it gives to other workers than the rule


def explain_policy(
    policy: LearnedPolicy,
    *,
    seed: int = 0,
    workers: int = 8,
    clusters: int = 64,
    windows: int = 20,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Plain values about a policy of the residual kind, from `windows` decisions on simulated clusters.

    differs    quantiles of how far its answers are from the rule's: `total` (global batch over the rule's) and `moved`
               (part of the round); `same`: part of the answers that are the rule's
    features   by importance, the largest first: `name`, `shares` (mean |log change| of a worker's size when the
               feature is shuffled over all that was seen), `total` (the same of the global batch), `at` (the feature's
               values at the 5, 25, 50, 75 and 95 % quantiles) and `size` (what its net multiplies a worker's size by
               there, when only this worker's feature takes that value)

    Shuffling tells what the net uses, not what it would be worth without: features overlap.
    """
    if not isinstance(policy, LearnedPolicy):
        allowed = "a learned policy of the residual kind, such as dynamix"
        raise ConfigError("policy", type(policy).__name__, allowed, "name another, or see `dynamix policy show`")
    seen = _follow(policy, seed, workers, clusters, windows)
    rng = np.random.default_rng(seed)
    rows = seen.observed[rng.permutation(len(seen.observed))[:_MOST_ROWS]]
    delta, growth = _act(policy, rows)
    found: list[dict[str, Any]] = []
    for at, name in enumerate(INPUTS):
        if progress is not None:
            progress(name, at / len(INPUTS))
        values = rows[..., at]
        shuffled = rows.copy()
        shuffled[..., at] = rng.permutation(values.ravel()).reshape(values.shape)
        other_delta, other_growth = _act(policy, shuffled)
        points = np.quantile(values, POINTS)
        effects = {"shares": np.abs(other_delta - delta).mean(), "total": np.abs(other_growth - growth).mean()}
        sizes = [_size_at(policy, rows, at, float(point)) for point in points]
        found.append(
            {
                "name": name,
                **_plain(effects),
                "at": _rounded(points.astype(np.float64)),
                "size": _rounded(np.array(sizes)),
            }
        )
    found.sort(key=lambda feature: -(feature["shares"] + feature["total"]))
    same = float(((np.abs(seen.total - 1) < 1e-3) & (seen.moved < 1e-3)).mean())
    quantiles = {name: _rounded(np.quantile(getattr(seen, name), POINTS)) for name in ("total", "moved")}
    return {
        "cluster": "simulator",
        **{"seed": seed, "workers": workers, "clusters": clusters, "windows": windows},
        "quantiles": list(POINTS),
        "differs": {**quantiles, "same": same},
        "features": found,
    }


def _follow(policy: LearnedPolicy, seed: int, workers: int, clusters: int, windows: int) -> SeenActions:
    env = ClusterEnv(sample_clusters(clusters, workers, seed), seed=seed)
    window, observed, totals, moves = env.reset(), [], [], []
    for _ in range(windows):
        seen = policy.observe(window, env.bounds)
        delta, growth = policy.act(seen, window.batch_size > 0)
        sizes = policy.allocate(window, env.bounds, delta, growth)
        wish = policy.allocate(window, env.bounds, 0 * delta, 0 * growth)  # the rule's answer, as whole numbers
        observed.append(seen)
        total, rules = np.maximum(sizes.sum(-1), 1.0), np.maximum(wish.sum(-1), 1.0)
        totals.append(total / rules)
        moves.append(np.abs(sizes / total[..., None] - wish / rules[..., None]).sum(-1) / 2)
        window = env.step(sizes)
    return SeenActions(np.concatenate(observed), np.concatenate(totals), np.concatenate(moves))


def _act(policy: LearnedPolicy, rows: NDArray[np.float32]) -> tuple[Floats, Floats]:
    """Log changes by the net of sizes (N, W), which sum to 0 over workers, and of the global batch (N,)."""
    delta, growth = policy.act(rows, np.ones(rows.shape[:-1], dtype=bool))
    return delta - delta.mean(-1, keepdims=True), growth


def _size_at(policy: LearnedPolicy, rows: NDArray[np.float32], at: int, value: float) -> float:
    """What the net multiplies the first worker's size by, in the mean, when its feature has this value."""
    asked = rows.copy()
    asked[:, 0, at] = value
    return float(np.exp(_act(policy, asked)[0][:, 0].mean()))


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _plain(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}
