"""The results of `dynamix bench compression`: tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamix_lab.report import Section, Table, number, with_interval
from dynamix_lab.suites.compression.summary import over_best, over_sparse

_GOALS = {
    "aggregation": "aggregation, times dense's (best of ours, sparsest job, slowest link): at least {goal:g}",
    "iteration": "speed of an iteration there, times dense's: at least {goal:g}",
    "compaction_bytes": "compaction: bytes over (index entropy + values), where most is zero: at most {goal:g}",
    "lhc_bytes": "LHC two-phase: the same: at most {goal:g}",
    "auto_time": "auto: time of an iteration over dense's (after top-k: dense's after it), each cell: at most {goal:g}",
    "auto_best": "auto: time of an iteration over the best way's that it can take, each cell: at most {goal:g}",
    "gather_sparse": "sparse=True with the hook: over plain sparse=True, each cell: at most {goal:g} (A/A)",
    "identity": "{goal}",
}
_BESIDE_DENSE = [
    ("Aggregation", "Dense bytes over the seconds of an exchange, times dense's (95 %).", "exchange_ratios"),
    ("Iterations", "Iterations a second, times dense's (95 %).", "ratios"),
]
_HEAD = [
    "",
    "iteration, ms (10-90 %)",
    "over dense's (95 %)",
    "exchange, ms",
    "aggregation, MB/s",
    "x dense",
    "sent a host and step, kB",
    "payload / bound",
    "sent / bound",
]


def _table(cell: Mapping[str, Any]) -> Table:
    rows = []
    for name, way in cell["ways"].items():
        ratio, faster = cell["ratios"].get(f"{name}/dense", {}), cell["exchange_ratios"].get(f"{name}/dense", {})
        low, high = (1e3 * way[f"iteration_{p}_s"] for p in ("p10", "p90"))
        sent = way["sent_bytes_per_step"]
        rows.append(
            [
                name,
                f"{1e3 * way['iteration_median_s']:.1f} ({low:.1f}-{high:.1f})",
                "1" if name == "dense" else with_interval(ratio),
                "" if way["exchange_median_s"] is None else f"{1e3 * way['exchange_median_s']:.1f}",
                "" if way["exchange_median_s"] is None else f"{way['aggregation_bytes_per_s'] / 1e6:.1f}",
                "1" if name == "dense" else f"{1 / faster['median']:.2f}" if faster else "",
                "" if sent is None else f"{sent / 1e3:.1f}",
                "" if way["payload_over_bound"] is None else f"{way['payload_over_bound']:.2f}",
                "" if way["payload_over_bound"] is None else number(way["sent_over_bound"], 2),
            ]
        )
    return Table(_HEAD, rows)


def _said(cell: Mapping[str, Any]) -> str:
    """The line above a cell's table."""
    ours = cell["ways"].get("compaction", cell["ways"]["dense"])
    return (
        f"{cell['dense_bytes'] / 1e6:.2f} MB of gradient, {100 * ours['nonzero']:.1f} % of it not zero (union over "
        f"ranks); load average "
        f"{cell['load_average'][0]} to {cell['load_average'][1]}"
    )


def _counts(cell: Mapping[str, Any]) -> list[str]:
    """The counts of our ways: buckets that used another way, with the reason, and what auto chose."""
    lines = []
    for name, way in cell["ways"].items():
        counted = way["statistics"]
        if counted and counted["dense_after"]:
            lines.append(f"{name}: dense instead, by reason: {counted['dense_after']}")
        if counted and counted.get("undecoded"):  # cells of earlier versions have none
            lines.append(f"{name}: {counted['undecoded']} sketches did not decode; those buckets went by compaction")
        if name == "auto" and counted:
            lines.append(f"auto: buckets by way {counted['buckets']}, settled on {', '.join(way['chosen'].values())}")
    return lines


def goals(result: Mapping[str, Any]) -> Table:
    """Each goal: in how many cells it was reached, the worst cell's value, and whether it was reached in all."""
    rows = []
    for name, part in result["target"].items():
        reached = {True: "yes", False: "no", None: "not measured"}[part["reached"]]
        rows.append([_GOALS[name].format(goal=part["goal"]), *(_found(part) if part["found"] else "––"), reached])
    return Table(["goal", "cells", "the worst", "reached"], rows)


def _found(part: Mapping[str, Any]) -> tuple[str, str]:
    found = {cell: value["value"] if isinstance(value, Mapping) else value for cell, value in part["found"].items()}
    sign = -1 if part.get("at") == "most" else 1
    least = True if "at" not in part else sign * part["goal"] * part.get("scatter", 1.0)
    worst = min(found, key=lambda cell: sign * found[cell])
    holds = sum(sign * value >= least for value in found.values())
    there = part["found"][worst]
    by = f" by {there['way']}" if isinstance(there, Mapping) else ""
    return f"{holds} of {len(found)}", f"{worst}: {found[worst]:.3f}{by}" if "at" in part else worst


def overview(result: Mapping[str, Any]) -> Table:
    """A row per cell: milliseconds of an iteration for every way, and the goals' values for `auto` and the hook."""
    cells = result["cells"]
    ways = _ways(cells)
    rows = []
    for cell, measured_there in cells.items():
        there = measured_there["ways"]
        times = [number(1e3 * there[way]["iteration_median_s"], 1) if way in there else "–" for way in ways]
        auto, hook = over_best(measured_there), over_sparse(measured_there)
        best = "–" if auto is None else f"{auto['way']}: {with_interval(auto, 2)}"
        rows.append([cell, *times, best, "–" if hook is None else with_interval(hook, 2)])
    return Table(
        [
            "cell",
            *(f"{way}, ms" for way in ways),
            "auto over the best of its ways (95 %)",
            "gather-sparse over sparse (95 %)",
        ],
        rows,
    )


def _ways(cells: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells.values() for name in cell["ways"]))


def beside_dense(result: Mapping[str, Any], ratios: str) -> Table:
    """A row per cell: each way's speed over dense's, by its `ratios` of time."""
    cells = result["cells"]
    ways = [way for way in _ways(cells) if any(f"{way}/dense" in cell[ratios] for cell in cells.values())]
    rows = [[name, *(_faster(cell[ratios].get(f"{way}/dense")) for way in ways)] for name, cell in cells.items()]
    return Table(["cell", *ways], rows)


def _faster(ratio: Mapping[str, float | None] | None) -> str:
    if ratio is None:
        return "–"
    turned = {"median": ratio["median"], "low": ratio["high"], "high": ratio["low"]}
    return with_interval({end: value and 1 / value for end, value in turned.items()}, 2)


def sections(result: Mapping[str, Any]) -> list[Section]:
    """The goals, all cells in one table, two tables relative to dense, and a table per cell."""
    a_a = result["a_a"]
    within = "" if a_a is None else "within" if a_a["within"] else "NOT within"
    said = (
        []
        if a_a is None
        else [f"Dense against itself over all cells: {a_a['median']:.3f}, {within} {100 * a_a['limit']:.0f} %."]
    )
    made = [Section("Goals", (), goals(result), notes=said)]
    if result["cells"]:
        about = "A cell is a job, its hosts and the rate of their links in Mbit/s."
        made.append(Section("All cells", [about], overview(result)))
        made += [Section(title, [said], beside_dense(result, ratios)) for title, said, ratios in _BESIDE_DENSE]
    for name, cell in result["cells"].items():
        made.append(Section(name, [_said(cell)], _table(cell), notes=_counts(cell)))
    return made
