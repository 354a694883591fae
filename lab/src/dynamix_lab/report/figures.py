"""Plots in the style of the reports, drawn without a display."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2a78d6", "#e0601f", "#12896b", "#a3227a", "#2b3abb", "#5e4205", "#ab85b4", "#9e511e")  # as in reports
_LINES, _MARKERS = ("-", "--", ":", "-."), "osD^vPX*"


def new_figure(rows: int = 1, *, columns: int = 1, height: float | None = None) -> tuple[Figure, list[Axes]]:
    """An empty figure and its axes, row by row. `height` in inches; the default suits the number of rows."""
    from matplotlib.figure import Figure

    high = height if height is not None else 3.4 if rows == 1 else 1.9 * rows
    figure = Figure(figsize=(6, high), layout="constrained")  # narrow, so that a phone shows it large enough
    grid = figure.subplots(rows, columns, sharex=columns == 1, sharey=True, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid.flat)


def look(i: int) -> dict[str, Any]:
    """Colour and dash of line number `i`. Neighbours differ in both; 32 lines differ in at least one."""
    return {"color": COLOURS[i % 8], "ls": _LINES[(i + i // 8) % 4], "lw": 1.4}


def dot(i: int) -> dict[str, Any]:
    """Colour and shape of point set `i`: the first eight are filled, and the next eight are hollow."""
    return {"color": COLOURS[i % 8], "marker": _MARKERS[i % 8], "ls": "", "ms": 6, "mfc": None if i < 8 else "none"}


def legend_below(axes: Axes) -> None:
    """A legend below the axes, in up to three columns. The figure grows by its height."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(max(72 // (max(map(len, labels), default=0) + 5), 1), 3)
    figure = axes.figure.figure
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
    looks: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 2.8}
    figure.legend(handles, labels, ncols=columns, loc="outside lower center", **looks)


def svg(figure: Figure) -> str:
    """A figure as SVG to put into a page; the same figure gives the same text."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "dynamix"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
