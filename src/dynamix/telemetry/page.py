"""A run's page: one self-contained HTML file, and the data for it and for the live dashboard."""

from __future__ import annotations

import base64
import html
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.telemetry.comparing import comparison
from dynamix.telemetry.run import RunView
from dynamix.telemetry.sentences import headline, sentences
from dynamix.telemetry.sources import RunSource, require_some
from dynamix.window import Floats

DATA_SCHEMA = 1
MOST_CELLS = 3_000_000  # of all heat maps of a page
MOST_ROWS = 1024  # of a heat map; with more workers a row is the mean of neighbours
LINES_UP_TO = 8  # workers drawn as lines; more are drawn as heat maps
BARS = 12
WAITS = "No window has come yet. This page waits for the first one, and shows it as soon as the job has written it."
_BANDS = ("global_batch", "step_s")  # shown with least and greatest values
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "heat.js", "page.js")


def write_page(sources: Sequence[RunSource], out: str | Path, *, title: str | None = None) -> dict[str, Any]:
    """Write the page of these runs to `out`; returns its data. Call `refresh` on the sources first.

    Raises `StateError` if no run holds a window that can be read.
    """
    require_some(sources)
    data = page_data(sources, title=title)
    target = Path(out)
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_text(page_html(data), encoding="utf-8")
    unfinished.replace(target)
    return data


def page_html(data: Mapping[str, Any] | None, *, live: bool = False) -> str:
    """The page as one file. Without data it is the dashboard's page, which requests them.

    live   follow the server's announcements of new data
    """
    scripts = [_static(name) for name in (*_SCRIPTS, *(["live.js"] if live else []))]
    parts = {
        "TITLE": html.escape("dynamix dashboard" if data is None else str(data["title"])),
        "HEADLINE": html.escape("Reading what the runs have written." if data is None else str(data["headline"])),
        "LICENCE": _static("uPlot.LICENSE"),
        "STYLES": _static("uPlot.min.css") + _static("page.css"),
        "DATA": _embedded(data),
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    page = _static("page.html")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def page_data(sources: Iterable[RunSource], *, title: str | None = None) -> dict[str, Any]:
    """The page's data, as JSON: numbers of a run in bins, sentences, tables."""
    found = list(sources)
    views = [(source, view) for source in found for view in source.views.values()]
    runs = [run_data(source, view, MOST_CELLS // len(views)) for source, view in views]
    unseen = [source for source in found if source.absent or (len(found) > 1 and not source.views)]
    absent = [{"name": s.name, "why": s.absent or s.unfit or "it has no window"} for s in unseen]
    ended = all(source.ended or source.absent for source in found)
    said = runs[0]["headline"] if runs else "The job has ended without a window." if ended else WAITS
    together = None
    if len(views) > 1 or (views and absent):
        unfit, overran = [source.unfit for source, _ in views], [source.overran for source, _ in views]
        together = comparison([view for _, view in views], unfit, overran) | {"absent": absent}
    return {
        "schema": DATA_SCHEMA,
        "title": title or ", ".join(dict.fromkeys(source.name for source in found)),
        "headline": together["headline"] if together else said,
        "ended": ended,
        "missing": list(dict.fromkeys(each for source in found for each in source.missing())),
        "runs": runs,
        "comparison": together,
    }


def run_data(source: RunSource, view: RunView, cells: int = MOST_CELLS) -> dict[str, Any]:
    """One run's part of `page_data`; `cells` limits its heat maps together."""
    series = view.series
    one = {name: {"mean": numbers(series.mean(name))} for name in series.single}
    one["samples_per_s"] = {"mean": numbers(view.speeds)}
    for name in _BANDS:
        one[name] |= {"least": numbers(series.least(name)), "greatest": numbers(series.greatest(name))}
    return {
        "name": view.name,
        "workers": view.workers,
        "windows": view.windows,
        "seconds": view.seconds,
        "samples": view.samples,
        "began_at": view.began_at,
        "samples_per_s": _number(view.samples_per_s),
        "global_batch": int(view.sizes.sum()),
        "waiting": _number(view.mean_waiting),
        "headline": headline(view),
        "sentences": sentences(view),
        "facts": _facts(source, view),
        "begins": numbers(series.begins_s),
        "ends": numbers(series.ends_s),
        "bin_windows": series.width,
        "one": one,
        "each": _each(view, cells),
        "bars": _bars(view),
        "changes": [{**asdict(c), "total": list(c.total), "most": list(c.most)} for c in view.changes.largest],
        "change_count": view.changes.count,
        "notices": [asdict(notice) for notice in view.notices.kept],
        "notice_counts": dict(view.notices.counts),
        "decisions": dict(view.decisions),
        "curve": source.curve(view),
    }


def numbers(values: Floats) -> list[float | None]:
    """Five digits of each; None if unknown.

    >>> numbers(np.array([0.1234567, 1234567.0, np.nan]))
    [0.12346, 1234600.0, None]
    """
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def packed(values: Floats, bits: int = 8) -> dict[str, Any]:
    """Rows and columns as base64 of 8-bit or 16-bit integers: value = low + number * step; the largest means unknown.

    >>> packed(np.array([[0.0, 508.0], [254.0, np.nan]]))
    {'rows': 2, 'columns': 2, 'bits': 8, 'low': 0.0, 'step': 2.0, 'data': 'AP5//w=='}
    """
    unknown = 2**bits - 1
    known = np.isfinite(values)
    low = float(values[known].min()) if known.any() else 0.0
    high = float(values[known].max()) if known.any() else 1.0
    if bits == 16 and low >= 0 and high < unknown and (values[known] == np.rint(values[known])).all():
        low, high = 0.0, float(unknown - 1)  # whole numbers stay exact
    step = (high - low) / (unknown - 1) or 1.0
    levels = np.where(known, np.rint((np.where(known, values, low) - low) / step), unknown)
    text = base64.b64encode(levels.astype("<u1" if bits == 8 else "<u2").tobytes()).decode()
    return {"rows": len(values), "columns": values.shape[1], "bits": bits, "low": low, "step": step, "data": text}


def coarse(values: Floats, rows: int, columns: int) -> Floats:
    """Means of this many neighbouring rows and columns; NaN is left out.

    >>> coarse(np.array([[1.0, 3.0, 5.0], [np.nan, 3.0, 5.0]]), 2, 2).tolist()
    [[2.3333333333333335, 5.0]]
    """
    if rows == columns == 1:
        return values
    pad = (-values.shape[0] % rows, -values.shape[1] % columns)
    padded = np.pad(values, ((0, pad[0]), (0, pad[1])), constant_values=np.nan)
    blocks = padded.reshape(padded.shape[0] // rows, rows, -1, columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # for blocks without a number
        return np.asarray(np.nanmean(blocks, axis=(1, 3)))


def _each(view: RunView, cells: int) -> dict[str, Any]:
    """Numbers of every worker: lists for a few workers, else heat maps."""
    series, names = view.series, ("size", "compute", "data", "wait")
    if view.workers <= LINES_UP_TO:
        return {name: [numbers(row) for row in series.each(name)] for name in names}
    rows = -(-view.workers // MOST_ROWS)
    height = -(-view.workers // rows)
    columns = max(-(-height * series.bins * len(names) // max(cells, 1)), 1)
    maps = {name: packed(coarse(series.each(name), rows, columns), 16 if name == "size" else 8) for name in names}
    return {"row_workers": rows, "column_bins": columns, **maps}


def _bars(view: RunView) -> list[dict[str, Any]]:
    """The parts of workers' time: of all workers if there are few, else of the slowest."""
    parts, each, size = view.parts(), view.seconds_per_sample, view.series.overall("size")
    order = np.argsort(-np.where(np.isfinite(each), each, -1.0), kind="stable")
    chosen = range(view.workers) if view.workers <= BARS else order[:BARS].tolist()
    rows = []
    for worker in chosen:
        seconds = {name: _number(values[worker]) for name, values in parts.items()}
        rows.append({"worker": int(worker), "size": _number(size[worker]), "each_s": _number(each[worker]), **seconds})
    return rows


def _facts(source: RunSource, view: RunView) -> list[list[str]]:
    """Names and values for the end of the page: what ran, and where."""
    run, facts = source.run, [["events", str(source.events)]]
    told = (
        ("command", " ".join(map(str, run["argv"])) if isinstance(run.get("argv"), list) else run.get("command")),
        ("job", " ".join(map(str, run["job"])) if isinstance(run.get("job"), list) else None),
        ("started", run.get("started")),
        ("cluster", run.get("cluster")),
        ("scenario", run.get("scenario")),
        ("commit", run.get("commit")),
        ("policy", run.get("policy")),
        ("ways of meeting", run.get("meet")),
    )
    facts += [[name, value] for name, value in told if isinstance(value, str) and value]
    for name in ("machine", "versions"):
        if isinstance(run.get(name), dict):
            facts.append([name, ", ".join(f"{key} {value}" for key, value in run[name].items())])
    decided = ", ".join(f"{count:,} {name}" for name, count in view.decisions.most_common())
    facts.append(["decisions", decided])
    facts.append(["a point of a plot", f"{view.series.width:,} window{'s'[: view.series.width > 1]}"])
    late = ", ".join(f"rank {rank}: {part:.1%}" for rank, part in enumerate(source.overran))
    return facts + ([["device steps that overran", late]] if late else [])


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _embedded(data: Mapping[str, Any] | None) -> str:
    """JSON that is safe within a script element, whatever its strings hold."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _static(name: str) -> str:
    return (files("dynamix.telemetry") / "static" / name).read_text(encoding="utf-8")
