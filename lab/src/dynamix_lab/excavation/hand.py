"""Hand-written motion on typed traces, for a tunnel one cell wide that ends in a chamber: a baseline for learning.

Like a learner, it acts on each agent's own observation. Laden agents go home. Empty agents go in as a file. They turn
round for a laden agent in the tunnel, or for one ahead that turned round. Laden agents wait in the chamber until the
file is in, so that all leave together. In the nest, agents keep away from the mouth while others come out.
"""

from __future__ import annotations

import numpy as np

from dynamix.errors import ConfigError
from dynamix.window import Ints
from dynamix_lab.excavation.world import KINDS, ExcavationConfig, Flags, Seen

STAY, UP, DOWN, LEFT, RIGHT = range(5)
_FRESH = 0.5  # a stronger trace is from this step


class HandMotion:
    """Gives actions (B, N) for observations (B, N, F). It has its own random generator. Its probabilities per step:

    courtesy   a laden agent in the chamber waits for agents that come in
    gives_way  an empty agent in the tunnel turns round for a laden one at the chamber's entrance
    leaves     an empty agent at the chamber's entrance leaves, if no cell next to it is free
    """

    def __init__(
        self,
        task: ExcavationConfig,
        *,
        courtesy: float = 0.99,
        gives_way: float = 0.1,
        leaves: float = 0.3,
        seed: int = 0,
    ) -> None:
        shape = task.shape
        if task.signs != "typed" or shape.tunnel_width != 1 or not shape.chamber_columns:
            fix = 'use GROUNDS["single-file"] and signs="typed"'
            raise ConfigError("task", (task.signs, shape), "typed traces, a tunnel one cell wide, a chamber", fix)
        if task.sight != 1 or task.smell != 2:
            raise ConfigError("sight, smell", (task.sight, task.smell), "1 and 2", "leave them as they are")
        self.task, self.courtesy, self.gives_way, self.leaves = task, courtesy, gives_way, leaves
        self.rng = np.random.default_rng(seed)

    def __call__(self, seen: Seen) -> Ints:
        return _Look(self, seen).actions()


class _Look:
    """The agents' observations in one step, with a name for each part."""

    def __init__(self, by: HandMotion, seen: Seen) -> None:
        shape = by.task.shape
        columns = shape.nest_columns + shape.tunnel_length + shape.chamber_columns
        self.by, self.rng, self.shape = by, by.rng, seen.shape[:-1]
        self.end = shape.nest_columns + shape.tunnel_length
        self.carrying = seen[..., 0] > 0.5
        self.row = (seen[..., 1] * shape.nest_rows).round().astype(int)
        self.column = (seen[..., 2] * columns).round().astype(int)
        self.towards = seen[..., 4].round().astype(int)  # the goal's direction in rows
        blocks = seen[..., 6:30].reshape(*self.shape, 3, 8)
        around = np.zeros((*self.shape, 3, 9), dtype=bool)
        around[..., [0, 1, 2, 3, 5, 6, 7, 8]] = blocks > 0.5
        rock, empty, laden = np.moveaxis(around.reshape(*self.shape, 3, 3, 3), -3, 0)
        self.rock, self.taken = rock, empty | laden
        count = len(KINDS) * 25
        self.traces = seen[..., 30 : 30 + count].reshape(*self.shape, len(KINDS), 5, 5) > _FRESH
        self.heading = seen[..., 30 + count + 1]
        self.middle = (shape.nest_rows - 1) // 2
        self.nest_columns = shape.nest_columns
        self.nest = self.column < shape.nest_columns
        self.chamber = self.column >= self.end
        self.tunnel = ~self.nest & ~self.chamber

    def actions(self) -> Ints:
        return np.where(self.carrying, self._laden(), self._empty())

    def _trace(self, kind: int, cells: list[tuple[int, int]], *, in_tunnel: bool = True) -> Flags:
        """Whether a cell at one of the offsets (rows, columns) has a fresh trace; `in_tunnel`: only tunnel cells."""
        found = np.zeros(self.shape, dtype=bool)
        for row, column in cells:
            there = self.traces[..., kind, row + 2, column + 2]
            if in_tunnel:
                at = self.column + column
                there = there & (at >= self.nest_columns) & (at < self.end)
            found |= there
        return found

    def _free(self, row: int, column: int) -> Flags:
        return np.asarray(~self.taken[..., row + 1, column + 1] & ~self.rock[..., row + 1, column + 1])

    def _occupied(self, action: Ints) -> Flags:
        """Whether an agent is on the cell to which `action` leads."""
        rows, columns = np.array([0, -1, 1, 0, 0])[action], np.array([0, 0, 0, -1, 1])[action]
        b, n = np.indices(self.shape)
        return np.asarray(self.taken[b, n, rows + 1, columns + 1])

    def _chance(self, part: float) -> Flags:
        return np.asarray(self.rng.random(self.shape) < part)

    def _aside(self, otherwise: Ints | int) -> Ints:
        """Up or down, whichever is free; else `otherwise`."""
        up, down = self._free(-1, 0), self._free(1, 0)
        return np.where(up & (self._chance(0.5) | ~down), UP, np.where(down, DOWN, otherwise))

    def _rows(self, otherwise: int) -> Ints:
        return np.where(self.towards > 0, DOWN, np.where(self.towards < 0, UP, otherwise))

    def _at_entrance(self) -> Flags:
        return np.asarray((self.column == self.end) & (self.row == self.middle))

    def _laden(self) -> Ints:
        home = self._rows(LEFT)
        stuck = self.chamber & self._occupied(home) & self._chance(0.3)
        home = np.where(stuck, np.where(self._chance(0.5), UP, DOWN), home)
        come_in = self._trace(1, [(r, c) for r in range(-2, 3) for c in (-1, -2)])
        waits = self.chamber & come_in & self._chance(self.by.courtesy)
        aside = self._aside(np.where(self._free(0, 1), RIGHT, STAY))
        return np.where(waits, np.where(self._at_entrance(), aside, STAY), home)

    def _empty(self) -> Ints:
        ahead = [(r, c) for r in range(-2, 3) for c in (1, 2)]
        laden, turned = self._trace(0, ahead), self._trace(2, [(0, 1), (0, 2)])
        go = self._rows(RIGHT)
        # At the chamber's entrance: pass an agent in the way, or go out again if no cell is free.
        blocked = self.chamber & self._occupied(go)
        turn = np.where(self._chance(0.5), UP, DOWN)  # even onto a taken cell: four agents in a ring can all move
        go = np.where(blocked & self._at_entrance(), self._aside(turn), go)
        full = (
            self._at_entrance()
            & ~self._free(0, 1)
            & ~self._free(-1, 0)
            & ~self._free(1, 0)
            & self._chance(self.by.leaves)
        )
        held = self._trace(0, [(0, 1)], in_tunnel=False) & self._chance(self.by.gives_way)
        behind = self._trace(2, [(0, 1)], in_tunnel=False)
        out = self.tunnel & (laden | turned | behind | held | (self.heading < 0))
        go = np.where(full | out, LEFT, go)
        return np.where(self.nest, self._at_home(laden | self._trace(2, ahead)), go)

    def _at_home(self, busy: Flags) -> Ints:
        """The moves of empty agents in the nest. `busy`: an agent comes out."""
        go, middle = self._rows(RIGHT), self.row == self.middle
        door = middle & (self.column == self.nest_columns - 1)
        ways = np.stack([self._free(-1, 0), self._free(1, 0), self._free(0, -1)])
        worth = self.rng.random(ways.shape) * ways
        off = np.where(worth.max(0) > 0, np.array([UP, DOWN, LEFT])[worth.argmax(0)], STAY)
        up, down = np.where(ways[0], UP, STAY), np.where(ways[1], DOWN, STAY)
        either = np.where(self._chance(0.5), np.where(ways[0], UP, down), np.where(ways[1], DOWN, up))
        outwards = np.where(self.row < self.middle, up, np.where(self.row > self.middle, down, either))
        around = self._occupied(go) & self._chance(0.5) & self._free(0, 1)
        near = np.abs(self.row - self.middle) <= 1
        waits = busy | (self._occupied(go) & ~self._follows(go))
        shuffles = self._occupied(go) & self._chance(0.15)  # another agent may want to pass here
        waiting = np.where(near & busy, outwards, np.where(shuffles, off, STAY))
        inner = np.where(waits, waiting, np.where(around, RIGHT, go))
        return np.where(door, np.where(busy, off, go), inner)

    def _follows(self, action: Ints) -> Flags:
        """Whether the agent on the cell to which `action` leads is on its way in."""
        rows, columns = np.array([0, -1, 1, 0, 0])[action], np.array([0, 0, 0, -1, 1])[action]
        b, n = np.indices(self.shape)
        return np.asarray(self.traces[b, n, 1, rows + 2, columns + 2])
