"""The excavation task of S-MADRL (arXiv 2510.03592), B worlds at once: fetch pellets through a narrow tunnel.

Equal agents, one cell each. An agent at the face of the tunnel takes a pellet, in the nest it leaves it. All move at
the same time: a cell goes to one of those who want it, drawn by lot; nobody enters a cell that its owner does not
leave, and two cannot change places. An agent sees what is next to it and the traces around; nothing else tells it of
the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamix.errors import ConfigError
from dynamix.policies.stigmergic.field import Decay, Floats, Ints, MemoryField
from dynamix_lab.experiments.excavation.ground import Burrow, Shape
from dynamix_lab.experiments.excavation.sharing import WorkShares

Seen = NDArray[np.float32]
Flags = NDArray[np.bool_]
ACTIONS = ("stay", "up", "down", "left", "right")
_OWN = 6  # carrying, row, column, steps to the goal, and the goal's direction in rows and columns
_TRACE_CEILING = 4.0  # what is read is cut there and halved, so that 1 is a cell visited at every step


@dataclass(frozen=True, slots=True)
class EventRewards:
    """Points and the weight of each of the four events; known at second hand only."""

    closer: float = 2.5  # a step towards the own goal: the face, or with a pellet the nest
    collision: float = -2.0  # a move refused, by an agent or by rock
    pickup: float = 50.0
    delivery: float = 50.0
    closer_weight: float = 0.2
    collision_weight: float = 0.2
    pickup_weight: float = 0.2
    delivery_weight: float = 0.4


@dataclass(frozen=True, slots=True)
class ExcavationConfig:
    """All ours, but for the rewards and the decay (see there).

    sight    radius of the square in which an agent sees rock and other agents, cells
    smell    radius of the square in which it reads traces
    horizon  steps of an episode
    pellets  that there are; None: they never run out
    speeds   chance that an agent's move is carried out, one per agent, repeated from the start if fewer: (1.0, 0.5)
             makes every second one slow
    """

    shape: Shape = field(default_factory=Shape)
    decay: Decay = field(default_factory=Decay)
    rewards: EventRewards = field(default_factory=EventRewards)
    sight: int = 1
    smell: int = 2
    horizon: int = 1000
    pellets: int | None = None
    speeds: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, least in (("sight", 1), ("smell", 1), ("horizon", 1)):
            if not least <= getattr(self, name) <= 10**9:
                raise ConfigError(name, getattr(self, name), f"{least} or more", "check the configuration")
        if self.pellets is not None and self.pellets < 1:
            raise ConfigError("pellets", self.pellets, "1 or more, or None", "None means that they never run out")
        if not self.speeds or not all(0 < s <= 1 for s in self.speeds):
            raise ConfigError("speeds", self.speeds, "one or more numbers above 0, up to 1", "1.0 is full speed")

    @property
    def features(self) -> int:
        """Length of an observation."""
        return int(self.traces.stop)

    @property
    def traces(self) -> slice:
        """Where in an observation the traces are: a learner without them masks this part."""
        first = _OWN + 3 * ((2 * self.sight + 1) ** 2 - 1)
        return slice(first, first + (2 * self.smell + 1) ** 2)


class Excavation:
    """B worlds of N agents: actions (B, N) of 0 to 4 (`ACTIONS`), observations (B, N, F), rewards (B, N).

    Own random generator; `state_dict` makes an episode go on exactly.

    >>> env = Excavation(agents=2, worlds=3, seed=0)
    >>> env.reset().shape
    (3, 2, 55)
    >>> seen, reward, finished = env.step(np.zeros((3, 2), dtype=int))
    >>> reward.sum(), finished.any()
    (np.float64(0.0), np.False_)
    """

    def __init__(
        self, config: ExcavationConfig | None = None, *, agents: int = 8, worlds: int = 1, seed: int = 0
    ) -> None:
        self.config = c = config or ExcavationConfig()
        self.burrow = Burrow(c.shape, margin=max(c.sight, c.smell))
        room = int(self.burrow.nest.sum())
        if not 1 <= agents <= room:
            raise ConfigError("agents", agents, f"1 to {room}, the cells of the nest", "enlarge the nest")
        if worlds < 1:
            raise ConfigError("worlds", worlds, "1 or more", "check the arguments")
        self.agents, self.worlds = agents, worlds
        self.rng = np.random.default_rng(seed)
        self.field = MemoryField(self.burrow.cells, c.decay, worlds=(worlds,))
        self._moves = np.array([0, -self.burrow.width, self.burrow.width, -1, 1])
        self._near = self.burrow.around(c.sight, centre=False)
        self._wide = self.burrow.around(c.smell, centre=True)
        self._speed = np.resize(np.array(c.speeds), agents)
        self._row = np.arange(worlds)[:, None]
        self.reset()

    def reset(self) -> Seen:
        """Everybody at a random place in the nest, fresh ground."""
        nest, shape = np.flatnonzero(self.burrow.nest), (self.worlds, self.agents)
        self.place = self.rng.permuted(np.tile(nest, (self.worlds, 1)), axis=1)[:, : self.agents]
        self.carrying = np.zeros(shape, dtype=bool)
        self.left = np.full(self.worlds, self.config.pellets or 0)
        self.delivered, self.collisions, self.bumps = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self.reward = np.zeros(shape)
        self.clock = 0
        self.field.clear()
        return self.observe()

    @property
    def over(self) -> bool:
        """Whether the horizon is reached (truncation, for all worlds at once)."""
        return self.clock >= self.config.horizon

    def step(self, action: ArrayLike) -> tuple[Seen, Floats, Flags]:
        """Move everybody once. Returns what they see, their rewards, and which worlds have no pellet left (B,)."""
        chosen = np.asarray(action)
        if chosen.shape != self.place.shape or not (chosen.min() >= 0 and chosen.max() < len(ACTIONS)):
            raise ConfigError("action", chosen.shape, f"{self.place.shape}, of 0 to 4", "pass one action per agent")
        idle = self.finished()[:, None] | (self.rng.random(self.place.shape) >= self._speed)
        wanted = self.place + self._moves[np.where(idle, 0, chosen)]
        bumped = self.burrow.rock[wanted]
        wanted = np.where(bumped, self.place, wanted)
        blocked = refused(self.place, wanted, self.rng.random(self.place.shape))
        moved = np.where(blocked, self.place, wanted)
        goal = np.where(self.carrying, self.burrow.to_nest[self.place], self.burrow.to_face[self.place])
        now = np.where(self.carrying, self.burrow.to_nest[moved], self.burrow.to_face[moved])
        self.place, self.clock = moved, self.clock + 1
        took, gave = self._handle_pellets()
        self.field.deposit(self.place, step=self.clock)
        w = self.config.rewards
        reward = (
            w.closer_weight * w.closer * (now < goal)
            + w.collision_weight * w.collision * (blocked | bumped)
            + w.pickup_weight * w.pickup * took
            + w.delivery_weight * w.delivery * gave
        )
        self.delivered += gave
        self.collisions += blocked
        self.bumps += bumped
        self.reward += reward
        return self.observe(), reward, self.finished()

    def finished(self) -> Flags:
        """Worlds (B,) in which every pellet is in the nest."""
        if self.config.pellets is None:
            return np.zeros(self.worlds, dtype=bool)
        return np.asarray(self.delivered.sum(-1) >= self.config.pellets)

    def observe(self) -> Seen:
        """What each agent sees, (B, N, F)."""
        b, c, place = self.burrow, self.config, self.place
        away = np.where(self.carrying, b.to_nest[place], b.to_face[place])
        own = (
            self.carrying,
            b.row[place] / c.shape.nest_rows,
            b.column[place] / b.columns,
            away / b.farthest,
            np.where(self.carrying, b.rows_to_nest[place], b.rows_to_face[place]),
            np.where(self.carrying, -1, 1) * (away > 0),
        )
        laden, empty = (np.zeros((self.worlds, b.cells), dtype=bool) for _ in range(2))
        laden[self._row, place] = self.carrying
        empty[self._row, place] = ~self.carrying
        near, wide = place[..., None] + self._near, place[..., None] + self._wide
        traces = self.field.read(wide.reshape(self.worlds, -1), step=self.clock).reshape(wide.shape)
        traces = np.minimum(traces, _TRACE_CEILING) / 2 * ~b.rock[wide]
        world = self._row[..., None]
        parts = (np.stack(own, -1), b.rock[near], empty[world, near], laden[world, near], traces)
        return np.concatenate(parts, -1, dtype=np.float32)

    def workload(self) -> WorkShares:
        """What was done since the last reset."""
        return WorkShares(
            self.clock, self.delivered.copy(), self.collisions.copy(), self.bumps.copy(), self.reward.copy()
        )

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in _STATE}
        return {
            **arrays,
            "clock": self.clock,
            "field": self.field.state_dict(),
            "random": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state[name].copy())
        self.clock = state["clock"]
        self.field.load_state_dict(state["field"])
        self.rng.bit_generator.state = state["random"]

    def _handle_pellets(self) -> tuple[Flags, Flags]:
        gave = self.carrying & self.burrow.nest[self.place]
        took = ~self.carrying & self.burrow.face[self.place]
        if self.config.pellets is not None:
            took &= took.cumsum(-1) <= self.left[:, None]
            self.left -= took.sum(-1)
        self.carrying = (self.carrying & ~gave) | took
        return took, gave


_STATE = ("place", "carrying", "left", "delivered", "collisions", "bumps", "reward")


def refused(place: Ints, wanted: Ints, lot: Floats) -> Flags:
    """Which moves (B, N) other agents prevent; `lot` decides who gets a cell that several want (the lowest).

    >>> refused(np.array([[0, 1, 2]]), np.array([[1, 2, 3]]), np.zeros((1, 3))).tolist()  # a file moves on
    [[False, False, False]]
    >>> refused(np.array([[0, 1]]), np.array([[1, 0]]), np.zeros((1, 2))).tolist()  # no changing places
    [[True, True]]
    """
    moving = wanted != place
    if place.shape[-1] == 1:
        return np.zeros_like(moving)
    onto = (wanted[..., :, None] == place[..., None, :]) & moving[..., :, None]  # [i, j]: i wants the cell of j
    same = (wanted[..., :, None] == wanted[..., None, :]) & moving[..., :, None] & moving[..., None, :]
    loses = (same & (lot[..., None, :] < lot[..., :, None])).any(-1)
    stays = ~moving | loses | (onto & onto.swapaxes(-1, -2)).any(-1)
    while True:
        further = stays | (onto & stays[..., None, :]).any(-1)
        if (further == stays).all():
            return np.asarray(moving & stays)
        stays = further
