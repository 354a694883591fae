"""The simulator with other libraries' interfaces: Gymnasium (one cluster, or C at once) and PettingZoo (agents).

Observations are `features` of a window. Actions are the logarithm of a factor on each worker's batch size, in units of
`ACTION_SCALE`; `ClusterEnv` projects them onto the bounds. All workers share the reward: the logarithm of the window's
goodput over that of undisturbed training with the base batch. Needs gymnasium and pettingzoo: extra `bench`.

Importing this module registers `dynamix/Cluster-v0` with Gymnasium, for one cluster and as a vector. Gymnasium from 1.0
on loads no plugins, so a program imports the module, or names it:

>>> env = gymnasium.make("dynamix_lab.simulator.environments:dynamix/Cluster-v0", workers=3)
>>> clusters = gymnasium.make_vec("dynamix/Cluster-v0", num_envs=16, workers=3)
>>> env.action_space.shape, clusters.action_space.shape
((3,), (16, 3))
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from dynamix.errors import ConfigError
from dynamix.features import FEATURES, features
from dynamix.window import Floats, Window
from dynamix_lab.simulator.env import ClusterEnv
from dynamix_lab.simulator.families import sample_family
from dynamix_lab.simulator.network import step_time

Observation = NDArray[np.float32]
Action = NDArray[np.float32]
Info = dict[str, Any]
FAMILY = "affine-slowdowns"  # of `simulator.families`, the default
ACTION_SCALE = 0.5
LIMIT = 5.0  # features are clipped to it
_WIDTH = len(FEATURES)


class _Worlds:
    """C clusters of a family, new at every reset."""

    def __init__(self, family: str, count: int, workers: int, interval: int, delay: int) -> None:
        if count < 1 or workers < 1:
            raise ConfigError("clusters, workers", (count, workers), "1 or more each", "check the arguments")
        self.family, self.count, self.workers, self.interval, self.delay = family, count, workers, interval, delay
        sample_family(family, 1, workers, 0)  # rejects a wrong name at once

    def reset(self, seed: int) -> Observation:
        clusters = sample_family(self.family, self.count, self.workers, seed)
        self.env = ClusterEnv(clusters, seed=seed, interval=self.interval, delay=self.delay)
        window = self.env.reset()
        base = clusters.base_batch.astype(np.float64)
        busy = self.env.costs.seconds(np.broadcast_to((base / self.workers)[:, None], clusters.shape)).max(-1)
        self.at_rest = base / step_time(busy, clusters.exchange_s, clusters.overlap)
        return features(window)

    def step(self, action: Floats) -> tuple[Observation, Floats, Window]:
        clock, progress = self.env.clock_s, self.env.progress
        wish = self.env.batch * np.exp(ACTION_SCALE * np.clip(action, -1, 1))
        window = self.env.step(np.maximum(wish, 1.0))
        goodput = (self.env.progress - progress) / (self.env.clock_s - clock)
        return features(window), np.log(goodput / self.at_rest), window


def _spaces(workers: int) -> tuple[Any, Any]:
    return (spaces.Box(-LIMIT, LIMIT, (workers, _WIDTH), np.float32), spaces.Box(-1.0, 1.0, (workers,), np.float32))


class GymClusterEnv(gymnasium.Env[Observation, Action]):
    """One cluster: observations (W, F), actions (W,) in [-1, 1]; truncated after `windows` decisions."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self, family: str = FAMILY, workers: int = 4, *, windows: int = 100, interval: int = 5, delay: int = 1
    ) -> None:
        self._worlds, self.windows = _Worlds(family, 1, workers, interval, delay), windows
        self.observation_space, self.action_space = _spaces(workers)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self._decisions = 0
        return self._worlds.reset(int(self.np_random.integers(2**31)))[0], {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Info]:
        seen, reward, window = self._worlds.step(np.asarray(action, np.float64)[None])
        self._decisions += 1
        info = {"batch_sizes": window.batch_size[0], "clock_s": float(self._worlds.env.clock_s[0])}
        return seen[0], float(reward[0]), False, self._decisions >= self.windows, info


class VectorClusterEnv(VectorEnv[Observation, Action, NDArray[Any]]):
    """C clusters as one array, the fast form: observations (C, W, F), actions (C, W). All end together.

    The step after an end resets and gives reward 0 (Gymnasium's "next step" mode).
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(
        self,
        family: str = FAMILY,
        clusters: int = 64,
        workers: int = 4,
        *,
        windows: int = 100,
        interval: int = 5,
        delay: int = 1,
    ) -> None:
        self._worlds = _Worlds(family, clusters, workers, interval, delay)
        self.windows, self.num_envs = windows, clusters
        self.single_observation_space, self.single_action_space = _spaces(workers)
        self.observation_space = batch_space(self.single_observation_space, clusters)
        self.action_space = batch_space(self.single_action_space, clusters)
        self._ended = False

    def reset(self, *, seed: int | list[int] | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed if isinstance(seed, int) or seed is None else seed[0])
        self._decisions, self._ended = 0, False
        return self._worlds.reset(int(self.np_random.integers(2**31))), {}

    def step(self, actions: Action) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], Info]:
        no = np.zeros(self.num_envs, dtype=bool)
        if self._ended:
            seen, _ = self.reset()
            return seen, np.zeros(self.num_envs), no, no.copy(), {}
        seen, reward, window = self._worlds.step(np.asarray(actions, np.float64))
        self._decisions += 1
        self._ended = self._decisions >= self.windows
        info = {"batch_sizes": window.batch_size, "clock_s": self._worlds.env.clock_s}
        return seen, reward, no, np.full(self.num_envs, self._ended), info


class ParallelClusterEnv(ParallelEnv[str, Observation, Action]):
    """One cluster, an agent per worker ("worker_0", ...): observations (F,), actions (1,), one shared reward."""

    metadata = {"render_modes": [], "name": "dynamix_cluster_v0"}  # noqa: RUF012

    def __init__(
        self, family: str = FAMILY, workers: int = 4, *, windows: int = 100, interval: int = 5, delay: int = 1
    ) -> None:
        self._worlds, self.windows = _Worlds(family, 1, workers, interval, delay), windows
        self.possible_agents = [f"worker_{i}" for i in range(workers)]
        self.agents: list[str] = []
        self.render_mode = None
        self._spaces = spaces.Box(-LIMIT, LIMIT, (_WIDTH,), np.float32), spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._rng = np.random.default_rng()

    def observation_space(self, agent: str) -> Any:
        return self._spaces[0]

    def action_space(self, agent: str) -> Any:
        return self._spaces[1]

    def reset(self, seed: int | None = None, options: Info | None = None) -> tuple[dict[str, Observation], Info]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents, self._decisions = list(self.possible_agents), 0
        seen = self._worlds.reset(int(self._rng.integers(2**31)))
        return dict(zip(self.agents, seen[0], strict=True)), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, Action]
    ) -> tuple[dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Info]]:
        wished = np.array([[float(np.asarray(actions[agent]).reshape(-1)[0]) for agent in self.agents]])
        seen, reward, window = self._worlds.step(wished)
        self._decisions += 1
        agents, over = self.agents, self._decisions >= self.windows
        if over:
            self.agents = []
        infos = {agent: {"batch_size": int(b)} for agent, b in zip(agents, window.batch_size[0], strict=True)}
        observed, rewards = dict(zip(agents, seen[0], strict=True)), dict.fromkeys(agents, float(reward[0]))
        return observed, rewards, dict.fromkeys(agents, False), dict.fromkeys(agents, over), infos


def vector_environment(num_envs: int = 1, **settings: Any) -> VectorClusterEnv:
    """`VectorClusterEnv` of `num_envs` clusters, the entry point of `gymnasium.make_vec`."""
    return VectorClusterEnv(clusters=num_envs, **settings)


_ONE, _MANY = (f"{__name__}:{maker.__name__}" for maker in (GymClusterEnv, vector_environment))
gymnasium.register("dynamix/Cluster-v0", entry_point=_ONE, vector_entry_point=_MANY)
