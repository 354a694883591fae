"""The excavation task with PettingZoo's interface (all agents of a world) and with Gymnasium's (one of its agents).

Needs the extra `learn`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from dynamix.errors import ConfigError
from dynamix_lab.excavation.ground import GROUNDS
from dynamix_lab.excavation.hand import HandMotion
from dynamix_lab.excavation.render import image, text
from dynamix_lab.excavation.world import ACTIONS, Excavation, ExcavationConfig

RENDER_MODES = ("ansi", "rgb_array")


class ParallelExcavation(ParallelEnv[str, NDArray[np.float32], int]):
    """Agents "robot_0" and so on. Each has its own observation (F,), action 0 to 4 (`ACTIONS`) and reward.

    An episode is truncated at the horizon. If pellets can run out, it terminates when all are in the nest.
    `render_mode` "ansi" gives text, "rgb_array" an image. An agent's info has the number of pellets that it delivered.
    """

    metadata = {"render_modes": list(RENDER_MODES), "name": "dynamix_excavation_v0"}  # noqa: RUF012

    def __init__(
        self, config: ExcavationConfig | None = None, *, agents: int = 8, render_mode: str | None = None
    ) -> None:
        if render_mode not in (None, *RENDER_MODES):
            raise ConfigError("render_mode", render_mode, f"None, {', '.join(RENDER_MODES)}", "check the spelling")
        self.world = Excavation(config, agents=agents)
        self.render_mode = render_mode
        self.possible_agents = [f"robot_{i}" for i in range(agents)]
        self.agents: list[str] = []
        self._spaces = (
            spaces.Box(-1.0, 2.0, (self.world.config.features,), np.float32),
            spaces.Discrete(len(ACTIONS)),
        )

    def observation_space(self, agent: str) -> Any:
        return self._spaces[0]

    def action_space(self, agent: str) -> Any:
        return self._spaces[1]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        if seed is not None:
            self.world.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        seen = self.world.reset()
        return dict(zip(self.agents, seen[0], strict=True)), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, int]
    ) -> tuple[
        dict[str, NDArray[np.float32]], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]
    ]:
        agents = self.agents
        seen, reward, finished = self.world.step(np.array([[int(actions[agent]) for agent in agents]]))
        if finished[0] or self.world.over:
            self.agents = []
        return (
            dict(zip(agents, seen[0], strict=True)),
            {agent: float(r) for agent, r in zip(agents, reward[0], strict=True)},
            dict.fromkeys(agents, bool(finished[0])),
            dict.fromkeys(agents, self.world.over),
            {agent: {"delivered": int(d)} for agent, d in zip(agents, self.world.delivered[0], strict=True)},
        )

    def render(self) -> NDArray[np.uint8] | str | list[Any] | None:
        if self.render_mode is None:
            return None
        return text(self.world) if self.render_mode == "ansi" else image(self.world)


class OneOfMany(gymnasium.Env[NDArray[np.float32], Any]):
    """The first agent of a world; the others move by hand-written rules. Observation (F,), actions 0 to 4, own reward.

    `gymnasium.make("dynamix_lab.excavation.environments:dynamix/Excavation-v0", agents=8)`. The ground is
    "single-file", traces are typed. Truncated at the horizon. The info has the pellets that it and all delivered.
    """

    metadata = {"render_modes": list(RENDER_MODES), "render_fps": 10}  # noqa: RUF012

    def __init__(self, agents: int = 8, horizon: int = 1000, render_mode: str | None = None) -> None:
        if render_mode not in (None, *RENDER_MODES):
            raise ConfigError("render_mode", render_mode, f"None, {', '.join(RENDER_MODES)}", "check the spelling")
        self.render_mode = render_mode
        self.world = Excavation(ExcavationConfig(GROUNDS["single-file"], signs="typed", horizon=horizon), agents=agents)
        self.observation_space = spaces.Box(-1.0, 2.0, (self.world.config.features,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(len(ACTIONS))
        self._others = HandMotion(self.world.config)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.world.rng = np.random.default_rng(self.np_random.integers(2**32))
        self._others.rng = np.random.default_rng(self.np_random.integers(2**32))
        return self.world.reset()[0, 0], self._info()

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        actions = self._others(self.world.observe())
        actions[0, 0] = int(action)
        seen, reward, finished = self.world.step(actions)
        return seen[0, 0], float(reward[0, 0]), bool(finished[0]), self.world.over, self._info()

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        return text(self.world) if self.render_mode == "ansi" else image(self.world)

    def _info(self) -> dict[str, Any]:
        delivered = self.world.delivered[0]
        return {"delivered": int(delivered[0]), "delivered_by_all": int(delivered.sum())}


gymnasium.register("dynamix/Excavation-v0", entry_point=f"{__name__}:OneOfMany")
