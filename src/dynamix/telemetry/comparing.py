"""Compares runs: one table, and the time of each run until what all of them reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dynamix.telemetry.run import RunView
from dynamix.telemetry.sentences import number, percent, seconds

_CLEAR = 1.1  # a smaller ratio of two single runs counts as no difference
_SMOOTH = 5  # bins over which a loss is averaged, at most a quarter of the shortest run
_LEAST_BINS = 4  # needed to estimate the scatter of a run's speed
Span = tuple[float, float, float]  # seconds: earliest, as measured, latest
_NEVER: Span = (math.nan, math.nan, math.nan)


def comparison(
    views: Sequence[RunView], unfit: Sequence[str] = (), overran: Sequence[Sequence[float]] = ()
) -> dict[str, Any]:
    """A table of runs, and every run compared with the first one, with `headline` as a sentence.

    unfit     why a run's times are no valid measurement, empty if they are: `RunSource.unfit`
    overran   the part of each rank's device steps that ended late: `RunSource.overran`

    Rows hold `seconds`, `samples` and `began_at` (samples of the job, at its end and before this run), `samples_per_s`,
    `waiting`, `global_batch` (median), `loss` (the lowest smoothed one), `accuracy` (the highest), and `samples_s` and
    `loss_s`: seconds to `common_samples` and `common_loss`, which every comparable run reached. `over_first` is a run's
    time to these over the first one's, with `low` and `high` (95 %, from the scatter of both runs' speeds, and from how
    long their losses cross the common one); `no_verdict` gives the reason if it is missing. `notes` are sentences on
    differences between runs. An unknown figure is None.
    """
    reasons = _reasons(views, unfit or [""] * len(views))
    fit = [view for view, why in zip(views, reasons, strict=True) if not why] or list(views)
    width = max(min([_SMOOTH, *(view.series.bins // 4 for view in fit)]), 1)
    lowest = {view: _least(smooth(view.series.mean("loss"), width)) for view in views}
    losses = [lowest[view] for view in fit]
    common_loss = max(losses) if losses and all(map(math.isfinite, losses)) else math.nan
    common_samples = min((view.samples for view in fit), default=math.nan)
    rows: list[dict[str, Any]] = []
    spans: dict[str, list[Span]] = {"samples_s": [], "loss_s": []}
    for view, why in zip(views, reasons, strict=True):
        alike = view.began_at == views[0].began_at  # otherwise its times lead to another goal
        loss, accuracy = (smooth(view.series.mean(name), width) for name in ("loss", "accuracy"))
        at_s = seconds_to(view, common_samples) if alike else math.nan
        spans["samples_s"].append((at_s, at_s, at_s))
        spans["loss_s"].append(crossing(view, loss, common_loss) if alike else _NEVER)
        known = {
            "seconds": view.seconds,
            "samples": view.samples,
            "began_at": view.began_at,
            "samples_per_s": view.samples_per_s,
            "waiting": view.mean_waiting,
            "global_batch": _median(view.series.mean("global_batch")),
            "loss": lowest[view],
            "accuracy": -_least(-accuracy),
            **{name: found[-1][1] for name, found in spans.items()},
        }
        told = {name: value if math.isfinite(value) else None for name, value in known.items()}
        rows.append({"name": view.name, "workers": view.workers, "windows": view.windows, **told, "no_verdict": why})
    by = "loss_s" if all(row["loss_s"] is not None for row in rows if not row["no_verdict"]) else "samples_s"
    for view, row, span in zip(views, rows, spans[by], strict=True):
        row.update(_over_first(row, span, spans[by][0], _half_width(view, views[0])))
    return {
        "headline": _headline(rows, by),
        "notes": _notes(views, overran or [()] * len(views)),
        "common_samples": common_samples if math.isfinite(common_samples) else None,
        "common_loss": common_loss if math.isfinite(common_loss) else None,
        "rows": rows,
    }


def table(compared: dict[str, Any]) -> list[list[str]]:
    """Rows of text, the first one with headings, narrow enough for a terminal. Absent runs are left out."""
    samples, loss = compared["common_samples"], compared["common_loss"]
    to_samples = f"to {samples:,.0f} samples" if samples else "to equal samples"
    to_loss = f"to loss {loss:.3g}" if loss is not None else "to equal loss"
    over = f"over {compared['rows'][0]['name']}" if compared["rows"] else "over the first"
    rows = [["run", "time", "samples", "per s", "waiting", to_samples, to_loss, over]]
    for row in compared["rows"]:
        shown = [row["name"], _said(row["seconds"], seconds), _said(row["samples"], lambda n: f"{n:,.0f}")]
        shown += [_said(row["samples_per_s"], number), _said(row["waiting"], percent)]
        verdict = "no verdict" if row["no_verdict"] else _said(row["over_first"], lambda _, of=row: _ratio(of))
        rows.append([*shown, _said(row["samples_s"], seconds), _said(row["loss_s"], seconds), verdict])
    return rows


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Means of the last `width` bins without unknown ones; NaN if fewer than half of them are known."""
    if not values.size:
        return values
    known = np.isfinite(values)
    ones = np.ones(width)
    total = np.convolve(np.where(known, values, 0.0), ones)[: values.size]
    count = np.convolve(known.astype(float), ones)[: values.size]
    return np.asarray(np.where(count >= width / 2, total / np.maximum(count, 1.0), np.nan))


def crossing(view: RunView, loss: np.ndarray, common: float) -> Span:
    """Seconds at which the loss (bins,) may first reach the common one, is seen to reach it, and then stays there."""
    at = np.flatnonzero(loss <= common)
    if not at.size:
        return _NEVER
    begins_s, ends_s = view.series.begins_s, view.series.ends_s
    stays = min(max(int(at[0]), *(np.flatnonzero(loss > common) + 1).tolist(), 0), ends_s.size - 1)
    return float(begins_s[at[0]]), float(ends_s[at[0]]), float(ends_s[stays])


def seconds_to(view: RunView, samples: float) -> float:
    """Seconds until the job had trained on `samples`, interpolated within a bin; NaN if it never had."""
    reached = np.maximum.accumulate(np.concatenate([[view.began_at], view.reached]))
    if not view.began_at <= samples <= reached[-1]:
        return math.nan
    return float(np.interp(samples, reached, np.concatenate([[0.0], view.series.ends_s])))


def _reasons(views: Sequence[RunView], unfit: Sequence[str]) -> list[str]:
    """The reason, in words, why a run is not compared with the first one; empty if it is."""
    found = []
    for view, why in zip(views, unfit, strict=True):
        unlike = "" if view.began_at == views[0].began_at else _began_unlike(view, views[0])
        both = "; ".join(filter(None, (why, unlike)))
        found.append(both or (f"{views[0].name} is no measurement" if unfit[0] else ""))
    return found


def _began_unlike(view: RunView, first: RunView) -> str:
    began = f"it began at sample {view.began_at:,.0f}, {first.name} at sample {first.began_at:,.0f}"
    return f"{began}: one went on from a saved state. Give each row a folder of its own (docs/report.md)"


def _half_width(view: RunView, first: RunView) -> float:
    """95 % error of the logarithm of two runs' ratio, from the scatter of their speeds; NaN with few bins."""
    both = [one.speeds[np.isfinite(one.speeds) & (one.speeds > 0)] for one in (view, first)]
    bins = min(len(speeds) for speeds in both)
    if bins < _LEAST_BINS:
        return math.nan
    errors = [float(speeds.std(ddof=1) / speeds.mean()) / math.sqrt(speeds.size) for speeds in both]
    return student(bins - 1) * math.hypot(*errors)


def student(freedom: float) -> float:
    """The 97.5 % point of Student's t with 3 or more degrees of freedom, with an error below 1 %.

    >>> [round(student(freedom), 2) for freedom in (3, 10, 100)]
    [3.16, 2.23, 1.98]
    """
    z = 1.959964
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _over_first(row: dict[str, Any], span: Span, first: Span, half_width: float) -> dict[str, float | None]:
    known = not row["no_verdict"] and span[1] > 0 and first[1] > 0
    ratio, low, high = (span[1] / first[1] if known else None), None, None
    if ratio is not None and span is not first and math.isfinite(half_width) and first[0] > 0:
        low, high = span[0] / first[2] * math.exp(-half_width), span[2] / first[0] * math.exp(half_width)
    return {"over_first": ratio, "low": low, "high": high}


def _headline(rows: Sequence[dict[str, Any]], by: str) -> str:
    told = [row for row in rows[1:] if row["over_first"] is not None]
    said = [f"No verdict for {row['name']}: {row['no_verdict']}." for row in rows if row["no_verdict"]]
    if not told:
        return " ".join([f"{len(rows)} runs beside each other." if rows[1:] else "Only one run has windows.", *said])
    what = "To the loss that all runs reach" if by == "loss_s" else "For the samples that all runs used"
    each = [f"{row['name']} took {_ratio(row)}{'' if _clear(row) else ', no clear difference'}" for row in told]
    each[0] = each[0].replace(" took ", f" took, as parts of {rows[0]['name']}'s time, ", 1)
    scatter = "Runs of one thing scatter, too: repeat them before you trust a small difference."
    return " ".join([f"{what}, {'; '.join(each)}.", *said, scatter])


def _clear(row: dict[str, Any]) -> bool:
    """Whether a run's speed differs from the first one's by more than the scatter."""
    ratio, low, high = row["over_first"], row["low"], row["high"]
    return low is not None and not low <= 1 <= high and max(ratio, 1 / ratio) >= _CLEAR


def _ratio(row: dict[str, Any]) -> str:
    within = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
    return f"{row['over_first']:.2f}{within}"


def _notes(views: Sequence[RunView], overran: Sequence[Sequence[float]]) -> list[str]:
    """Differences between the runs that do not prevent a verdict, and how often devices overran."""
    said = []
    for view, late in zip(views, overran, strict=True):
        first = views[0]
        if abs(view.samples - first.samples) > max(view.sizes.sum(), first.sizes.sum()):
            ended = f"{view.name} ended at sample {view.samples:,.0f}, {first.name} at sample {first.samples:,.0f}"
            said.append(f"{ended}: they are compared by what both reached.")
        if max(late, default=0.0) > 0:
            said.append(f"{view.name}: up to {percent(max(late))} of a rank's device steps overran.")
    return said


def _least(values: np.ndarray) -> float:
    return float(np.nanmin(values)) if np.isfinite(values).any() else math.nan


def _median(values: np.ndarray) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def _said(value: Any, how: Any) -> str:
    return "–" if value is None else str(how(value))
