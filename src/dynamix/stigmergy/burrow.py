"""The ground of the excavation task: a nest, a narrow tunnel, and the face at its end where pellets are dug."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in cells, ours (the paper's are not known to us): the nest is a rectangle, the tunnel leaves its middle.

    tunnel_width   1: nobody can pass anybody; 2: just
    """

    nest_rows: int = 6
    nest_columns: int = 2
    tunnel_length: int = 8
    tunnel_width: int = 2

    def __post_init__(self) -> None:
        for name in ("nest_rows", "nest_columns", "tunnel_length", "tunnel_width"):
            if not 1 <= getattr(self, name) <= 1000:
                raise ConfigError(name, getattr(self, name), "1 to 1000", "give a number of cells")
        if self.tunnel_width > self.nest_rows:
            fix = "make the tunnel narrower or the nest wider"
            raise ConfigError("tunnel_width", self.tunnel_width, f"1 to nest_rows={self.nest_rows}", fix)


class Burrow:
    """A `Shape` as flat arrays over a grid with a margin of `margin` cells of rock, so that no view leaves it.

    A cell is one integer, row * width + column. Neighbours are at -width, +width, -1, +1.

    >>> print(Burrow(Shape(nest_rows=4, nest_columns=2, tunnel_length=3, tunnel_width=2)).text())
    #######
    #..####
    #.....#
    #.....#
    #..####
    #######
    """

    def __init__(self, shape: Shape, *, margin: int = 1) -> None:
        rows, columns = shape.nest_rows, shape.nest_columns + shape.tunnel_length
        self.shape, self.margin = shape, margin
        self.height, self.width = rows + 2 * margin, columns + 2 * margin
        top = (rows - shape.tunnel_width) // 2
        row, column = (a - margin for a in np.divmod(np.arange(self.height * self.width), self.width))
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        aside = np.maximum(np.maximum(top - row, row - (top + shape.tunnel_width - 1)), 0)  # rows from the tunnel's
        self.nest = inside & (column < shape.nest_columns)
        self.rock = ~(self.nest | (inside & (aside == 0)))
        self.face = ~self.rock & (column == columns - 1)
        self.to_nest = np.maximum(column - (shape.nest_columns - 1), 0)  # steps, rock not looked at
        self.to_face = columns - 1 - column + aside
        self.row, self.column, self.aside = row, column, np.where(row < top, 1, -1) * (aside > 0)
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
