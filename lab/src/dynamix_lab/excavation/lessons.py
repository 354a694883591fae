"""A curriculum for the excavation task: one agent first learns the way, then more agents learn to share it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError
from dynamix.window import Floats
from dynamix_lab.excavation.ground import Burrow, Shape
from dynamix_lab.excavation.resting import AtRandom
from dynamix_lab.excavation.world import Excavation, ExcavationConfig, Flags, Seen


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of `steps` steps. With `agents` (1, 4), half of the worlds have one agent and the others four. `epsilon`,
    for learners that have one, starts at this value and falls over the stage's first half.
    """

    agents: tuple[int, ...]
    steps: int
    epsilon: float


CURRICULUM = (
    Stage((1,), 4000, 1.0),
    Stage((1, 2, 4), 6000, 0.3),
    Stage((2, 4, 6), 8000, 0.3),
    Stage((1, 4, 6, 8), 14000, 0.3),
)
# For drawn grounds: more parts, so that training uses more grounds at a time.
DRAWN = (
    Stage((1, 1, 1, 1, 2, 2, 2, 2), 4000, 1.0),
    Stage((1, 2, 3, 4, 1, 2, 3, 4), 6000, 0.3),
    Stage((3, 4, 5, 6, 3, 4, 5, 6), 8000, 0.3),
    Stage((3, 4, 5, 6, 8, 9, 10, 12), 14000, 0.3),
)


class Lessons:
    """B worlds that go through the stages: act on `observe()`, then call `step`. Episodes restart by themselves.

    N is the largest number of agents of the stage. `present` (B, N) marks the existing agents. `acted` marks those
    whose chosen action counted in the last step, because they did not rest.

    resters   minimum and maximum fraction of a world's agents that rest at a time; which and how many changes at
              random, so that the learned network fits any number of active agents
    grounds   draws a ground for every episode of every part of the worlds; None: all use the task's ground
    """

    def __init__(
        self,
        task: ExcavationConfig | None = None,
        *,
        stages: tuple[Stage, ...] = CURRICULUM,
        worlds: int,
        seed: int,
        resters: tuple[float, float] = (0.0, 0.0),
        grounds: Callable[[np.random.Generator], Shape] | None = None,
    ) -> None:
        task = task or ExcavationConfig()
        room = int(Burrow(task.shape, margin=max(task.sight, task.smell)).nest.sum())
        if worlds < 1:
            raise ConfigError("worlds", worlds, "1 or more", "check the arguments")
        if not stages or any(stage.steps < 1 for stage in stages):
            raise ConfigError("stages", stages, "one or more stages of one or more steps", "pass a curriculum")
        for stage in stages:
            if not (isinstance(stage.agents, tuple) and 1 <= len(stage.agents) <= worlds):
                fix = "write (1,) for one agent; give more worlds, or fewer numbers"
                raise ConfigError(
                    "stages", stage, f"a tuple of 1 to {worlds} numbers of agents, as there are worlds", fix
                )
            if not (all(1 <= n <= room for n in stage.agents) and 0 <= stage.epsilon <= 1):
                allowed = f"1 to {room} agents, the cells of the nest, and an epsilon of 0 to 1"
                raise ConfigError("stages", stage, allowed, "enlarge the nest, or check the curriculum")
        if not 0 <= resters[0] <= resters[1] < 1:
            raise ConfigError("resters", resters, "0 to less than 1, in order", "(0, 0.5) lets up to half of them rest")
        self.task, self.stages, self.worlds, self.seed = task, stages, worlds, seed
        self.resters, self.grounds = resters, grounds
        self.done, self.steps = 0, sum(stage.steps for stage in stages)
        self._index = self._within = 0
        self.parts: list[tuple[slice, Excavation, AtRandom]] = []
        self.present: Flags = np.zeros((worlds, 0), dtype=bool)
        self.seen: Seen = np.zeros((worlds, 0, self.task.features), dtype=np.float32)
        self._begin()

    @property
    def stage(self) -> Stage:
        return self.stages[self._index]

    @property
    def part(self) -> float:
        """The part of this stage that is done."""
        return self._within / self.stage.steps

    def cooled(self, cooling: float) -> float:
        """Factor on a learning rate. It falls to 0 in the last part `cooling` (0 to 1) of all stages."""
        return min(1.0, (1 - self.done / self.steps) / cooling) if cooling else 1.0

    def observe(self) -> Seen:
        """Observations (B, N, F), zero for missing agents. The first call after a stage begins the next, with its N."""
        if self._within >= self.stage.steps and self._index + 1 < len(self.stages):
            self._index, self._within = self._index + 1, 0
            self._begin()
        return self.seen

    def step(self, action: ArrayLike) -> tuple[Seen, Floats, Flags]:
        """Returns the next observations (B, N, F), rewards (B, N), and whether the agents' task continues (B, N).

        It continues at an episode's horizon too, because that only truncates the episode.
        """
        chosen = np.asarray(action)
        then, self.seen = np.zeros_like(self.seen), np.zeros_like(self.seen)
        reward, goes_on = np.zeros(self.present.shape), np.ones(self.present.shape, dtype=bool)
        self.acted = self.present.copy()
        for index, (rows, env, gate) in enumerate(self.parts):
            place = (rows, slice(env.agents))
            resting = gate.rest()
            self.acted[place] &= ~(resting & env.at_home)
            then[place], reward[place], finished = env.step(chosen[place], resting=resting)
            goes_on[place] = ~finished[:, None]
            if env.over or finished.all():
                self.seen[place] = env.reset() if self.grounds is None else self._anew(index)
            else:
                self.seen[place] = then[place]
        self._within, self.done = self._within + 1, self.done + 1
        return then, reward, goes_on

    def state_dict(self) -> dict[str, Any]:
        return {
            "envs": [env.state_dict() for _, env, _ in self.parts],
            "gates": [gate.state_dict() for _, _, gate in self.parts],
            "place": (self._index, self._within, self.done),
            "episodes": list(self._episodes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._index, self._within, self.done = state["place"]
        self._begin(state["episodes"])
        for (rows, env, gate), saved, who in zip(self.parts, state["envs"], state["gates"], strict=True):
            env.load_state_dict(saved)
            gate.load_state_dict(who)
            self.seen[rows, : env.agents] = env.observe()

    def _begin(self, episodes: Sequence[int] | None = None) -> None:
        """Make the worlds of this stage, split as evenly as possible among its numbers of agents."""
        agents = self.stage.agents
        self._episodes = [0] * len(agents) if episodes is None else list(episodes)
        self.parts = [self._part(index) for index in range(len(agents))]
        self.present = np.zeros((self.worlds, max(agents)), dtype=bool)
        self.seen = np.zeros((*self.present.shape, self.task.features), dtype=np.float32)
        for rows, env, _ in self.parts:
            self.present[rows, : env.agents] = True
            self.seen[rows, : env.agents] = env.observe()
        self.acted = self.present

    def _part(self, index: int) -> tuple[slice, Excavation, AtRandom]:
        agents, task = self.stage.agents, self.task
        seed = int(np.random.SeedSequence([self.seed, self._index]).generate_state(len(agents))[index])
        if self.grounds is not None:
            seed += self._episodes[index]
            task = dataclasses.replace(task, shape=self.grounds(np.random.default_rng(seed)))
        a, b = np.linspace(0, self.worlds, len(agents) + 1).round().astype(int)[index : index + 2]
        env = Excavation(task, agents=agents[index], worlds=int(b - a), seed=seed)
        return slice(a, b), env, AtRandom(env, least=self.resters[0], most=self.resters[1], seed=seed)

    def _anew(self, index: int) -> Seen:
        """The first observations of the part's next episode, on its own ground."""
        self._episodes[index] += 1
        self.parts[index] = self._part(index)
        return self.parts[index][1].observe()
