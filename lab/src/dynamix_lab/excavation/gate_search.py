"""Learns a threshold gate for a motion by the cross-entropy method (Rubinstein 1999).

Rest pays only over hundreds of steps, so a learner whose discount covers ten steps cannot learn when to rest. This
search draws the numbers of `ThresholdConfig`, tries them, and draws again around the best. All draws of a round run at
the same time, each in its own worlds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dynamix.errors import ConfigError
from dynamix.window import Floats
from dynamix_lab.excavation.learner import Actions, work
from dynamix_lab.excavation.resting import ThresholdConfig, Thresholds
from dynamix_lab.excavation.sharing import correlations, gini
from dynamix_lab.excavation.world import Excavation, ExcavationConfig, Flags, Seen

LOST = 3  # busiest agents that are removed
SETTLING = 300  # steps for the others to adapt, before the cost of the loss is measured
# By number: its minimum, its maximum, and whether the search uses a logarithmic scale.
RANGES = {
    "lowest": (0.5, 8.0, False),
    "highest": (0.5, 12.0, False),
    "steepness": (2.0, 40.0, True),
    "retry": (0.001, 0.05, True),
    "delivered": (0.02, 0.6, True),
    "turned_back": (-1.5, 0.0, False),
    "rested": (-0.02, 0.02, False),
    "floor": (0.5, 5.0, False),
    "memory": (0.003, 1.0, True),
}


@dataclass(frozen=True, slots=True)
class GateSearch:
    """Settings, ours. A trial is a horizon with `agents`, one `SETTLING` steps after the `LOST` busiest were removed,
    and half a horizon with each of `few`. Its score is the sum of the pellets per 1,000 steps in all of them, plus
    `division` times the lasting inequality with `agents`.

    rounds, draws, kept   of the cross-entropy method: draws per round, and the best ones that shape the next round
    agents, few           numbers of agents with which each draw is tried
    worlds                per draw
    division              pellets for a lasting inequality of 1: the Gini coefficient with all agents, times the
                          correlation of their deliveries in the two halves
    enough                lasting inequality above which more adds nothing to the score
    """

    rounds: int = 8
    draws: int = 24
    kept: int = 6
    agents: int = 8
    few: tuple[int, ...] = (2, 4)
    worlds: int = 4
    division: float = 400.0
    enough: float = 0.26

    def __post_init__(self) -> None:
        if not (2 <= self.kept <= self.draws and self.rounds >= 1 and self.worlds >= 1):
            given = (self.rounds, self.draws, self.kept, self.worlds)
            fix = "check the configuration"
            raise ConfigError("rounds, draws, kept, worlds", given, "1 or more each, kept 2 to draws", fix)

    def steps(self, horizon: int) -> int:
        """Steps of a world that a search takes.

        >>> GateSearch().steps(1000)
        2534400
        """
        of_draw = horizon + (SETTLING + horizon if self.agents > LOST else 0)
        of_draw += max(horizon // 2, 1) * sum(n < self.agents for n in self.few)
        return self.rounds * self.draws * self.worlds * of_draw


def learn_gate(
    act: Callable[[Seen], Actions], task: ExcavationConfig, config: GateSearch | None = None, *, seed: int = 0
) -> ThresholdConfig:
    """The gate with which `act` scores highest: the mean of the draws kept in the last round."""
    c, rng = config or GateSearch(), np.random.default_rng(seed)
    mean, spread = np.full(len(RANGES), 0.5), np.full(len(RANGES), 0.3)
    for number in range(c.rounds):
        drawn = np.clip(rng.normal(mean, spread, (c.draws, len(RANGES))), 0.0, 1.0)
        drawn[0] = mean
        score = scores(act, task, [gate_of(row) for row in drawn], c, seed=seed * 1000 + number)
        best = drawn[np.argsort(score)[-c.kept :]]
        mean, spread = best.mean(0), np.maximum(best.std(0), 0.02)
    return gate_of(mean)


def gate_of(row: np.ndarray[tuple[int], np.dtype[np.float64]]) -> ThresholdConfig:
    """The gate from numbers between 0 and 1, in the order of `RANGES`.

    >>> gate_of(np.zeros(len(RANGES))).retry
    0.001
    """
    found = {}
    for part, (name, (least, most, logarithmic)) in zip(row, RANGES.items(), strict=True):
        value = least * (most / least) ** part if logarithmic else least + (most - least) * part
        found[name] = round(float(value), 6)
    low, high = sorted((found["lowest"], found["highest"]))
    found |= {"lowest": low, "highest": high, "floor": min(found["floor"], low)}
    return ThresholdConfig(**found, ceiling=max(high, ThresholdConfig().ceiling))


def scores(
    act: Callable[[Seen], Actions],
    task: ExcavationConfig,
    gates: Sequence[ThresholdConfig],
    c: GateSearch,
    *,
    seed: int,
) -> Floats:
    """The score of each of `gates`, as in `GateSearch`."""
    each = [gate for gate in gates for _ in range(c.worlds)]

    def mean(values: Floats) -> Floats:
        return np.asarray(values.reshape(len(gates), c.worlds).mean(-1))

    env = Excavation(task, agents=c.agents, worlds=len(each), seed=seed)
    rests = Thresholds(env, each, seed=seed)
    work(env, act, rests, task.horizon)
    total = mean(1000 / task.horizon * env.delivered.sum(-1) + c.division * np.minimum(lasting(env), c.enough))
    if c.agents > LOST:
        env.leave(busiest(env))
        work(env, act, rests, SETTLING)
        before = env.delivered.sum(-1)
        work(env, act, rests, task.horizon)
        total = total + mean(1000 / task.horizon * (env.delivered.sum(-1) - before))
    for agents in (n for n in c.few if n < c.agents):
        env = Excavation(task, agents=agents, worlds=len(each), seed=seed + agents)
        steps = max(task.horizon // 2, 1)
        work(env, act, Thresholds(env, each, seed=seed), steps)
        total = total + mean(1000 / steps * env.delivered.sum(-1))
    return total


def lasting(env: Excavation) -> Floats:
    """The lasting inequality by world (B,): the Gini coefficient times the correlation of the two halves. A negative
    or undefined correlation counts as 0."""
    unequal = np.nan_to_num(gini(env.delivered))
    return np.asarray(unequal * np.maximum(np.nan_to_num(correlations(env.early, env.delivered - env.early)), 0.0))


def busiest(env: Excavation) -> Flags:
    """Marks (B, N) the `LOST` agents of every world that delivered most."""
    return np.asarray(env.delivered.argsort(-1).argsort(-1) >= env.agents - LOST)


def settings(gate: ThresholdConfig) -> dict[str, float]:
    """The gate's numbers, for a record."""
    return dataclasses.asdict(gate)
