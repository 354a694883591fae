"""Plots in the style of the reports, drawn without a display."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


def new_figure(rows: int = 1, *, columns: int = 1, height: float | None = None) -> tuple[Figure, list[Axes]]:
    """An empty figure and its axes, row by row. `height` in inches; by default one that suits the rows."""
    from matplotlib.figure import Figure

    high = height if height is not None else 3.4 if rows == 1 else 1.9 * rows
    figure = Figure(figsize=(8, high), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=columns == 1, sharey=True, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid.flat)


def look(i: int) -> dict[str, Any]:
    """Colour and line of the series number `i`: eight colours solid, then the same dashed."""
    return {"color": COLOURS[i % len(COLOURS)], "ls": "-" if i < len(COLOURS) else "--", "lw": 1.2}


def legend_beside(axes: Axes, *, columns: int = 1, like: Axes | None = None) -> None:
    """A legend to the right of the axes, where it covers nothing. It names what `like` shows, by default the axes."""
    shown = (like or axes).get_legend_handles_labels()
    axes.legend(*shown, frameon=False, fontsize=9, ncols=columns, loc="center left", bbox_to_anchor=(1, 0.5))


def svg(figure: Figure) -> str:
    """A figure as SVG to put into a page; the same figure gives the same text."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "dynamix"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
