"""Learns a threshold gate for a motion by the cross-entropy method (Rubinstein 1999), paid by the team's pellets alone.

When to rest pays only over hundreds of steps: a learner whose discount sees ten cannot find it. So the seven numbers of
`ThresholdConfig` are drawn, tried in worlds of their own, and drawn anew about the best. A trial is a horizon with all
agents and one without the three busiest: those who rest must not do so for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dynamix.errors import ConfigError
from dynamix_lab.experiments.excavation.learner import Actions, work
from dynamix_lab.experiments.excavation.resting import ThresholdConfig, Thresholds
from dynamix_lab.experiments.excavation.world import Excavation, ExcavationConfig, Flags, Seen

LOST = 3  # busiest agents that are taken away
# Of each number: least, most, and whether it is searched on a logarithmic scale.
RANGES = {
    "lowest": (0.5, 8.0, False),
    "highest": (0.5, 12.0, False),
    "steepness": (2.0, 40.0, True),
    "retry": (0.001, 0.05, True),
    "delivered": (0.02, 0.6, True),
    "turned_back": (-1.5, 0.0, False),
    "rested": (-0.02, 0.02, False),
}


@dataclass(frozen=True, slots=True)
class GateSearch:
    """All ours.

    rounds, draws, kept   of the cross-entropy method: draws in a round, and how many the next one is drawn about
    agents, worlds        that each draw is tried with
    """

    rounds: int = 5
    draws: int = 12
    kept: int = 4
    agents: int = 8
    worlds: int = 6

    def __post_init__(self) -> None:
        if not (2 <= self.kept <= self.draws and self.rounds >= 1 and self.worlds >= 1):
            given = (self.rounds, self.draws, self.kept, self.worlds)
            fix = "check the configuration"
            raise ConfigError("rounds, draws, kept, worlds", given, "1 or more each, kept 2 to draws", fix)


def learn_gate(
    act: Callable[[Seen], Actions], task: ExcavationConfig, config: GateSearch | None = None, *, seed: int = 0
) -> ThresholdConfig:
    """The gate with which `act` delivers most: the mean of what was kept in the last round."""
    c, rng = config or GateSearch(), np.random.default_rng(seed)
    mean, spread = np.full(len(RANGES), 0.5), np.full(len(RANGES), 0.3)
    for number in range(c.rounds):
        drawn = np.clip(rng.normal(mean, spread, (c.draws, len(RANGES))), 0.0, 1.0)
        drawn[0] = mean
        worlds = seed * 1000 + number  # the same for all draws of a round, so that they differ by the gate alone
        score = [_pellets(act, task, gate_of(row), c, worlds) for row in drawn]
        best = drawn[np.argsort(score)[-c.kept :]]
        mean, spread = best.mean(0), np.maximum(best.std(0), 0.02)
    return gate_of(mean)


def gate_of(row: np.ndarray[tuple[int], np.dtype[np.float64]]) -> ThresholdConfig:
    """The gate of numbers between 0 and 1, in the order of `RANGES`.

    >>> gate_of(np.zeros(7)).retry
    0.001
    """
    found = {}
    for part, (name, (least, most, logarithmic)) in zip(row, RANGES.items(), strict=True):
        value = least * (most / least) ** part if logarithmic else least + (most - least) * part
        found[name] = round(float(value), 6)
    low, high = sorted((found["lowest"], found["highest"]))
    found |= {"lowest": low, "highest": high}
    return ThresholdConfig(**found, ceiling=max(high, ThresholdConfig().ceiling))


def _pellets(
    act: Callable[[Seen], Actions], task: ExcavationConfig, gate: ThresholdConfig, c: GateSearch, seed: int
) -> float:
    env = Excavation(task, agents=c.agents, worlds=c.worlds, seed=seed)
    rests = Thresholds(env, gate, seed=seed)
    work(env, act, rests, task.horizon)
    if c.agents > LOST:
        env.leave(busiest(env))
        work(env, act, rests, task.horizon)
    return float(env.delivered.sum(-1).mean())


def busiest(env: Excavation) -> Flags:
    """The `LOST` agents of every world who have delivered most, (B, N)."""
    return np.asarray(env.delivered.argsort(-1).argsort(-1) >= env.agents - LOST)


def settings(gate: ThresholdConfig) -> dict[str, float]:
    """For a record."""
    return dataclasses.asdict(gate)
