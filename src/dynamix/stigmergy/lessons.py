"""A curriculum on the excavation task: from one agent, who learns the way, to many, who learn each other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError
from dynamix.stigmergy.excavation import Excavation, ExcavationConfig, Flags, Seen
from dynamix.stigmergy.field import Floats


@dataclass(frozen=True, slots=True)
class Stage:
    """`steps` of the worlds with so many agents; `epsilon`, for learners that have one, falls from here over its first half."""

    agents: int
    steps: int
    epsilon: float


CURRICULUM = (Stage(1, 3000, 1.0), Stage(2, 2000, 0.3), Stage(4, 3000, 0.3), Stage(8, 6000, 0.3))


class Lessons:
    """B worlds that go through the stages: act on `observe()`, then `step`. Episodes begin anew by themselves."""

    def __init__(
        self, task: ExcavationConfig | None = None, *, stages: tuple[Stage, ...] = CURRICULUM, worlds: int, seed: int
    ) -> None:
        if not stages or any(stage.steps < 1 for stage in stages):
            raise ConfigError("stages", stages, "one or more stages of one or more steps", "pass a curriculum")
        self.task, self.stages, self.worlds, self.seed = task or ExcavationConfig(), stages, worlds, seed
        self.done, self.steps = 0, sum(stage.steps for stage in stages)
        self._index = self._within = 0
        self.env = self._worlds()
        self.seen = self.env.observe()

    @property
    def stage(self) -> Stage:
        return self.stages[self._index]

    @property
    def part(self) -> float:
        """The part of this stage that is done."""
        return self._within / self.stage.steps

    def observe(self) -> Seen:
        """What the agents see, (B, N, F); N grows with the first call after the end of a stage."""
        if self._within == self.stage.steps and self._index + 1 < len(self.stages):
            self._index, self._within = self._index + 1, 0
            self.env = self._worlds()
            self.seen = self.env.observe()
        return self.seen

    def step(self, action: ArrayLike) -> tuple[Seen, Floats, Flags]:
        """What they saw then (B, N, F), their rewards (B, N), and whether there was anything left to do (B, N).

        An episode that is over because of its horizon alone did not end for the agents: there was.
        """
        then, reward, finished = self.env.step(action)
        self.seen = self.env.reset() if self.env.over or finished.all() else then
        self._within, self.done = self._within + 1, self.done + 1
        return then, reward, np.repeat(~finished[:, None], reward.shape[1], axis=1)

    def state_dict(self) -> dict[str, Any]:
        return {"env": self.env.state_dict(), "place": (self._index, self._within, self.done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._index, self._within, self.done = state["place"]
        self.env = self._worlds()
        self.env.load_state_dict(state["env"])
        self.seen = self.env.observe()

    def _worlds(self) -> Excavation:
        seed = int(np.random.SeedSequence([self.seed, self._index]).generate_state(1)[0])
        return Excavation(self.task, agents=self.stage.agents, worlds=self.worlds, seed=seed)
