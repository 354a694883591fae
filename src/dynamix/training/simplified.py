"""The paper's simplified learner in one file: cumulative reward, no clip, no advantage.

DYNAMIX (arXiv 2510.08522) describes PPO, but by third-party account its authors drop the clipped surrogate and the
advantage and update from cumulative reward. That is REINFORCE (Williams 1992) with reward-to-go and a categorical policy
per worker, learned in one place for all of them:

    grad J = E[ sum_t R_t  grad sum_i log pi(a_it | s_it, s_global,t) ],   R_t = r_t + d_t r_{t+1} + d_t d_{t+1} r_{t+2} + ...

with the team's reward r and the discount d_t = discount_per_s ^ (seconds of window t). Everything an episode needs is
here: `play` runs a policy in C simulated clusters at once, `Simplified.update` learns from what it brought back.
`clipped.py` is PPO over the same episodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.policies.learned.additive import AdditivePolicy
from dynamix.simulator import ClusterEnv
from dynamix.training.rewards import Reward
from dynamix.window import Window

LARGEST_REWARD = 2.0  # a lost measurement or a stall must not outweigh a whole episode


@dataclass(frozen=True, slots=True)
class SimplifiedConfig:
    """`discount_per_s` ours: the paper's gamma is per decision, but a decision lasts 0.2 s in one job and 20 s in another."""

    learning_rate: float = 1e-3
    discount_per_s: float = 0.8
    entropy_weight: float = 0.0
    max_gradient_norm: float = 1.0


@dataclass(slots=True)
class Episode:
    """T decisions in each of N clusters of W workers, with what each led to. NaN rewards are left out of learning."""

    observed: Tensor  # (T, N, W, F)
    mask: Tensor  # (T, N, W) bool, workers that took part
    chosen: Tensor  # (T, N, W) int64, index of each worker's action
    reward: Tensor  # (T, N) of the window that followed
    seconds: Tensor  # (T, N) that window's length
    final_observed: Tensor  # (N, W, F) after the last window
    final_mask: Tensor  # (N, W)


class Simplified:
    """Learner around a network that maps (N, W, F) and (N, W) to logits (N, W, A) and something it does not use.

    Own random generator; `state_dict` holds weights, optimizer and generator, so that resuming is exact.
    """

    def __init__(self, net: nn.Module, config: SimplifiedConfig | None = None, *, seed: int = 0) -> None:
        self.net, self.config = net, config or SimplifiedConfig()
        self.optimizer = torch.optim.Adam(net.parameters(), lr=self.config.learning_rate, eps=1e-5)
        self.generator = torch.Generator().manual_seed(seed)

    def choose(self, observed: Tensor, mask: Tensor) -> Tensor:
        """Sample each worker's action, (N, W) int64."""
        return sample(self.net(observed, mask)[0], self.generator)

    def update(self, episodes: list[Episode]) -> dict[str, float]:
        """One gradient step on whole episodes, which may differ in W."""
        gain, entropy = torch.zeros(()), torch.zeros(())
        for episode in episodes:
            mask, known = episode.mask.flatten(0, 1), torch.isfinite(episode.reward).flatten()
            log_all = self.net(episode.observed.flatten(0, 1), mask)[0].log_softmax(-1)
            log_taken = log_all.gather(-1, episode.chosen.flatten(0, 1).unsqueeze(-1)).squeeze(-1) * mask
            worth = reward_to_go(episode.reward, episode.seconds, self.config.discount_per_s).flatten()
            gain = gain + (worth * log_taken.sum(-1))[known].mean() / len(episodes)
            spread = -(log_all.exp() * log_all).sum(-1) * mask
            entropy = entropy + spread.sum() / mask.sum().clamp(min=1) / len(episodes)
        self.optimizer.zero_grad(set_to_none=True)
        (-gain - self.config.entropy_weight * entropy).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.config.max_gradient_norm)
        self.optimizer.step()
        return {"gain": float(gain.detach()), "entropy": float(entropy.detach()), "reward": mean_reward(episodes)}

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


@torch.no_grad()
def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Categorical samples (...) from logits (..., A), by the Gumbel maximum."""
    uniform = torch.rand(logits.shape, generator=generator).clamp(min=1e-20)
    return (logits - torch.log(-torch.log(uniform))).argmax(-1)


def reward_to_go(reward: Tensor, seconds: Tensor, discount_per_s: float) -> Tensor:
    """Discounted sum (T, N) of each window's reward and all later ones; unknown rewards count nothing.

    >>> two = torch.tensor([[1.0], [8.0]])
    >>> reward_to_go(two, torch.tensor([[3.0], [1.0]]), 0.5).flatten().tolist()        # 1 + 0.5^3 * 8
    [2.0, 8.0]
    """
    worth, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        running = torch.nan_to_num(reward[t]) + discount_per_s ** seconds[t] * running
        worth[t] = running
    return worth


def mean_reward(episodes: list[Episode]) -> float:
    """Over all known windows of all episodes, for the log."""
    return float(torch.cat([episode.reward.flatten() for episode in episodes]).nanmean())


@torch.no_grad()
def play(
    env: ClusterEnv,
    policy: AdditivePolicy,
    choose: Callable[[Tensor, Tensor], Tensor],
    reward: Reward,
    window: Window,
    windows: int,
) -> Episode:
    """`windows` decisions in every cluster of `env`, the first one on `window`; `choose` samples the actions."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    paid, lasted = [], []
    for _ in range(windows):
        observed, mask = torch.from_numpy(policy.observe(window)), torch.from_numpy(window.batch_size > 0)
        chosen = choose(observed, mask)
        rows.append((observed, mask, chosen))
        began = env.clock_s
        window = env.step(policy.allocate(window, env.bounds, chosen.numpy()))
        lasted.append(env.clock_s - began)
        paid.append(np.clip(reward.update(window), -LARGEST_REWARD, LARGEST_REWARD))
    observed, mask, chosen = (torch.stack(part) for part in zip(*rows, strict=True))
    return Episode(
        observed=observed,
        mask=mask,
        chosen=chosen,
        reward=torch.from_numpy(np.array(paid)).float(),
        seconds=torch.from_numpy(np.array(lasted)).float(),
        final_observed=torch.from_numpy(policy.observe(window)),
        final_mask=torch.from_numpy(window.batch_size > 0),
    )
