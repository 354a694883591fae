"""Several runs beside each other: one table, and how long each needed for what all of them reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dynamix.telemetry.run import RunView
from dynamix.telemetry.sentences import number, percent, seconds

_CLEAR = 1.1  # a smaller ratio of two single runs is called no difference
_SMOOTH = 5  # bins; a loss counts as reached by the mean of so many


def comparison(views: Sequence[RunView]) -> dict[str, Any]:
    """A table of runs, the first being what the others are compared with; `headline` says which was the fastest.

    Rows hold `seconds`, `samples`, `samples_per_s`, `waiting`, `global_batch` (median), `loss` (the lowest smoothed
    one), `accuracy` (the highest), and `samples_s` and `loss_s`: seconds to `common_samples` and `common_loss`, which
    every run reached. What is unknown is None.
    """
    losses = [smooth(view.series.mean("loss")) for view in views]
    lowest = [float(np.nanmin(loss)) if np.isfinite(loss).any() else math.nan for loss in losses]
    common_loss = max(lowest) if lowest and all(map(math.isfinite, lowest)) else math.nan
    common_samples = min((view.samples for view in views), default=math.nan)
    rows = []
    for view, loss, least in zip(views, losses, lowest, strict=True):
        accuracy = smooth(view.series.mean("accuracy"))
        row = {
            "seconds": view.seconds,
            "samples": view.samples,
            "samples_per_s": view.samples_per_s,
            "waiting": view.mean_waiting,
            "global_batch": _median(view.series.mean("global_batch")),
            "loss": least,
            "accuracy": float(np.nanmax(accuracy)) if np.isfinite(accuracy).any() else math.nan,
            "samples_s": first_at(view, view.series.mean("samples") >= common_samples),
            "loss_s": first_at(view, loss <= common_loss),
        }
        known = {name: value if math.isfinite(value) else None for name, value in row.items()}
        rows.append({"name": view.name, "workers": view.workers, "windows": view.windows, **known})
    return {
        "headline": _headline(rows),
        "common_samples": common_samples if math.isfinite(common_samples) else None,
        "common_loss": common_loss if math.isfinite(common_loss) else None,
        "rows": rows,
    }


def table(compared: dict[str, Any]) -> list[list[str]]:
    """Rows of text, the first being the heads, narrow enough for a terminal. Runs that are absent are left out."""
    samples, loss = compared["common_samples"], compared["common_loss"]
    to_samples = f"to {samples:,.0f} samples" if samples else "to equal samples"
    to_loss = f"to loss {loss:.3g}" if loss is not None else "to equal loss"
    rows = [["run", "time", "samples", "per s", "waiting", to_samples, to_loss]]
    for row in compared["rows"]:
        shown = [row["name"], _said(row["seconds"], seconds), _said(row["samples"], lambda n: f"{n:,.0f}")]
        shown += [_said(row["samples_per_s"], number), _said(row["waiting"], percent)]
        rows.append([*shown, _said(row["samples_s"], seconds), _said(row["loss_s"], seconds)])
    return rows


def smooth(values: np.ndarray) -> np.ndarray:
    """Means of the last few bins, unknown ones left out; NaN where fewer than half of them are known."""
    if not values.size:
        return values
    known = np.isfinite(values)
    ones = np.ones(_SMOOTH)
    total = np.convolve(np.where(known, values, 0.0), ones)[: values.size]
    count = np.convolve(known.astype(float), ones)[: values.size]
    return np.asarray(np.where(count >= _SMOOTH / 2, total / np.maximum(count, 1.0), np.nan))


def first_at(view: RunView, reached: np.ndarray) -> float:
    """Seconds at which a bin first holds what is asked; NaN where none does."""
    at = np.flatnonzero(reached)
    return float(view.series.ends_s[at[0]]) if at.size else math.nan


def _headline(rows: Sequence[dict[str, Any]]) -> str:
    by = "loss_s" if all(row["loss_s"] is not None for row in rows) else "samples_s"
    known = sorted((row for row in rows if row[by]), key=lambda row: row[by])
    if len(known) < 2:
        return f"{len(rows)} runs beside each other."
    first, second = known[0], known[1]
    what = "to the loss that all runs reach" if by == "loss_s" else "for the samples that all runs used"
    if second[by] / first[by] < _CLEAR:
        return (
            f"Of {len(rows)} runs none is clearly the fastest {what}: {first['name']} took {seconds(first[by])}, "
            f"{second['name']} {seconds(second[by])}."
        )
    baseline = rows[0] if rows[0] is not first and rows[0][by] else second
    return (
        f"Of {len(rows)} runs {first['name']} is the fastest {what}: {seconds(first[by])}, "
        f"{number(baseline[by] / first[by])} times as fast as {baseline['name']}. Runs of one thing scatter, too: "
        "repeat them before you trust a small difference."
    )


def _median(values: np.ndarray) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def _said(value: Any, how: Any) -> str:
    return "–" if value is None else str(how(value))
