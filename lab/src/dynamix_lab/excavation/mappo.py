"""MAPPO, a baseline (Yu et al. 2022): one actor for all agents, each on its own observation, and a central critic.

The learner is our own PPO, and the reward is the team's mean. As in the paper's comparison, it does not see traces
unless `MAPPOConfig.traces` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.errors import ConfigError
from dynamix_lab.excavation.ground import Shape
from dynamix_lab.excavation.learner import Actions, perceptron
from dynamix_lab.excavation.lessons import CURRICULUM, Lessons, Stage
from dynamix_lab.excavation.world import ACTIONS, ExcavationConfig, Seen
from dynamix_lab.training.distributions import categorical
from dynamix_lab.training.episodes import Episode
from dynamix_lab.training.ppo import PPO, PPOConfig


@dataclass(frozen=True, slots=True)
class MAPPOConfig:
    """Settings, ours. An update makes `epochs` passes over `rollout` steps of all worlds. Others as in `DQNConfig`."""

    traces: bool = False
    resters: tuple[float, float] = (0.0, 0.0)
    hidden: int = 64
    learning_rate: float = 1e-3
    gamma: float = 0.9
    gae_lambda: float = 0.95
    rollout: int = 100
    epochs: int = 8
    rows: int = 1024
    entropy_weight: float = 0.2
    reward_scale: float = 0.1
    cooling: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.cooling <= 1:
            raise ConfigError("cooling", self.cooling, "0 to 1", "0 keeps the learning rate")
        if self.rollout < 1 or self.epochs < 1:
            raise ConfigError(
                "rollout, epochs", (self.rollout, self.epochs), "1 or more each", "check the configuration"
            )


class TeamCriticNet(nn.Module):
    """Maps observations (N, W, F) to logits (N, W, A), each agent's from its own, and to the team's value (N,)."""

    def __init__(self, features: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.actor = perceptron(features, hidden, len(ACTIONS), generator)
        self.encode = perceptron(features, hidden, hidden, generator)
        self.critic = perceptron(2 * hidden, hidden, 1, generator)
        with torch.no_grad():
            for head in (self.actor, self.critic):
                list(head.parameters())[-2].mul_(0.01)  # begin with uniform actions and values of 0, nearly

    def forward(self, observed: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.encode(observed)) * mask[..., None]
        pooled = torch.cat([hidden.sum(1) / mask.sum(1, keepdim=True), hidden.amax(1)], -1)
        return self.actor(observed), self.critic(pooled).squeeze(-1)


class MAPPOTraining:
    """Has the interface, curriculum and steps of `learner.DQNTraining`; stages consist of whole rollouts."""

    def __init__(
        self,
        task: ExcavationConfig | None = None,
        config: MAPPOConfig | None = None,
        *,
        stages: tuple[Stage, ...] = CURRICULUM,
        worlds: int = 16,
        seed: int = 0,
        grounds: Callable[[np.random.Generator], Shape] | None = None,
    ) -> None:
        self.config = c = config or MAPPOConfig()
        if any(stage.steps % c.rollout for stage in stages):
            fix = "choose stages in whole rollouts, or another `rollout`"
            raise ConfigError("stages", stages, f"stages of a multiple of {c.rollout} steps", fix)
        self.lessons = Lessons(task, stages=stages, worlds=worlds, seed=seed, resters=c.resters, grounds=grounds)
        features = self.lessons.task.features
        net = TeamCriticNet(features, c.hidden, torch.Generator().manual_seed(seed))
        settings = PPOConfig(
            learning_rate=c.learning_rate,
            gamma=c.gamma,
            gae_lambda=c.gae_lambda,
            epochs=c.epochs,
            worker_rows=c.rows,
            entropy_weight=c.entropy_weight,
            max_gradient_norm=1.0,
        )
        self.learner = PPO(net, categorical, settings, seed=seed)
        self.mask = torch.ones(features)
        if not c.traces:
            self.mask[self.lessons.task.traces] = 0.0

    def run(self, steps: int | None = None, *, progress: Callable[[str, float], None] | None = None) -> None:
        """Train for at least `steps` steps of the worlds, in whole rollouts, or to the end."""
        lessons = self.lessons
        until = lessons.steps if steps is None else min(lessons.done + steps, lessons.steps)
        while lessons.done < until:
            rate = self.config.learning_rate * lessons.cooled(self.config.cooling)
            self.learner.optimizer.param_groups[0]["lr"] = rate
            self.learner.update([self.play()])
            if progress is not None:
                progress(f"{max(lessons.stage.agents)} agents", lessons.done / lessons.steps)

    def act(self, seen: Seen) -> Actions:
        """Draw actions from the policy, because it was trained as a stochastic one."""
        observed = torch.from_numpy(seen) * self.mask
        everybody = torch.ones(observed.shape[:-1], dtype=torch.bool)
        return np.asarray(self.learner.choose(observed, everybody).numpy())

    def state_dict(self) -> dict[str, Any]:
        return {"learner": self.learner.state_dict(), "lessons": self.lessons.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.lessons.load_state_dict(state["lessons"])

    def play(self) -> Episode:
        """One rollout. It ignores the horizon: an episode's last step is bootstrapped with the next one's value."""
        self.lessons.observe()  # may begin a stage
        present = torch.from_numpy(self.lessons.present)
        seen, chosen, rewards, acted = [], [], [], []
        for _ in range(self.config.rollout):
            now = self.lessons.observe()
            action = self.act(now)
            _, reward, _ = self.lessons.step(action)
            seen.append(torch.from_numpy(now) * self.mask)
            chosen.append(torch.from_numpy(action))
            acted.append(torch.from_numpy(self.lessons.acted))
            rewards.append(torch.from_numpy(reward).sum(-1) / present.sum(-1) * self.config.reward_scale)
        observed, paid, final = (
            torch.stack(seen),
            torch.stack(rewards).float(),
            torch.from_numpy(self.lessons.seen) * self.mask,
        )
        return Episode(
            observed=observed,
            mask=present.expand(observed.shape[:-1]),
            chosen=torch.stack(chosen),
            reward=paid,
            duration=torch.ones_like(paid),
            final_observed=final,
            final_mask=present,
            acted=torch.stack(acted),
        )
