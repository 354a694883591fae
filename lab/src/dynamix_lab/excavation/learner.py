"""S-MADRL's learner: independent deep Q-learning with shared weights, in one file, with torch only.

Every agent acts on its own observation, and learns from its own reward and its world's mean reward. All agents share
one network and one replay memory (target network and replay, Mnih et al. 2015; Munchausen DQN, Vieillard et al. 2020).
Actions are drawn from the soft-max of the Q-values, because equal agents that all take the best action block each other
permanently. `DQNConfig(traces=False)` is MADQN, the baseline: the same class, network and settings, with the traces
masked in the observation.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dynamix.errors import ConfigError
from dynamix_lab.excavation.ground import Shape
from dynamix_lab.excavation.lessons import CURRICULUM, Lessons, Stage
from dynamix_lab.excavation.resting import Gate
from dynamix_lab.excavation.sharing import WorkShares
from dynamix_lab.excavation.world import ACTIONS, Excavation, ExcavationConfig, Seen

Actions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DQNConfig:
    """Settings, all ours: we do not know the paper's.

    traces         False masks the traces: MADQN
    gamma          discount per step
    batch          transitions in a gradient step; there is one gradient step per step of the worlds
    capacity       transitions in the replay memory; learning begins with `warm_up` of them
    target_every   gradient steps between two copies of the network to the target network
    reward_scale   factor on the reward that the network learns from, so that its outputs are of order 1
    temperature    of the soft-max, and weight of the entropy in the learning target; in units of scaled reward
    munchausen     weight of a term that is added to the reward: the taken action's log-probability times the
                   temperature, clipped at -1
    epsilon_last   probability of a uniformly random action in training, after the first half of a stage
    shared         weight of the world's mean reward in an agent's reward: stepping aside first pays other agents
    resters        minimum and maximum fraction of a world's agents that rest at a time in training
    cooling        last part of the training, in which the learning rate falls to 0
    """

    traces: bool = True
    hidden: int = 64
    learning_rate: float = 1e-3
    gamma: float = 0.9
    batch: int = 256
    capacity: int = 200_000
    warm_up: int = 2_000
    target_every: int = 200
    reward_scale: float = 0.1
    temperature: float = 0.06
    munchausen: float = 0.9
    epsilon_last: float = 0.05
    shared: float = 0.5
    resters: tuple[float, float] = (0.0, 0.0)
    cooling: float = 0.5
    max_gradient_norm: float = 10.0

    def __post_init__(self) -> None:
        if not self.batch <= self.warm_up <= self.capacity:
            raise ConfigError("warm_up", self.warm_up, "batch to capacity", "check the configuration")
        if not (0 < self.temperature < float("inf") and 0 <= self.munchausen < 1):
            allowed = "above 0, and 0 to less than 1"
            fix = "0.03 to 0.1, and 0 for soft Q-learning"
            raise ConfigError("temperature, munchausen", (self.temperature, self.munchausen), allowed, fix)
        if not (0 <= self.shared <= 1 and 0 <= self.cooling <= 1):
            fix = "0 for the own reward alone, 0 to keep the learning rate"
            raise ConfigError("shared, cooling", (self.shared, self.cooling), "0 to 1 each", fix)
        if not (
            0 <= self.gamma < 1 and 0 < self.learning_rate < float("inf") and self.batch > 0 and self.target_every > 0
        ):
            given = (self.gamma, self.learning_rate, self.batch, self.target_every)
            allowed = "0 to less than 1, above 0, 1 or more, 1 or more"
            raise ConfigError("gamma, learning_rate, batch, target_every", given, allowed, "check the configuration")


def perceptron(inputs: int, hidden: int, outputs: int, generator: torch.Generator) -> nn.Sequential:
    """Two hidden layers, orthogonal weights from `generator`."""
    sizes = (inputs, hidden, hidden, outputs)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        linear = nn.Linear(before, after)
        nn.init.orthogonal_(linear.weight, gain=2**0.5, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DQN:
    """Network, target network, optimizer, replay memory and own random generator; `state_dict` has all of them."""

    def __init__(self, features: int, traces: slice, config: DQNConfig | None = None, *, seed: int = 0) -> None:
        self.config = c = config or DQNConfig()
        self.generator = torch.Generator().manual_seed(seed)
        self.net = perceptron(features, c.hidden, len(ACTIONS), self.generator)
        self.target = perceptron(features, c.hidden, len(ACTIONS), self.generator)
        self.target.load_state_dict(self.net.state_dict())
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=c.learning_rate, eps=1e-5, fused=True)
        self.mask = torch.ones(features)
        if not c.traces:
            self.mask[traces] = 0.0
        self.memory = {
            "seen": torch.zeros(c.capacity, features),
            "action": torch.zeros(c.capacity, dtype=torch.int64),
            "reward": torch.zeros(c.capacity),
            "then": torch.zeros(c.capacity, features),
            "goes_on": torch.zeros(c.capacity),
        }
        self.remembered = self.updates = 0

    @torch.no_grad()
    def act(self, seen: Seen, *, epsilon: float = 0.0) -> Actions:
        """Draw actions (...) for observations (..., F) from the soft-max, or with probability `epsilon` uniformly."""
        worth = self.net(torch.from_numpy(seen) * self.mask)
        chance = (worth / self.config.temperature).softmax(-1) * (1 - epsilon) + epsilon / len(ACTIONS)
        drawn = torch.multinomial(chance.flatten(0, -2), 1, generator=self.generator)
        return np.asarray(drawn.view(chance.shape[:-1]).numpy())

    def remember(self, seen: Seen, action: Actions, reward: NDArray[Any], then: Seen, goes_on: NDArray[Any]) -> None:
        """Store transitions: (..., F), (...), (...), (..., F), (...). They replace the oldest."""
        features, capacity = seen.shape[-1], self.config.capacity
        new = {
            "seen": torch.from_numpy(seen).view(-1, features) * self.mask,
            "action": torch.from_numpy(action).reshape(-1),
            "reward": torch.from_numpy(reward).reshape(-1).float() * self.config.reward_scale,
            "then": torch.from_numpy(then).view(-1, features) * self.mask,
            "goes_on": torch.from_numpy(goes_on).reshape(-1).float(),
        }
        count, at = len(new["reward"]), self.remembered % capacity
        until_end = min(count, capacity - at)  # the others go to the beginning
        for name, values in new.items():
            self.memory[name][at : at + until_end] = values[:until_end]
            self.memory[name][: count - until_end] = values[until_end:]
        self.remembered += count

    def learn(self) -> float:
        """Make one gradient step of Munchausen DQN on stored transitions. Returns the loss; NaN before `warm_up`."""
        c = self.config
        if self.remembered < c.warm_up:
            return float("nan")
        rows = torch.randint(min(self.remembered, c.capacity), (c.batch,), generator=self.generator)
        seen, action, reward, then, goes_on = (self.memory[name][rows] for name in self.memory)
        with torch.no_grad():
            (following, now), heat = self.target(torch.cat([then, seen])).chunk(2), c.temperature
            soft = heat * (following / heat).logsumexp(-1)  # expected value plus temperature times entropy
            taken = (now / heat).log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
            aim = reward + c.munchausen * (heat * taken).clamp(min=-1.0) + c.gamma * goes_on * soft
        value = self.net(seen).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(value, aim)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), c.max_gradient_norm)
        self.optimizer.step()
        self.updates += 1
        if self.updates % c.target_every == 0:
            self.target.load_state_dict(self.net.state_dict())
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": {name: value.clone() for name, value in self.net.state_dict().items()},
            "target": {name: value.clone() for name, value in self.target.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "memory": {name: value[: self.remembered].clone() for name, value in self.memory.items()},
            "counts": (self.remembered, self.updates),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for name, values in state["memory"].items():
            self.memory[name][: len(values)] = values
        self.remembered, self.updates = state["counts"]
        self.generator.set_state(state["generator"])


class DQNTraining:
    """Trains a `DQN` by a curriculum in B worlds at once, with one gradient step per step of the worlds.

    If stopped at any step and resumed from `state_dict`, it ends with the same weights.
    """

    def __init__(
        self,
        task: ExcavationConfig | None = None,
        config: DQNConfig | None = None,
        *,
        stages: tuple[Stage, ...] = CURRICULUM,
        worlds: int = 16,
        seed: int = 0,
        grounds: Callable[[np.random.Generator], Shape] | None = None,
    ) -> None:
        resters = (config or DQNConfig()).resters
        self.lessons = Lessons(task, stages=stages, worlds=worlds, seed=seed, resters=resters, grounds=grounds)
        self.learner = DQN(self.lessons.task.features, self.lessons.task.traces, config, seed=seed)

    def run(self, steps: int | None = None, *, progress: Callable[[str, float], None] | None = None) -> None:
        """Train for `steps` steps of the worlds, or to the end. `progress` gets the stage and the part done."""
        lessons, c = self.lessons, self.learner.config
        until = lessons.steps if steps is None else min(lessons.done + steps, lessons.steps)
        while lessons.done < until:
            seen, last = lessons.observe(), c.epsilon_last
            epsilon = max(last, lessons.stage.epsilon + (last - lessons.stage.epsilon) * 2 * lessons.part)
            action = self.learner.act(seen, epsilon=epsilon)
            then, reward, goes_on = lessons.step(action)
            who = lessons.present
            team = reward.sum(-1, keepdims=True) / who.sum(-1, keepdims=True)
            reward = (1 - c.shared) * reward + c.shared * team
            who = lessons.acted
            self.learner.optimizer.param_groups[0]["lr"] = c.learning_rate * lessons.cooled(c.cooling)
            self.learner.remember(seen[who], action[who], reward[who], then[who], goes_on[who])
            self.learner.learn()
            if progress is not None and lessons.done % 500 == 0:
                progress(f"{max(lessons.stage.agents)} agents", lessons.done / lessons.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"learner": self.learner.state_dict(), "lessons": self.lessons.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.lessons.load_state_dict(state["lessons"])


def evaluate(
    act: Callable[[Seen], Actions],
    task: ExcavationConfig,
    *,
    agents: int,
    worlds: int = 16,
    seed: int = 0,
    gate: Callable[[Excavation], Gate] | None = None,
) -> WorkShares:
    """Run `act` (observations (B, N, F) to actions (B, N)) for one horizon in B worlds. `gate` decides who rests."""
    env = Excavation(task, agents=agents, worlds=worlds, seed=seed)
    work(env, act, None if gate is None else gate(env), task.horizon)
    return env.workload()


def work(env: Excavation, act: Callable[[Seen], Actions], gate: Gate | None, steps: int) -> None:
    """Run `act` in `env` for `steps` steps."""
    seen = env.observe()
    for _ in range(steps):
        seen, _, _ = env.step(act(seen), resting=None if gate is None else gate.rest())
        if gate is not None:
            gate.after()


def without_traces(config: DQNConfig | None = None) -> DQNConfig:
    """The same settings for MADQN."""
    return dataclasses.replace(config or DQNConfig(), traces=False)
