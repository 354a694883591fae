"""Proximal policy optimisation for a team: variable W, masks, a central critic, exact resume. Torch only.

Clipped surrogate (Schulman et al. 2017) summed over workers: each worker's action has a ratio of its own and all share
the team's advantage (GAE). A network may also give one action for the whole cluster ("shared"), which counts as one
more agent. An ordinary single-agent task is W = 1 without a shared action.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Normal


class ActorCritic(Protocol):
    """Observations (N, W, F) and active workers (N, W) to means (N, W, L) and (N, G) and values (N,); L or G may be 0."""

    log_std_local: nn.Parameter
    log_std_shared: nn.Parameter

    def __call__(self, observed: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """Defaults follow Schulman et al. 2017; `gamma` is per decision."""

    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    epochs: int = 10
    minibatch: int = 64
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    anchor_weight: float = 0.0  # pull of the means towards `PPO.anchor` (squared, in standard deviations)
    max_gradient_norm: float = 0.5


@dataclass(slots=True)
class Rollout:
    """T decisions of N clusters: tensors (T, N, ...); `values` has T + 1 entries. `done` ends an episode after it."""

    observed: Tensor  # (T, N, W, F)
    mask: Tensor  # (T, N, W) bool
    local: Tensor  # (T, N, W, L)
    shared: Tensor  # (T, N, G)
    log_local: Tensor  # (T, N, W)
    log_shared: Tensor  # (T, N)
    values: Tensor  # (T + 1, N)
    rewards: Tensor  # (T, N)
    done: Tensor  # (T, N) bool
    credit: Tensor | None = None  # (T, N, W) advantage of each worker's own action; None: the team's

    @classmethod
    def of(cls, acts: list[tuple[Tensor, Tensor, Act]], last: Tensor, rewards: Tensor, done: Tensor) -> Rollout:
        """From (observed, mask, act) per decision, the value after the last one, and rewards and ends (T, N)."""
        observed, masks, taken = zip(*acts, strict=True)
        return cls(
            observed=torch.stack(observed),
            mask=torch.stack(masks),
            local=torch.stack([a.local for a in taken]),
            shared=torch.stack([a.shared for a in taken]),
            log_local=torch.stack([a.log_local for a in taken]),
            log_shared=torch.stack([a.log_shared for a in taken]),
            values=torch.stack([a.value for a in taken] + [last]),
            rewards=rewards,
            done=done,
        )


@dataclass(frozen=True, slots=True)
class Act:
    """One sampled decision: actions (N, W, L) and (N, G), their log-probabilities (N, W) and (N,), values (N,)."""

    local: Tensor
    shared: Tensor
    log_local: Tensor
    log_shared: Tensor
    value: Tensor


class PPO:
    """Learner around an actor-critic `net`. Own random generator, so global RNG state neither matters nor moves.

    `state_dict` holds weights, optimizer and generator: stopping and resuming gives bit-identical weights.
    """

    def __init__(self, net: nn.Module, config: PPOConfig = PPOConfig(), *, seed: int = 0) -> None:
        self.net, self.config = net, config
        self.optimizer = torch.optim.Adam(net.parameters(), lr=config.learning_rate, eps=1e-5)
        self.generator = torch.Generator().manual_seed(seed)
        self.anchor: nn.Module | None = None

    @torch.no_grad()
    def act(self, observed: Tensor, mask: Tensor) -> Act:
        """Sample from the policy."""
        local, shared, value = self.net(observed, mask)
        std_local, std_shared = self._stds()
        local = local + std_local * torch.randn(local.shape, generator=self.generator)
        shared = shared + std_shared * torch.randn(shared.shape, generator=self.generator)
        log_local, log_shared, value, _ = self._evaluate(observed, mask, local, shared)
        return Act(local, shared, log_local, log_shared, value)

    @torch.no_grad()
    def value(self, observed: Tensor, mask: Tensor) -> Tensor:
        """Values (N,)."""
        value: Tensor = self.net(observed, mask)[2]
        return value

    def update(self, rollouts: list[Rollout]) -> dict[str, float]:
        """One PPO update from rollouts that may differ in W; returns means of the losses for the log."""
        flats = [self._flatten(r) for r in rollouts]
        totals = {"policy": 0.0, "value": 0.0, "entropy": 0.0}
        batches = 0
        for _ in range(self.config.epochs):
            work = [(flat, rows) for flat in flats for rows in self._minibatches(len(flat["returns"]))]
            for i in torch.randperm(len(work), generator=self.generator).tolist():
                flat, rows = work[i]
                loss, parts = self._loss({name: tensor[rows] for name, tensor in flat.items()})
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), self.config.max_gradient_norm)
                self.optimizer.step()
                batches += 1
                for name, value in parts.items():
                    totals[name] += float(value.detach())
        return {name: value / max(batches, 1) for name, value in totals.items()}

    def advantages(self, rollout: Rollout) -> Tensor:
        """Generalised advantage estimates (T, N) (Schulman et al. 2016)."""
        c, advantage = self.config, torch.zeros_like(rollout.rewards)
        running = torch.zeros_like(rollout.rewards[0])
        for t in reversed(range(len(rollout.rewards))):
            goes_on = (~rollout.done[t]).to(rollout.rewards.dtype)
            surprise = rollout.rewards[t] + c.gamma * goes_on * rollout.values[t + 1] - rollout.values[t]
            running = surprise + c.gamma * c.gae_lambda * goes_on * running
            advantage[t] = running
        return advantage

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": {name: value.clone() for name, value in self.net.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.generator.set_state(state["generator"])

    def _stds(self) -> tuple[Tensor, Tensor]:
        local, shared = self.net.log_std_local, self.net.log_std_shared
        assert isinstance(local, Tensor)
        assert isinstance(shared, Tensor)
        return local.exp(), shared.exp()

    def _evaluate(self, observed: Tensor, mask: Tensor, local: Tensor, shared: Tensor) -> tuple[Tensor, ...]:
        """Log-probabilities (N, W) and (N,), values (N,), squared distance of the means from the anchor's (N,)."""
        mean_local, mean_shared, value = self.net(observed, mask)
        std_local, std_shared = self._stds()
        log_local = Normal(mean_local, std_local).log_prob(local).sum(-1) * mask
        log_shared = Normal(mean_shared, std_shared).log_prob(shared).sum(-1)
        drift = torch.zeros_like(value)
        if self.anchor is not None:
            with torch.no_grad():
                held_local, held_shared, _ = self.anchor(observed, mask)
            drift = (((mean_local - held_local) / std_local.detach()) ** 2).sum(-1).mul(mask).sum(-1)
            drift = drift + (((mean_shared - held_shared) / std_shared.detach()) ** 2).sum(-1)
        return log_local, log_shared, value, drift

    def _flatten(self, r: Rollout) -> dict[str, Tensor]:
        advantage = self.advantages(r)
        returns = advantage + r.values[:-1]
        names = ("observed", "mask", "local", "shared", "log_local", "log_shared")
        flat = {name: getattr(r, name).flatten(0, 1) for name in names}
        if r.credit is not None:
            flat["credit"] = r.credit.flatten(0, 1)
        return {**flat, "advantage": advantage.flatten(), "returns": returns.flatten()}

    def _minibatches(self, rows: int) -> list[Tensor]:
        order = torch.randperm(rows, generator=self.generator)
        return [part for part in order.split(self.config.minibatch) if len(part) > 1]

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        c, mask = self.config, batch["mask"]
        log_local, log_shared, value, drift = self._evaluate(batch["observed"], mask, batch["local"], batch["shared"])
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        own = advantage[:, None]
        if "credit" in batch:
            own = batch["credit"] / (batch["credit"][mask].std() + 1e-8)  # zero where an action changed nothing
        gain = (self._clipped(log_local - batch["log_local"], own) * mask).sum(-1)
        if batch["shared"].shape[-1]:
            gain = gain + self._clipped(log_shared - batch["log_shared"], advantage)
        policy = -gain.mean()
        critic = (batch["returns"] - value).square().mean()
        std_local, std_shared = self._stds()
        entropy = std_local.log().sum() + std_shared.log().sum()
        loss = policy + c.value_weight * critic - c.entropy_weight * entropy + c.anchor_weight * drift.mean()
        return loss, {"policy": policy, "value": critic, "entropy": entropy}

    def _clipped(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        ratio = log_ratio.exp()
        return torch.minimum(ratio * advantage, ratio.clamp(1 - self.config.clip, 1 + self.config.clip) * advantage)
