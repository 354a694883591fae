"""The tables and the page of `dynamix bench quality`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamix_lab.report import Page, Section, Table, measured, number, provenance
from dynamix_lab.suites.quality.plan import EVEN

DEFAULT = "dynamix-fixed"
LEAD = (
    "Trained models, at equal samples: every row uses each sample as often as even shares do, from the same weights in "
    "the same order. Points are those of accuracy on held-out samples, pair by pair, less even shares'; intervals are "
    "at 95 % by Student's t."
)


def sections(result: Mapping[str, Any]) -> list[Section]:
    """The default over even shares, then every row."""
    names = list(dict.fromkeys(row for part in result["jobs"].values() for row in part["rows"] if row != EVEN))
    found = [_default(result)] if DEFAULT in names else []
    longer = [_at_time(result)] if any("at_time" in part for part in result["jobs"].values()) else []
    return [*found, _every(result, names), *longer]


def page(result: Mapping[str, Any]) -> str:
    """report.html."""
    title = f"{result['command']}: {len(result['jobs'])} jobs"
    return Page(title, sections(result), lead=[LEAD, provenance(result)], details=measured(result)).html()


def verdict(result: Mapping[str, Any], row: str) -> str:
    """Where a row's lower end is below the floor, in a sentence."""
    parts = {job: part["rows"][row] for job, part in result["jobs"].items() if row in part["rows"]}
    below = [job for job, part in parts.items() if not part["reached"]]
    floor = f"{result['floor']:+.1f} points"
    if not below:
        return f"{row}: the lower end is {floor} or more in all {len(parts)} jobs."
    return f"{row}: the lower end is below {floor} in {len(below)} of {len(parts)} jobs: {', '.join(below)}."


def _default(result: Mapping[str, Any]) -> Section:
    head = ["job", "pairs", "even shares, %", f"{DEFAULT}, %", "points over even shares", "half-width"]
    head += ["cross-entropy, even shares", "over even shares", "mean global batch", "time over even shares'"]
    rows, notes = list[list[str]](), list[str]()
    for job, part in result["jobs"].items():
        even, mine = part["rows"][EVEN], part["rows"].get(DEFAULT)
        if mine is None:
            continue
        batches = f"{number(even['global_batch'], 0)} and {number(mine['global_batch'], 0)}"
        rows.append(
            [
                *(job, str(mine["pairs"]), number(even["accuracy"], 2), number(mine["accuracy"], 2)),
                *(signed(mine["accuracy_over_even"], 2), number(mine["half_width"], 2)),
                *(number(even["cross_entropy"], 4), signed(mine["cross_entropy_over_even"], 4), batches),
                number(mine["time_over_even"]["median"], 2),
            ]
        )
    capped = _where(result, "capped")
    wanted = f"{result['half_width']:g} points"
    notes += [f"The most pairs were run before the half-width was {wanted}: {capped}."] if capped else []
    diverged = _where(result, "diverged")
    notes += [f"Runs whose loss is no number, counted as 0 % of accuracy: {diverged}."] if diverged else []
    return Section("The default", text=[verdict(result, DEFAULT)], table=Table(head, rows), notes=notes)


def _every(result: Mapping[str, Any], names: list[str]) -> Section:
    rows = []
    for job, part in result["jobs"].items():
        cells = []
        for name in names:
            mine = part["rows"].get(name)
            said = "–" if mine is None else signed(mine["accuracy_over_even"], 2)
            cells.append(said if mine is None else f"{said}, {mine['pairs']} pairs")
        even = part["rows"][EVEN]
        rows.append([job, f"{number(even['accuracy'], 2)}, {number(even['cross_entropy'], 4)}", *cells])
    notes = [verdict(result, name) for name in names if name != DEFAULT]
    text = ["Points of accuracy over even shares. Rows with few pairs have wide intervals."]
    table = Table(["job", "even shares: %, cross-entropy", *names], rows)
    return Section("Every row", text=text, table=table, notes=notes)


def _at_time(result: Mapping[str, Any]) -> Section:
    """Accuracy after the time that even shares take."""
    rows, below = [], list[str]()
    for job, part in result["jobs"].items():
        found = part.get("at_time", {"rows": {}})
        for row, mine in found["rows"].items():
            over = mine["over_best_static"]
            if row == found["best_static"]:
                cells = ["the best static"]
            else:
                cells = [signed(over, 2)]
                below += [f"{row} at {job}"] if not (over["low"] or 0) > 0 and not row.startswith(EVEN) else []
            samples, time = number(mine["samples_over_even"], 2), number(mine["time_over_even"]["median"], 2)
            rows.append([job, row, number(mine["accuracy"], 2), *cells, samples, time])
    said = (
        "Every row trains for as long as even shares of 64 samples take for the job, and its schedule ends there. The "
        "best static row of a job is known afterwards, by its mean, which favours it."
    )
    head = ["job", "row", "%", "points over the best static", "samples over even shares'", "time over theirs"]
    notes = [f"The lower end is not above 0: {', '.join(below)}."] if below else []
    return Section("At equal time", text=[said], table=Table(head, rows), notes=notes)


def _where(result: Mapping[str, Any], what: str) -> str:
    """The rows and jobs of which something is true."""
    found = [f"{row} at {job}" for job, part in result["jobs"].items() for row, of in part["rows"].items() if of[what]]
    return ", ".join(found)


def signed(found: Mapping[str, float | None], digits: int) -> str:
    """A mean difference with its interval, each with its sign.

    >>> signed({"mean": 0.1, "low": -0.1, "high": 0.3}, 2), signed({"mean": None, "low": None, "high": None}, 2)
    ('+0.10 (-0.10 to +0.30)', '–')
    """
    mean, low, high = (found[name] for name in ("mean", "low", "high"))
    if mean is None:
        return "–"
    if low is None or high is None:
        return f"{mean:+.{digits}f}"
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
