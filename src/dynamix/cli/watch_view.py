"""Draws `dynamix watch`: the newest run of a file, in a terminal of 80 columns."""

from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from dynamix.telemetry.run import RunView
from dynamix.telemetry.sentences import headline, number, percent, seconds
from dynamix.telemetry.sources import STALE_S, RunSource

MOST_WORKERS = 12
_BLOCKS = "▁▂▃▄▅▆▇█"
_PARTS = (("compute", "blue"), ("data", "yellow"), ("network", "green"), ("wait", "red"))
_BAR = 24
_LINE = 44  # bins of a sparkline
_NOTICES = 4


def view_of(sources: Sequence[RunSource]) -> RenderableType:
    """The newest run of each source, and what is missing."""
    parts: list[RenderableType] = []
    for source in sources:
        if source.views:
            parts += _of_run(list(source.views.values())[-1])
        else:
            parts.append(Text(f"{source.name}: no window was written yet", "dim"))
        parts += [Text(f"note: {said}", "yellow") for said in source.missing()]
        if not source.run and source.quiet_s > STALE_S:  # of other runs `missing` says it
            parts.append(Text(f"note: no line for {seconds(source.quiet_s)}: the job has ended, or hangs", "yellow"))
    return Group(*parts)


def sparkline(values: np.ndarray) -> str:
    """Values from 0 to their largest as blocks; a space if unknown.

    >>> sparkline(np.array([0.0, 1.0, np.nan, 2.0]))
    '▁▅ █'
    """
    known = values[np.isfinite(values)]
    top = float(known.max()) if known.size else 0.0
    levels = [" " if not np.isfinite(v) else _BLOCKS[round(7 * v / top) if top > 0 else 0] for v in values]
    return "".join(levels)


def _of_run(view: RunView) -> list[RenderableType]:
    series = view.series
    parts: list[RenderableType] = [Text(view.name, "bold"), Text(headline(view))]
    told = f"{seconds(view.seconds)}, {view.trained:,.0f} samples, window {view.index:,}"
    parts.append(Text(f"{told}, global batch {int(view.sizes.sum()):,}, noise scale {_or_dash(view.noise_scale)}"))
    lines = Table.grid(padding=(0, 2))
    for name, title, said in (
        ("samples_per_s", "samples/s", number),
        ("waiting", "waiting", percent),
        ("global_batch", "global batch", number),
        ("loss", "loss", number),
    ):
        values = (view.speeds if name == "samples_per_s" else series.mean(name))[-_LINE:]
        if np.isfinite(values).any():
            last = float(values[np.isfinite(values)][-1])
            lines.add_row(Text(title, "dim"), Text(sparkline(values)), Text(said(last)))
    return [*parts, lines, _workers(view), *_happened(view)]


def _workers(view: RunView) -> Table:
    """Size, seconds a sample and parts of the time in the newest window: of all workers if few, else of the slowest."""
    each = view.seconds_per_sample
    order = np.argsort(-np.where(np.isfinite(each), each, -1.0), kind="stable")
    chosen = range(view.workers) if view.workers <= MOST_WORKERS else order[:MOST_WORKERS].tolist()
    columns = [Column(title, justify="right") for title in ("worker", "samples", "ms each")]
    bar = Text.assemble(*[(f"{'waiting' if name == 'wait' else name} ", colour) for name, colour in _PARTS])
    table = Table(*columns, Column(bar), Column("waiting", justify="right"), box=SIMPLE_HEAD, pad_edge=False)
    now = {name: np.zeros(view.workers) for name, _ in _PARTS}
    if view.newest is not None:
        for name, values in view.newest_parts().items():
            now[name][: values.size] = np.nan_to_num(values)
    longest = max(float(np.sum(list(now.values()), axis=0).max()), 1e-12)
    for worker in chosen:
        parts = [(name, colour, float(now[name][worker])) for name, colour in _PARTS]
        total = sum(value for *_, value in parts)
        drawn = Text.assemble(*[("█" * round(_BAR * value / longest), colour) for _, colour, value in parts])
        size = int(view.sizes[worker]) if worker < view.sizes.size else 0
        shown = (str(worker), f"{size:,}", _or_dash(1000 * float(each[worker])))
        table.add_row(*shown, drawn, percent(parts[-1][2] / total) if total else "–")
    if view.workers > MOST_WORKERS:
        table.caption = f"the {MOST_WORKERS} slowest of {view.workers:,} workers"
    return table


def _happened(view: RunView) -> list[RenderableType]:
    kept = view.notices.kept[-_NOTICES:]
    return [Text(f"{seconds(notice.at_s)}: {notice.text}", "yellow") for notice in kept]


def _or_dash(value: float) -> str:
    return number(value) if np.isfinite(value) else "–"
