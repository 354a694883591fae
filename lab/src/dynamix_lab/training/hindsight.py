"""What another allocation would have done in the window that followed: exact in the simulator, and differentiable.

A decision is judged under the actual slowdowns, jitter and exchange times of the next window, so its gradient needs no
sampled actions and no critic. It uses the actual steps, not their means: being the slowest at times has a cost, and so
hedging is learned.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dynamix.policies.learned.policy import LEAST_GROWTH, MOST_GROWTH, LearnedPolicy
from dynamix.window import Floats, Ints, Window
from dynamix_lab.simulator import ClusterEnv
from dynamix_lab.simulator.compute import near_normal


class RecordingEnv(ClusterEnv):
    """A `ClusterEnv` that records the disturbances of its last window's steps.

    For its k steps: `factors` (C, W, k) on the undisturbed seconds, `extras` (C, W, k) added seconds whatever the
    batch, `normals` (C, W, k) draws that determine the samples' costs, `exchanges` (C, k) in seconds.
    """

    def step(self, sizes: ArrayLike, lengths: Ints | None = None) -> Window:
        self._trail: list[tuple[Floats, Floats, Floats, Floats]] = []
        window = super().step(sizes, lengths)
        measured = [np.stack(part, -1) for part in zip(*self._trail[-self.interval :], strict=True)]
        self.factors, self.extras, self.normals, self.exchanges = measured
        return window

    def reset(self) -> Window:
        self._trail = []
        return super().reset()

    def advance(self, running: np.ndarray | None = None) -> tuple[Floats, Floats]:
        exchange, undisturbed = self.exchange(), self.costs.seconds(self.batch.astype(np.float64))
        extra = normal = np.zeros(self.batch.shape)
        if self.clusters.jitter_s is not None:
            extra = self.clusters.jitter_s * near_normal(self._slices.bits(self.counter))
        if self.clusters.cost_sigma is not None:
            normal = self._samples.normal(self.counter)
        busy, whole = super().advance(running)
        if self.clusters.cost_sigma is not None:
            undisturbed = undisturbed + self.clusters.beta * (self._work - self.batch)
        self._trail.append((np.maximum(busy - extra, 1e-9) / np.maximum(undisturbed, 1e-12), extra, normal, exchange))
        return busy, whole


@dataclass(frozen=True, slots=True)
class Decisions:
    """N decisions with one W, and what followed. All tensors are float32, except mask and guided, which are bool.

    observed, mask      (N, W, F) the policy's input; (N, W) active workers
    guided              (N,) whether a noise scale is known; otherwise the global batch does not change
    wish, low, high     (N, W) the rule's sizes, and the limits by trust and bounds
    alpha, beta, cliff_at, cliff_slope   (N, W) true costs (`simulator.compute.Costs`)
    factors, extras, normals, exchanges   (N, W, k), thrice, and (N, k) `RecordingEnv`
    sigma               (N,) sd of the log of one sample's cost
    overlap, base, noise, rate   (N,) exponent of the step time; base batch; noise scale at it, growth with log B
    target              (N, W) a teacher's sizes; NaN if there are none
    """

    observed: Tensor
    mask: Tensor
    guided: Tensor
    wish: Tensor
    low: Tensor
    high: Tensor
    alpha: Tensor
    beta: Tensor
    cliff_at: Tensor
    cliff_slope: Tensor
    factors: Tensor
    extras: Tensor
    normals: Tensor
    exchanges: Tensor
    sigma: Tensor
    overlap: Tensor
    base: Tensor
    noise: Tensor
    rate: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.base)

    def take(self, rows: Tensor) -> Decisions:
        """Some of the decisions."""
        return Decisions(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def sizes(self, delta: Tensor, growth: Tensor) -> Tensor:
        """Real sizes (N, W) of actions (N, W), (N,), as `LearnedPolicy.allocate` computes them before rounding."""
        log_wish = self.wish.log()
        moved = log_wish + delta - delta.mean(-1, keepdim=True)
        growth = torch.where(self.guided, growth.clamp(LEAST_GROWTH, MOST_GROWTH), torch.zeros_like(growth))
        whole = log_wish.logsumexp(-1) - moved.logsumexp(-1) + growth
        sizes = (moved + whole.unsqueeze(-1)).exp().clamp(self.low, self.high)
        kept = self.wish.sum(-1, keepdim=True) / sizes.sum(-1, keepdim=True)
        return torch.where(self.guided.unsqueeze(-1), sizes, sizes * kept)

    def log_goodput(self, sizes: Tensor) -> Tensor:
        """Log progress a second (N,) of the window that followed, up to a constant, if it had had `sizes` (N, W)."""
        return self._log_goodput(sizes.sum(-1), self.busy(sizes).amax(1))

    def busy(self, sizes: Tensor) -> Tensor:
        """Seconds (N, W, k) of each worker in each step."""
        beyond = (sizes / self.cliff_at - 1).clamp(min=0)
        seconds = ((self.alpha + self.beta * sizes) * (1 + self.cliff_slope * beyond)).unsqueeze(-1)
        if self.sigma.any():
            # As `costs_of_samples`: other sizes would have had similar samples, whose sum varies less for more of them.
            variance = (self.sigma.square().expm1()[:, None] / sizes.clamp(min=1.0)).log1p().unsqueeze(-1) + 1e-12
            unlike = (variance.sqrt() * self.normals - variance / 2).expm1()
            seconds = seconds + (self.beta * sizes).unsqueeze(-1) * unlike
        return (seconds * self.factors + self.extras).clamp(min=1e-6)

    def _log_goodput(self, total: Tensor, slowest: Tensor) -> Tensor:
        """Log goodput for totals (N, ...) and slowest seconds (N, ..., k)."""
        more = (slice(None), *[None] * (total.dim() - 1))
        overlap, exchange = self.overlap[more].unsqueeze(-1), self.exchanges[more].clamp(min=1e-9)
        if total.dim() > 1:
            exchange = self.exchanges.unsqueeze(1).clamp(min=1e-9)
        step = torch.logaddexp(overlap * slowest.log(), overlap * exchange.log()) / overlap
        phi = self.noise[more] * (total / self.base[more]) ** self.rate[more]
        gain = (phi + self.base[more]) / (phi + total)
        return total.log() + gain.log() - step.exp().mean(-1).log()

    def credit(self, delta: Tensor, growth: Tensor, usual: Tensor) -> Tensor:
        """Counterfactual credit (N, W): log goodput less that if only worker i had acted as `usual` (N, W)."""
        sizes, others = self.sizes(delta, growth), self.sizes(usual, growth)
        busy, total = self.busy(sizes), sizes.sum(-1)
        top, second = busy.topk(2, dim=1).values.unbind(1) if busy.shape[1] > 1 else (busy[:, 0], 0 * busy[:, 0])
        rest = torch.where(busy == top.unsqueeze(1), second.unsqueeze(1), top.unsqueeze(1))
        instead = torch.maximum(rest, self.busy(others))
        without = self._log_goodput(total.unsqueeze(1) - sizes + others, instead)
        return self._log_goodput(total, busy.amax(1)).unsqueeze(1) - without


class DecisionRecorder:
    """Collects `Decisions` along a rollout of one environment."""

    def __init__(self, env: RecordingEnv) -> None:
        if env.costs.curve is not None and (env.costs.curve >= 0).any():
            raise ValueError("measured curves are for tests; training clusters have none")
        if env.clusters.costs_known is not None:
            raise ValueError("what samples cost is not told to training clusters")
        self.env = env
        self.rows: list[dict[str, np.ndarray]] = []

    def before(self, policy: LearnedPolicy, window: Window, observed: np.ndarray, target: Floats | None) -> None:
        """Record the state in which a decision is made, after `policy.observe`."""
        env, bounds = self.env, self.env.bounds
        low, high = policy.trusted(window)
        row = {"observed": observed, "mask": window.batch_size > 0, "guided": policy.fitted.now.guided}
        row |= {name: np.clip(size, bounds.low, bounds.high) for name, size in (("low", low), ("high", high))}
        row |= {"wish": np.maximum(policy.memory.wish, 0.5), "noise": env.critical_share * env.true_noise_scale()}
        row["target"] = np.full(observed.shape[:-1], np.nan) if target is None else target
        self.rows.append(row)

    def after(self) -> None:
        """Record the disturbances of the window after that decision."""
        met = ("factors", "extras", "normals", "exchanges")
        self.rows[-1] |= {name: getattr(self.env, name) for name in met}

    def decisions(self) -> Decisions:
        """All decisions, (T * C) rows in order of time."""
        c, times = self.env.clusters, len(self.rows)
        fixed: dict[str, Any] = {"alpha": c.alpha, "beta": c.beta, "overlap": c.overlap, "base": c.base_batch}
        fixed["cliff_at"] = np.full(c.shape, 1e12) if c.cliff_at is None else c.cliff_at
        fixed["cliff_slope"] = np.zeros(c.shape) if c.cliff_slope is None else c.cliff_slope
        fixed["rate"] = np.zeros(c.shape[0]) if c.noise_rho is None else c.noise_rho
        fixed["sigma"] = np.zeros(c.shape[0]) if c.cost_sigma is None else c.cost_sigma
        stacked = {name: np.concatenate([row[name] for row in self.rows]) for name in self.rows[0]}
        stacked |= {name: np.concatenate([value] * times) for name, value in fixed.items()}
        kinds = {name: bool if name in ("mask", "guided") else np.float32 for name in stacked}
        arrays = {name: np.ascontiguousarray(value, dtype=kinds[name]) for name, value in stacked.items()}
        return Decisions(**{name: torch.from_numpy(array) for name, array in arrays.items()})
