"""The table and the page of live runs of opponents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamix_lab.report import Page, Section, Table, measured, number, provenance, sections_markdown
from dynamix_lab.statistics import a_a, geometric_mean
from dynamix_lab.suites.opponents.pages import first_sentence, ratio_cells, without_arbiter
from dynamix_lab.suites.opponents.plan import AGAIN, TWICE
from dynamix_lab.suites.opponents.verdict import OVER, SINGLE, over

LEAD = (
    "Real processes on emulated devices. A run's held-out loss is read on one reference curve of its job (static at "
    "its best batch and learning rate): equivalent samples. Seconds are per 1,000 of them until the same clock time "
    "for every row; below 1 a ratio is faster. Verdicts are about progress until that time, not about the target. Rows "
    "named again ran twice: they say what the machine adds."
)


def sections(result: Mapping[str, Any]) -> list[Section]:
    """All places together, then each by itself."""
    own = without_arbiter(result["places"], "seconds", 3)
    return [*_together(result), *own, *(_section(text, part, result) for text, part in result["places"].items())]


def markdown(result: Mapping[str, Any]) -> str:
    """table.md."""
    return sections_markdown(sections(result), level=3)


def page(result: Mapping[str, Any]) -> str:
    """report.html."""
    return Page(result["command"], sections(result), lead=[LEAD, provenance(result)], details=measured(result)).html()


def _together(result: Mapping[str, Any]) -> list[Section]:
    rows = list(result["policies"])
    others = over(rows, OVER)
    table = [[row, *ratio_cells(row, others, result["ratios"], 3)] for row in rows]
    head = ["row", *(f"over {other}" for other in others)]
    said = _a_a(result["a_a"], "of progress")
    said += _a_a(_samples_a_a(result["places"]), "of samples trained until the same time")
    return [Section("All places", text=said, table=Table(head, table))]


def _samples_a_a(places: Mapping[str, Any]) -> dict[str, Any] | None:
    """`a_a` of the samples that rows which ran twice trained, over all places; None for fewer than two pairs."""
    pairs = []
    for row in TWICE:
        once, again = (
            [n for part in places.values() for n in part["about"].get(name, {"samples": []})["samples"]]
            for name in (row, f"{row}{AGAIN}")
        )
        pairs.append((once, again))
    static, adaptive = pairs
    return a_a(static, adaptive) if len(static[1]) >= 2 <= len(adaptive[1]) else None


def _a_a(found: Mapping[str, Any] | None, what: str) -> list[str]:
    if found is None:
        return []
    parts = [
        f"{name}: {100 * part['sd']:.2f} % over {part['pairs']} pairs (limit {100 * part['limit']:g} %)"
        for name, part in found.items()
        if name != "believed"
    ]
    good = "Both keep their limit." if found["believed"] else "Not all keep their limit on ten pairs or more."
    return [f"A/A {what}, standard deviation of the logarithm: {'; '.join(parts)}. {good}"]


def _section(text: str, part: Mapping[str, Any], result: Mapping[str, Any]) -> Section:
    found = part["verdict"]
    best = () if found is None else (found["best_synchronous"], found["best_rarely"])
    others = over(tuple(part["seconds"]), (SINGLE, "static", *best, "goodput"))
    rows = []
    for row, seconds in part["seconds"].items():
        about = part["about"][row]
        reached = [t for t in about["time_to_target_s"] if t is not None]
        cells = [row, number(geometric_mean(seconds), 3), number(_mean(about["samples"]), 0)]
        cells.append(f"{number(_mean(reached), 1)} ({len(reached)} of {len(seconds)})" if reached else "–")
        rows.append([*cells, *ratio_cells(row, others, part["ratios"], 3), str(sum(part["overruns"][row]))])
    head = ["row", "s per 1,000", "samples", "s to target", *(f"over {other}" for other in others), "overruns"]
    said = [] if found is None else [found["sentence"]]
    said.append(f"{first_sentence(part['first'])} Pairs: {len(part['pairs'])}.")
    if beyond := [row for row, about in part["about"].items() if any(about["beyond_curve"])]:
        said.append(f"Past the end of the reference curve, so slower here than they were: {', '.join(beyond)}.")
    if "static_steps_virtual" in part:
        live, virtual = _mean([float(n) for n in part["steps"]["static"]]), part["static_steps_virtual"]
        said.append(f"static took {number(live, 1)} steps in a run; the virtual clock says {number(virtual, 1)}.")
    if part["late"]:
        said.append(f"No measurement, as devices overran after every repeat: {', '.join(part['late'])}.")
    return Section(text, text=said, table=Table(head, rows))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
