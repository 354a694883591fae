"""The ground of the excavation task: a nest, a narrow tunnel, and the face at its end, where agents take pellets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in cells, ours, as we do not know the paper's. The nest is a rectangle; the tunnel begins at its middle.

    tunnel_width   1: no agents can pass each other; 2: they just can
    chamber_rows, chamber_columns
                   size of the room at the end of the tunnel; 0 and 0: no room. The face is the last column
    tunnels        number of such grounds side by side with one common nest: one tunnel per `nest_rows` of its rows
    """

    nest_rows: int = 6
    nest_columns: int = 2
    tunnel_length: int = 8
    tunnel_width: int = 2
    chamber_rows: int = 0
    chamber_columns: int = 0
    tunnels: int = 1

    def __post_init__(self) -> None:
        for name in ("nest_rows", "nest_columns", "tunnel_length", "tunnel_width", "tunnels"):
            if not 1 <= getattr(self, name) <= 1000:
                raise ConfigError(name, getattr(self, name), "1 to 1000", "give a number of cells")
        if self.tunnel_width > self.nest_rows:
            fix = "make the tunnel narrower or the nest wider"
            raise ConfigError("tunnel_width", self.tunnel_width, f"1 to nest_rows={self.nest_rows}", fix)
        chamber = (self.chamber_rows, self.chamber_columns)
        if chamber != (0, 0) and not (
            self.tunnel_width <= self.chamber_rows <= self.nest_rows and 1 <= self.chamber_columns <= 1000
        ):
            allowed = f"(0, 0), or ({self.tunnel_width} to {self.nest_rows}, 1 to 1000)"
            raise ConfigError("chamber_rows, chamber_columns", chamber, allowed, "check the shape")


# Methods are compared on two grounds of equal distance. In the second, one of two agents that meet must back out.
GROUNDS = {
    "two-lane": Shape(),
    "single-file": Shape(tunnel_length=6, tunnel_width=1, chamber_rows=3, chamber_columns=2),
}


def drawn(rng: np.random.Generator, *, but: Collection[Shape] = ()) -> Shape:
    """Draw a ground: a tunnel one cell wide and 4 to 12 long, a chamber, and a nest for 18 agents or more.

    but   grounds that are never drawn, because they are for evaluation
    """
    while True:
        nest = int(rng.integers(6, 9)), int(rng.integers(3, 5))
        length, chamber = int(rng.integers(4, 13)), (int(rng.integers(1, 6)), int(rng.integers(1, 4)))
        if (shape := Shape(*nest, length, 1, *chamber)) not in but:
            return shape


def held_out(count: int = 10) -> list[tuple[Shape, int]]:
    """Grounds on which no training runs, and the number of agents (3 to 12) on each."""
    draws = [np.random.default_rng([880_000, i]) for i in range(count)]
    return [(drawn(rng), int(rng.integers(3, 13))) for rng in draws]


class Burrow:
    """A `Shape` as flat arrays over a grid. A margin of `margin` cells of rock keeps every view inside the grid.

    A cell is one integer, row * width + column. Its neighbours are at -width, +width, -1 and +1.

    >>> print(Burrow(Shape(nest_rows=4, nest_columns=2, tunnel_length=3, tunnel_width=2)).text())
    #######
    #..####
    #.....#
    #.....#
    #..####
    #######
    """

    def __init__(self, shape: Shape, *, margin: int = 1) -> None:
        rows, tunnel_end = shape.nest_rows, shape.nest_columns + shape.tunnel_length
        columns = tunnel_end + shape.chamber_columns
        self.shape, self.margin, self.columns = shape, margin, columns
        self.height, self.width = rows * shape.tunnels + 2 * margin, columns + 2 * margin
        row, column = (a - margin for a in np.divmod(np.arange(self.height * self.width), self.width))
        inside = (row >= 0) & (row < rows * shape.tunnels) & (column >= 0) & (column < columns)
        self.tunnel = np.where(inside, row // rows, 0)  # the nearest one
        row = np.where(inside, row % rows, row)  # among the rows of its tunnel
        aside, down = _aside(row, rows, shape.tunnel_width)
        self.nest = inside & (column < shape.nest_columns)
        chamber = inside & (column >= tunnel_end) & (_aside(row, rows, shape.chamber_rows)[0] == 0)
        tunnel = inside & (column < tunnel_end) & (aside == 0)
        self.rock = ~(self.nest | tunnel | chamber)
        self.face = ~self.rock & (column == columns - 1)
        self.row, self.column = row, column
        # Steps to the goals, and their direction in rows, ignoring other agents.
        self.to_face = columns - 1 - column + aside * self.nest
        self.to_nest = np.maximum(column - (shape.nest_columns - 1), 0) + aside * chamber
        self.rows_to_face, self.rows_to_nest = down * self.nest, down * chamber
        self.off_path = (2 * aside + shape.nest_columns - 1 - column) * self.nest  # larger: less in the way
        self.farthest = int(self.to_face[~self.rock].max())

    @property
    def cells(self) -> int:
        return self.height * self.width

    def around(self, radius: int, *, centre: bool) -> Ints:
        """Offsets of the square of cells within `radius`, row by row."""
        steps = np.arange(-radius, radius + 1)
        offsets = (steps[:, None] * self.width + steps).reshape(-1)
        return offsets if centre else offsets[offsets != 0]

    def text(self) -> str:
        """The ground as lines of # (rock) and . (free)."""
        grid = np.where(self.rock, "#", ".").reshape(self.height, self.width)
        return "\n".join("".join(line) for line in grid)


def _aside(row: Ints, rows: int, wide: int) -> tuple[Ints, Ints]:
    """Steps to the `wide` middle rows of `rows`, and the direction there: down (1), up (-1) or none (0)."""
    top = (rows - wide) // 2
    steps = np.maximum(np.maximum(top - row, row - (top + wide - 1)), 0)
    return steps, np.where(row < top, 1, -1) * (steps > 0)
