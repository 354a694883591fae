"""The excavation task of S-MADRL (arXiv 2510.03592), B worlds at once: fetch pellets through a narrow tunnel.

Equal agents occupy one cell each. An agent takes a pellet at the face of the tunnel, and delivers it in the nest. All
move at the same time. If several want a cell, a lot decides. No agent enters an occupied cell unless its occupant
leaves, and two agents cannot swap. An agent sees the cells next to it and reads the traces around it; it knows nothing
else of the others. An empty agent in the nest may rest: it moves to a cell where it blocks no other agent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamix.errors import ConfigError
from dynamix.window import Floats, Ints
from dynamix_lab.excavation.fading import Decay, FadingField
from dynamix_lab.excavation.ground import Burrow, Shape
from dynamix_lab.excavation.sharing import WorkShares

Seen = NDArray[np.float32]
Flags = NDArray[np.bool_]
ACTIONS = ("stay", "up", "down", "left", "right")
SIGNS = ("visits", "typed")
KINDS = ("laden", "going in", "going out")  # kinds of typed traces
_MANY_ENTRIES = 8.0  # per 20 steps; readings are divided by it
_HEADINGS = np.array([0, 0, 0, -1, 1])  # by action: left leads out, right leads in
_OWN = 6  # own features: carrying, row, column, steps to the goal, the goal's direction in rows and columns
_CEILING = 2.0  # largest reading; readings of visits are halved first


@dataclass(frozen=True, slots=True)
class EventRewards:
    """Points and weight of each of the four events. The defaults are second-hand."""

    closer: float = 2.5  # a step towards the agent's goal: the face, or with a pellet the nest
    collision: float = -2.0  # a move that an agent or rock blocks
    pickup: float = 50.0
    delivery: float = 50.0
    closer_weight: float = 0.2
    collision_weight: float = 0.2
    pickup_weight: float = 0.2
    delivery_weight: float = 0.4


@dataclass(frozen=True, slots=True)
class ExcavationConfig:
    """Settings, all ours except the rewards and the decay (see there).

    signs    meaning of a trace. "visits" (the paper's): an agent was here; fades by `decay`. "typed": a laden agent, an
             empty one on its way in, or one on its way out was here; each fades by `fast`. In the nest all agents then
             also read how often the tunnel was entered; fades by `entries`
    sight    radius in cells of the square in which an agent sees rock and other agents
    smell    radius in cells of the square in which it reads traces
    noise    standard deviation of the noise that is added to every reading of a trace
    late     delay in steps of the traces around an agent
    horizon  steps of an episode
    pellets  number of pellets; None: they never run out
    speeds   probability that an agent's move is carried out, one per agent, repeated from the start if there are fewer:
             (1.0, 0.5) makes every second agent slow
    """

    shape: Shape = field(default_factory=Shape)
    signs: str = "visits"
    decay: Decay = field(default_factory=Decay)
    fast: Decay = field(default_factory=lambda: Decay(alpha=0.7, beta=1.0, start=0.0))
    entries: Decay = field(default_factory=lambda: Decay(alpha=0.02, beta=0.4, start=0.0))
    rewards: EventRewards = field(default_factory=EventRewards)
    sight: int = 1
    smell: int = 2
    noise: float = 0.0
    late: int = 0
    horizon: int = 1000
    pellets: int | None = None
    speeds: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, least in (("sight", 1), ("smell", 1), ("horizon", 1), ("late", 0), ("noise", 0)):
            if not least <= getattr(self, name) <= 10**9:
                raise ConfigError(name, getattr(self, name), f"{least} or more", "check the configuration")
        if self.signs not in SIGNS:
            raise ConfigError("signs", self.signs, " or ".join(SIGNS), "check the spelling")
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
        """The part of an observation that holds the traces. A learner without traces masks it."""
        first, around = _OWN + 3 * ((2 * self.sight + 1) ** 2 - 1), (2 * self.smell + 1) ** 2
        return slice(first, first + (len(KINDS) * around + 2 if self.signs == "typed" else around))


class Excavation:
    """B worlds of N agents: actions (B, N) of 0 to 4 (`ACTIONS`), observations (B, N, F), rewards (B, N).

    It has its own random generator. An episode that is resumed from `state_dict` continues exactly.

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
        self.typed = c.signs == "typed"
        kinds, decay = (len(KINDS), c.fast) if self.typed else (1, c.decay)
        self.field = FadingField(np.tile(~self.burrow.rock, kinds), decay, worlds=worlds, late=c.late)
        self.entries = FadingField(np.ones(c.shape.tunnels, dtype=bool), c.entries, worlds=worlds)
        self._moves = np.array([0, -self.burrow.width, self.burrow.width, -1, 1])
        self._near = self.burrow.around(c.sight, centre=False)
        wide = self.burrow.around(c.smell, centre=True)
        self._wide = ((np.arange(kinds) * self.burrow.cells)[:, None] + wide).reshape(-1)
        self._known = self._what_places_show()
        self._slow = min(c.speeds) < 1
        self._speed = np.resize(np.array(c.speeds), agents)
        self._first = (np.arange(worlds) * self.burrow.cells)[:, None]
        self._row = np.arange(worlds)[:, None]
        inside = (self.burrow.row >= 0) & (self.burrow.column >= 0)
        self._outside = int(np.flatnonzero(self.burrow.rock & inside)[0])  # rock, where no agent is met
        self.reset()

    def reset(self) -> Seen:
        """Put all agents on random cells of the nest, and reset the traces and counts."""
        nest, shape = np.flatnonzero(self.burrow.nest), (self.worlds, self.agents)
        self.place = self.rng.permuted(np.tile(nest, (self.worlds, 1)), axis=1)[:, : self.agents]
        self.carrying = np.zeros(shape, dtype=bool)
        self.left = np.full(self.worlds, self.config.pellets or 0)
        self.delivered, self.collisions, self.bumps = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self.early = self.delivered.copy()
        self.absent = np.zeros(shape, dtype=bool)
        self.gave, self.turned_back = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        self.heading = np.ones(shape, dtype=np.int64)
        self.reward = np.zeros(shape)
        self.clock = 0
        self.field.clear()
        self.entries.clear()
        return self.observe()

    @property
    def over(self) -> bool:
        """Whether the horizon is reached (truncation, for all worlds at once)."""
        return self.clock >= self.config.horizon

    def step(self, action: ArrayLike, *, resting: Flags | None = None) -> tuple[Seen, Floats, Flags]:
        """Move all agents once. Returns observations, rewards, and the worlds (B,) with all pellets in the nest.

        resting   (B, N): resting agents that are empty and in the nest move out of the way, whatever their action is

        Afterwards `gave` (B, N) marks agents that delivered, and `turned_back` those that came home without a pellet.
        """
        chosen = np.asarray(action)
        if chosen.shape != self.place.shape or not (chosen.min() >= 0 and chosen.max() < len(ACTIONS)):
            raise ConfigError("action", chosen.shape, f"{self.place.shape}, of 0 to 4", "pass one action per agent")
        if resting is not None and (walks := resting & self.at_home).any():
            chosen = np.where(walks, self.off_the_way(), chosen)
        idle = self.absent if self.config.pellets is None else self.finished()[:, None] | self.absent
        if self._slow:
            idle = idle | (self.rng.random(self.place.shape) >= self._speed)
        was, carried = self.place, self.carrying.copy()
        wanted = self.place + self._moves[np.where(idle, 0, chosen)]
        bumped = self.burrow.rock[wanted]
        wanted = np.where(bumped, self.place, wanted)
        blocked = refused(self.place, wanted, self.rng.random(self.place.shape))
        moved = np.where(blocked, self.place, wanted)
        goal = np.where(self.carrying, self.burrow.to_nest[self.place], self.burrow.to_face[self.place])
        now = np.where(self.carrying, self.burrow.to_nest[moved], self.burrow.to_face[moved])
        self.place, self.clock = moved, self.clock + 1
        took, gave = self._handle_pellets()
        left_nest = self.burrow.nest[was] & ~self.burrow.nest[moved]
        self.gave, self.turned_back = gave, self.burrow.nest[moved] & ~self.burrow.nest[was] & ~carried
        wish = np.where(idle, 0, _HEADINGS[chosen])
        self.heading = np.where(gave | self.turned_back, 1, np.where(wish == 0, self.heading, wish))
        self.field.fade()
        self.field.deposit(self.place + self._kind() * self.burrow.cells)
        self.entries.fade()
        self.entries.deposit(self.burrow.tunnel[was], left_nest)
        w = self.config.rewards
        reward = (
            w.closer_weight * w.closer * (now < goal)
            + w.collision_weight * w.collision * (blocked | bumped)
            + w.pickup_weight * w.pickup * took
            + w.delivery_weight * w.delivery * gave
        )
        self.delivered += gave
        if self.clock == self.config.horizon // 2:
            self.early = self.delivered.copy()
        self.collisions += blocked
        self.bumps += bumped
        self.reward += reward
        return self.observe(), reward, self.finished()

    def leave(self, who: Flags) -> None:
        """Remove the agents `who` (B, N), with the pellets that they carry, until `come_back`."""
        self.absent = self.absent | who
        self.place = np.where(who, self._outside, self.place)
        self.carrying = self.carrying & ~who

    def come_back(self, who: Flags) -> None:
        """Put the removed agents among `who` (B, N) back on free cells of the nest, without pellets."""
        for world, agent in zip(*np.nonzero(who & self.absent), strict=True):
            taken = set(self.place[world].tolist())
            free = [cell for cell in np.flatnonzero(self.burrow.nest).tolist() if cell not in taken]
            self.place[world, agent] = self.rng.choice(free)
            self.absent[world, agent] = False
            self.heading[world, agent] = 1

    def finished(self) -> Flags:
        """The worlds (B,) in which all pellets are in the nest."""
        if self.config.pellets is None:
            return np.zeros(self.worlds, dtype=bool)
        return np.asarray(self.delivered.sum(-1) >= self.config.pellets)

    def observe(self) -> Seen:
        """Each agent's observation, (B, N, F)."""
        seen = np.empty((*self.place.shape, self.config.features), dtype=np.float32)
        others, traces = self._known.shape[-1], self.config.traces
        seen[..., :others] = self._known[self.carrying.astype(np.int64), self.place]
        there = np.zeros((2, self.worlds * self.burrow.cells), dtype=np.float32)
        at = self.place + self._first
        there[self.carrying.astype(np.int64), at] = 1.0
        near = at[..., None] + self._near
        middle = others + len(self._near)
        seen[..., others:middle], seen[..., middle : traces.start] = there[0].take(near), there[1].take(near)
        seen[..., traces] = self._smelt()
        return seen

    @property
    def at_home(self) -> Flags:
        """The agents in the nest without a pellet, (B, N)."""
        return np.asarray(self.burrow.nest[self.place] & ~self.carrying)

    def entries_now(self) -> Floats:
        """Entries into the nearest tunnel (B, N) per beta / alpha steps of `entries`: an exponential mean over the last
        1 / alpha steps or so. All agents in the nest read it.
        """
        return self.entries.smelt(self.burrow.tunnel[self.place])

    def off_the_way(self) -> Ints:
        """The action (B, N) for agents in the nest: to the free neighbouring cell most out of the way, or stay."""
        b, taken = self.burrow, np.zeros((self.worlds, self.burrow.cells), dtype=bool)
        taken[self._row, self.place] = True
        to = self.place[..., None] + self._moves
        open_ = b.nest[to] & ~taken[self._row[..., None], to]
        open_[..., 0] = True
        worth = np.where(open_, b.off_path[to], -np.inf) + 0.01 * self.rng.random(to.shape)
        return np.asarray(worth.argmax(-1))

    def traces_now(self) -> Floats:
        """The strength of traces of all kinds on every cell, (B, cells)."""
        return np.asarray(self.field.value.reshape(self.worlds, -1, self.burrow.cells).sum(1))

    def _kind(self) -> Ints:
        """The kind (B, N) of trace that each agent leaves."""
        return np.where(self.carrying, 0, np.where(self.heading > 0, 1, 2)) if self.typed else np.zeros_like(self.place)

    def _what_places_show(self) -> Seen:
        """The constant part of observations (2, cells, ...), by carrying and cell: own features, then rock around."""
        b, cells = self.burrow, np.arange(self.burrow.cells)
        inside = ~b.rock
        near = np.where(inside[:, None], cells[:, None] + self._near, 0)
        known = []
        for carrying, away, rows, towards in (
            (0, b.to_face, b.rows_to_face, 1),
            (1, b.to_nest, b.rows_to_nest, -1),
        ):
            row, column = b.row / self.config.shape.nest_rows, b.column / b.columns
            own = (np.full(b.cells, carrying), row, column, away / b.farthest, rows, towards * (away > 0))
            known.append(np.concatenate([np.stack(own, -1), b.rock[near]], -1))
        return np.stack(known).astype(np.float32)

    def _smelt(self) -> Floats:
        """The traces around each agent, kind after kind; if typed, then entries and own heading (B, N, K)."""
        traces = self.field.smelt(self.place[..., None] + self._wide)
        if not self.typed:
            traces = traces / 2
        if self.config.noise:
            traces = np.maximum(traces + self.config.noise * self.rng.standard_normal(traces.shape), 0.0)
        traces = np.minimum(traces, _CEILING)
        if not self.typed:
            return traces
        mouth = np.minimum(self.entries_now() / _MANY_ENTRIES, _CEILING) * self.burrow.nest[self.place]
        return np.concatenate([traces, mouth[..., None], self.heading[..., None]], -1)

    def workload(self) -> WorkShares:
        """The work since the last reset."""
        return WorkShares(
            self.clock,
            self.delivered.copy(),
            self.collisions.copy(),
            self.bumps.copy(),
            self.reward.copy(),
            self.early.copy(),
        )

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in _STATE}
        return {
            **arrays,
            "clock": self.clock,
            "field": self.field.state_dict(),
            "entries": self.entries.state_dict(),
            "random": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state[name].copy())
        self.clock = state["clock"]
        self.field.load_state_dict(state["field"])
        self.entries.load_state_dict(state["entries"])
        self.rng.bit_generator.state = state["random"]

    def _handle_pellets(self) -> tuple[Flags, Flags]:
        gave = self.carrying & self.burrow.nest[self.place]
        took = ~self.carrying & self.burrow.face[self.place]
        if self.config.pellets is not None:
            took &= took.cumsum(-1) <= self.left[:, None]
            self.left -= took.sum(-1)
        self.carrying = (self.carrying & ~gave) | took
        return took, gave


_STATE = (
    "place",
    "carrying",
    "left",
    "delivered",
    "collisions",
    "bumps",
    "gave",
    "turned_back",
    "heading",
    "early",
    "absent",
    "reward",
)


def refused(place: Ints, wanted: Ints, lot: Floats) -> Flags:
    """The moves (B, N) that other agents block. If several want a cell, the agent with the lowest `lot` gets it.

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
