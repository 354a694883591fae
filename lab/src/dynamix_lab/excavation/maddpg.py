"""MADDPG, a baseline (Lowe et al. 2017), by AgileRL: one actor for all agents, a central critic of what all see and do.

AgileRL brings far more than the laboratory needs, so it is an extra: `pip install './lab[maddpg]'`,
best in an environment of its own. Networks, Gumbel-softmax and updates are its own; ours are the memory, because its
keeps one object per step, and that the agents act by its actor directly. Rewards are the team's mean, no traces are
seen, as with MAPPO.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import ConfigError
from dynamix_lab.excavation.learner import Actions
from dynamix_lab.excavation.lessons import CURRICULUM, Lessons, Stage
from dynamix_lab.excavation.world import ACTIONS, ExcavationConfig, Seen
from dynamix_lab.installed import how_to_install


@dataclass(frozen=True, slots=True)
class MADDPGConfig:
    """Ours by trials: the critic's rate (AgileRL's 0.01 learned less). Settings that `DQNConfig` has too are as there,
    the rest AgileRL's.

    learn_every  steps of the worlds between two updates of every agent's critic and actor
    capacity     steps of a world remembered; learning begins with `warm_up` of them
    """

    hidden: int = 64
    actor_rate: float = 1e-3
    critic_rate: float = 1e-3
    gamma: float = 0.9
    tau: float = 0.01
    batch: int = 256
    learn_every: int = 5
    capacity: int = 30_000
    warm_up: int = 2_000
    reward_scale: float = 0.1

    def __post_init__(self) -> None:
        if not (0 <= self.gamma < 1 and min(self.hidden, self.batch, self.learn_every) >= 1):
            given = (self.gamma, self.hidden, self.batch, self.learn_every)
            allowed = "0 to less than 1, and 1 or more each"
            raise ConfigError("gamma, hidden, batch, learn_every", given, allowed, "check the configuration")
        if not self.batch <= self.warm_up <= self.capacity:
            raise ConfigError("warm_up", self.warm_up, "batch to capacity", "check the configuration")


class MADDPGTraining:
    """The same curriculum and number of steps of the worlds as `learner.DQNTraining`.

    The critic has room for the largest number of agents. An agent that is absent in a stage is seen as zeros, but
    learns with the others from the same reward, and has actions where AgileRL asks its actors for the next ones. Raises
    `ConfigError` if AgileRL is not installed.
    """

    def __init__(
        self,
        task: ExcavationConfig | None = None,
        config: MADDPGConfig | None = None,
        *,
        stages: tuple[Stage, ...] = CURRICULUM,
        worlds: int = 16,
        seed: int = 0,
    ) -> None:
        self.config = c = config or MADDPGConfig()
        self.lessons = Lessons(task, stages=stages, worlds=worlds, seed=seed)
        features, agents = self.lessons.task.features, max(max(stage.agents) for stage in stages)
        self.names = [f"agent_{i}" for i in range(agents)]
        self.mask = torch.ones(features)
        self.mask[self.lessons.task.traces] = 0.0
        torch.manual_seed(seed)  # AgileRL draws weights and actions from torch's own generator
        self.learner = _agilerl(self.names, features, c)
        self.memory = {
            "seen": torch.zeros(c.capacity, agents, features),
            "action": torch.zeros(c.capacity, agents, len(ACTIONS)),
            "reward": torch.zeros(c.capacity),
            "then": torch.zeros(c.capacity, agents, features),
            "goes_on": torch.zeros(c.capacity),
        }
        self.remembered = 0

    def run(self, *, progress: Callable[[str, float], None] | None = None) -> None:
        """Go on to the end."""
        lessons, c = self.lessons, self.config
        while lessons.done < lessons.steps:
            seen = torch.from_numpy(lessons.observe()) * self.mask
            present = lessons.present
            action = self._likely(seen) * torch.from_numpy(present)[..., None]
            then, reward, goes_on = lessons.step(action.argmax(-1).numpy())
            self._remember(seen, action, reward.sum(-1) / present.sum(-1), then, goes_on[:, 0])
            if lessons.done % c.learn_every == 0 and self.remembered >= c.warm_up:
                self.learner.learn(self._sample())
            if progress is not None and lessons.done % 500 == 0:
                progress(f"{max(lessons.stage.agents)} agents", lessons.done / lessons.steps)

    def act(self, seen: Seen) -> Actions:
        """Actions drawn from the policy: its output layer adds Gumbel noise."""
        return np.asarray(self._likely(torch.from_numpy(seen) * self.mask).argmax(-1).numpy())

    @torch.no_grad()
    def _likely(self, seen: Tensor) -> Tensor:
        actor = next(iter(self.learner.actors.values()))
        out: Tensor = actor(seen.flatten(0, -2)).view(*seen.shape[:-1], -1)
        return out

    def _remember(self, seen: Tensor, action: Tensor, reward: Any, then: Seen, goes_on: Any) -> None:
        new = {
            "seen": seen,
            "action": action,
            "reward": torch.from_numpy(reward).float() * self.config.reward_scale,
            "then": torch.from_numpy(then) * self.mask,
            "goes_on": torch.from_numpy(goes_on).float(),
        }
        rows = torch.arange(self.remembered, self.remembered + len(seen)) % self.config.capacity
        for name, values in new.items():
            if name in ("seen", "action", "then"):
                self.memory[name][rows] = 0.0
                self.memory[name][rows, : values.shape[1]] = values
            else:
                self.memory[name][rows] = values
        self.remembered += len(rows)

    def _sample(self) -> tuple[dict[str, Tensor], ...]:
        rows = torch.randint(min(self.remembered, self.config.capacity), (self.config.batch,))
        seen, action, reward, then, goes_on = (values[rows] for values in self.memory.values())
        return (
            {name: seen[:, i] for i, name in enumerate(self.names)},
            {name: action[:, i] for i, name in enumerate(self.names)},
            {name: reward[:, None].clone() for name in self.names},
            {name: then[:, i] for i, name in enumerate(self.names)},
            dict.fromkeys(self.names, 1 - goes_on[:, None]),
        )


def not_installed() -> ConfigError:
    """The error where AgileRL is missing."""
    return ConfigError("method", "maddpg", "an installed agilerl", how_to_install("maddpg"))


def _agilerl(names: list[str], features: int, config: MADDPGConfig) -> Any:
    try:
        from agilerl.algorithms.maddpg import MADDPG
        from gymnasium import spaces
    except ImportError as error:
        raise not_installed() from error
    return MADDPG(
        [spaces.Box(-10.0, 10.0, (features,), np.float32) for _ in names],
        [spaces.Discrete(len(ACTIONS)) for _ in names],
        agent_ids=names,
        net_config={
            "encoder_config": {"hidden_size": [config.hidden]},
            "head_config": {"hidden_size": [config.hidden]},
        },
        batch_size=config.batch,
        lr_actor=config.actor_rate,
        lr_critic=config.critic_rate,
        gamma=config.gamma,
        tau=config.tau,
        normalize_images=False,
    )
