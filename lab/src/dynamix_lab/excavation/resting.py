"""Agents that rest: each has its own threshold, above which the tunnel is too full for it to go in.

Response thresholds (Bonabeau, Theraulaz, Deneubourg 1996; reinforced ones: Theraulaz, Bonabeau, Deneubourg 1998): equal
agents divide the work unequally without a planner. An agent that comes home reads S, how often the tunnel was recently
entered, and rests with probability sigmoid(k (S - theta)). A delivery raises its theta; turning back without a pellet
lowers it. So successful agents continue, and others stay out of the way. No agent reads another's state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError
from dynamix_lab.excavation.world import Excavation, Flags

Floats = NDArray[np.float64]


class Gate(Protocol):
    """Decides who rests. Call `rest`, which gives (B, N), before every step of the worlds, and `after` after it."""

    def rest(self) -> Flags: ...

    def after(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ThresholdConfig:
    """Settings, all ours. Theta and S are in entries per 20 steps.

    lowest, highest   initial thetas, spread evenly over the agents
    steepness         k
    retry             probability per step that a resting agent decides again
    delivered, turned_back, rested   added to theta by a delivery, a return without a pellet, and a step of rest
    floor, ceiling    limits of theta. If S is below the floor, all agents go in, whatever they learned
    memory            weight of a step in a resting agent's running mean of S, by which it decides again; 1: S itself
    """

    lowest: float = 4.0
    highest: float = 6.5
    steepness: float = 10.0
    retry: float = 0.02
    delivered: float = 0.15
    turned_back: float = -0.5
    rested: float = -0.006
    floor: float = 0.0
    ceiling: float = 8.0
    memory: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.lowest <= self.highest <= self.ceiling:
            thetas = (self.floor, self.lowest, self.highest, self.ceiling)
            fix = "check the configuration"
            raise ConfigError("floor, lowest, highest, ceiling", thetas, "0 or more, in this order", fix)
        if not (0 <= self.retry <= 1 and self.steepness > 0 and 0 < self.memory <= 1):
            given = (self.retry, self.steepness, self.memory)
            allowed = "0 to 1, above 0, above 0 to 1"
            raise ConfigError("retry, steepness, memory", given, allowed, "check the configuration")


class Thresholds:
    """Every agent's theta in the worlds of `env`. It has its own random generator.

    config   one for all worlds, or one per world
    """

    def __init__(
        self, env: Excavation, config: ThresholdConfig | Sequence[ThresholdConfig] | None = None, *, seed: int = 0
    ) -> None:
        given = [config or ThresholdConfig()] if config is None or isinstance(config, ThresholdConfig) else list(config)
        if len(given) not in (1, env.worlds):
            raise ConfigError("config", len(given), f"1 or {env.worlds}, one a world", "pass a configuration a world")
        self.env, self.rng = env, np.random.default_rng(seed)
        names = [field.name for field in dataclasses.fields(ThresholdConfig)]
        self._of: dict[str, Floats] = {n: np.array([[float(getattr(c, n))] for c in given]) for n in names}
        spread = self._of["highest"] - self._of["lowest"]
        start = self._of["lowest"] + spread * np.linspace(0.0, 1.0, env.agents)
        self.theta: Floats = np.broadcast_to(start, env.place.shape).copy()
        self.resting: Flags = np.zeros(env.place.shape, dtype=bool)
        self.smelt: Floats = np.zeros(env.place.shape)  # S; for resting agents its running mean

    def rest(self) -> Flags:
        env, of, now = self.env, self._of, self.env.entries_now()
        home = env.gave | env.turned_back
        self.smelt = np.where(self.resting & ~home, self.smelt + of["memory"] * (now - self.smelt), now)
        asks = home | (self.resting & (self.rng.random(self.resting.shape) < of["retry"]))
        chance = 1 / (1 + np.exp(np.clip(of["steepness"] * (self.theta - self.smelt), -60, 60)))
        self.resting = np.where(asks, self.rng.random(self.resting.shape) < chance, self.resting)
        return self.resting

    def after(self) -> None:
        env, of = self.env, self._of
        change = of["delivered"] * env.gave + of["turned_back"] * env.turned_back + of["rested"] * self.resting
        self.theta = np.clip(self.theta + change, of["floor"], of["ceiling"])


class Forced:
    """The first `count` agents of every world rest permanently, as a planner who knows them could order."""

    def __init__(self, env: Excavation, count: int) -> None:
        if not 0 <= count <= env.agents:
            raise ConfigError("count", count, f"0 to {env.agents}", "check the arguments")
        self.resting: Flags = np.zeros(env.place.shape, dtype=bool)
        self.resting[:, :count] = True

    def rest(self) -> Flags:
        return self.resting

    def after(self) -> None:
        pass


class Counting:
    """A planner's rule, which needs a view of all agents: `most` go in together, the next when all are back.

    It calls the agents that are nearest to the mouth.
    """

    def __init__(self, env: Excavation, most: int = 5) -> None:
        if most < 1:
            raise ConfigError("most", most, "1 or more", "check the arguments")
        self.env, self.most = env, most
        self.called: Flags = np.zeros(env.place.shape, dtype=bool)

    def rest(self) -> Flags:
        env = self.env
        back = env.gave | env.turned_back | env.absent
        self.called &= ~back
        order = np.where(env.absent, np.inf, env.burrow.to_face[env.place]).argsort(-1, kind="stable").argsort(-1)
        self.called = np.where(self.called.any(-1, keepdims=True), self.called, order < self.most)
        return ~self.called

    def after(self) -> None:
        pass


class AtRandom:
    """For training: a random part of the agents, `least` to `most`, rests; drawn again about every `lasts` steps."""

    def __init__(
        self, env: Excavation, *, least: float = 0.0, most: float = 0.5, lasts: int = 250, seed: int = 0
    ) -> None:
        self.env, self.lasts, self.rng = env, lasts, np.random.default_rng(seed)
        self.least, self.most = int(least * env.agents), int(most * env.agents)
        self.resting: Flags = np.zeros(env.place.shape, dtype=bool)
        self._draw(np.ones(env.worlds, dtype=bool))

    def rest(self) -> Flags:
        self._draw(self.rng.random(self.env.worlds) < 1 / self.lasts)
        return self.resting

    def after(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"resting": self.resting.copy(), "random": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resting, self.rng.bit_generator.state = state["resting"].copy(), state["random"]

    def _draw(self, anew: Flags) -> None:
        count = self.rng.integers(self.least, self.most + 1, self.env.worlds)
        order = self.rng.random(self.resting.shape).argsort(-1).argsort(-1)
        self.resting = np.where(anew[:, None], order < count[:, None], self.resting)
