"""A curriculum on the excavation task: from one agent, who learns the way, to many, who learn each other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError
from dynamix.window import Floats
from dynamix_lab.excavation.ground import Burrow
from dynamix_lab.excavation.resting import AtRandom
from dynamix_lab.excavation.world import Excavation, ExcavationConfig, Flags, Seen


@dataclass(frozen=True, slots=True)
class Stage:
    """`steps` of the worlds, in each part of which there are so many agents: (1, 4) is one in half of them and four in
    the others. `epsilon`, for learners that have one, falls from here over the stage's first half.
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


class Lessons:
    """B worlds that go through the stages: act on `observe()`, then `step`. Episodes begin anew by themselves.

    Arrays have room for the largest number of agents of a stage; `present` (B, N) says who there is, `acted` who of
    them did in the last step what they had chosen.

    resters   most of a world's agents that rest at a time, as a part of them; who and how many changes by chance. The
    learned network then fits any number of active agents
    """

    def __init__(
        self,
        task: ExcavationConfig | None = None,
        *,
        stages: tuple[Stage, ...] = CURRICULUM,
        worlds: int,
        seed: int,
        resters: float = 0.0,
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
        if not 0 <= resters < 1:
            raise ConfigError("resters", resters, "0 to less than 1", "0.5 lets up to half of the agents rest")
        self.task, self.stages, self.worlds, self.seed, self.resters = task, stages, worlds, seed, resters
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
        """Factor on a learning rate that falls to 0 in the last `cooling` (0 to 1) of all stages."""
        return min(1.0, (1 - self.done / self.steps) / cooling) if cooling else 1.0

    def observe(self) -> Seen:
        """The view of the agents, (B, N, F), zeros for the absent; N grows with the first call after a stage."""
        if self._within >= self.stage.steps and self._index + 1 < len(self.stages):
            self._index, self._within = self._index + 1, 0
            self._begin()
        return self.seen

    def step(self, action: ArrayLike) -> tuple[Seen, Floats, Flags]:
        """Their view then (B, N, F), their rewards (B, N), and whether there was anything left to do (B, N).

        An episode that is over because of its horizon alone did not end for the agents: there was.
        """
        chosen = np.asarray(action)
        then, self.seen = np.zeros_like(self.seen), np.zeros_like(self.seen)
        reward, goes_on = np.zeros(self.present.shape), np.ones(self.present.shape, dtype=bool)
        self.acted = self.present.copy()
        for rows, env, gate in self.parts:
            place = (rows, slice(env.agents))
            resting = gate.rest()
            self.acted[place] &= ~(resting & env.at_home)
            then[place], reward[place], finished = env.step(chosen[place], resting=resting)
            goes_on[place] = ~finished[:, None]
            self.seen[place] = env.reset() if env.over or finished.all() else then[place]
        self._within, self.done = self._within + 1, self.done + 1
        return then, reward, goes_on

    def state_dict(self) -> dict[str, Any]:
        return {
            "envs": [env.state_dict() for _, env, _ in self.parts],
            "gates": [gate.state_dict() for _, _, gate in self.parts],
            "place": (self._index, self._within, self.done),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._index, self._within, self.done = state["place"]
        self._begin()
        for (rows, env, gate), saved, who in zip(self.parts, state["envs"], state["gates"], strict=True):
            env.load_state_dict(saved)
            gate.load_state_dict(who)
            self.seen[rows, : env.agents] = env.observe()

    def _begin(self) -> None:
        """The worlds of this stage, split among its numbers of agents as evenly as they go."""
        agents = self.stage.agents
        seeds = np.random.SeedSequence([self.seed, self._index]).generate_state(len(agents))
        ends = np.linspace(0, self.worlds, len(agents) + 1).round().astype(int)
        self.parts = []
        for a, b, n, seed in zip(ends, ends[1:], agents, seeds, strict=False):
            env = Excavation(self.task, agents=n, worlds=int(b - a), seed=int(seed))
            self.parts.append((slice(a, b), env, AtRandom(env, most=self.resters, seed=int(seed))))
        self.present = np.zeros((self.worlds, max(agents)), dtype=bool)
        self.seen = np.zeros((*self.present.shape, self.task.features), dtype=np.float32)
        for rows, env, _ in self.parts:
            self.present[rows, : env.agents] = True
            self.seen[rows, : env.agents] = env.observe()
        self.acted = self.present
