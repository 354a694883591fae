"""What `dynamix bench compression` says at the end: tables in Markdown, and the page with plots."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamix_lab.demo.report import COLOURS, STYLE, new_figure, svg
from dynamix_lab.harness.display import number
from dynamix_lab.suites.compression.exchanges import BASELINES, LOSSY
from dynamix_lab.suites.compression.jobs import AFTER_TOPK
from dynamix_lab.suites.compression.summary import timed

_GOALS = {
    "aggregation": "aggregation, times dense's (best of ours, sparsest job, slowest link): at least {goal:g}",
    "iteration": "speed of an iteration there, times dense's: at least {goal:g}",
    "compaction_bytes": "compaction: bytes over (index entropy + values), where most is zero: at most {goal:g}",
    "lhc_bytes": "LHC two-phase: the same: at most {goal:g}",
    "auto_time": "auto: time of an iteration over dense's (after top-k: dense's after top-k), in every cell: at most {goal:g}",
    "identity": "{goal}",
}
_HEAD = [
    "", "iteration, ms (10-90 %)", "over dense's [95 %]", "exchange, ms", "aggregation, MB/s", "x dense",
    "sent a host and step, kB", "payload / bound", "sent / bound",
]  # fmt: skip


def label(way: str, job: str) -> str:
    """How tables name a way: which of them lose something, and what was left out before."""
    if job in AFTER_TOPK and (way == "blocks" or way not in BASELINES):
        return f"{way} (after top-k)"
    return f"{way} (lossy)" if way in LOSSY else way


def _rows(cell: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, way in cell["ways"].items():
        ratio, faster = cell["ratios"].get(f"{name}/dense", {}), cell["exchange_ratios"].get(f"{name}/dense", {})
        spread = "" if ratio.get("low") is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        low, high = (1e3 * way[f"iteration_{p}_s"] for p in ("p10", "p90"))
        rows.append([
            label(name, cell["job"]),
            f"{1e3 * way['iteration_median_s']:.1f} ({low:.1f}-{high:.1f})",
            "1" if name == "dense" else f"{ratio['median']:.3f}{spread}",
            f"{1e3 * way['exchange_median_s']:.1f}",
            f"{way['aggregation_bytes_per_s'] / 1e6:.1f}",
            "1" if name == "dense" else f"{1 / faster['median']:.2f}",
            "" if way["sent_bytes_per_step"] is None else f"{way['sent_bytes_per_step'] / 1e3:.1f}",
            "" if way["payload_over_bound"] is None else f"{way['payload_over_bound']:.2f}",
            "" if way["payload_over_bound"] is None or way["sent_over_bound"] is None else f"{way['sent_over_bound']:.2f}",
        ])  # fmt: skip
    return rows


def _said(cell: Mapping[str, Any]) -> str:
    """One line above a cell's table."""
    ours = cell["ways"].get("compaction", cell["ways"]["dense"])
    return (
        f"{cell['dense_bytes'] / 1e6:.2f} MB of gradient, {100 * ours['nonzero']:.1f} % of it not zero (union over ranks, "
        f"{'after top-k' if cell['job'] in AFTER_TOPK else 'as it is'}); load average {cell['load_average'][0]} to "
        f"{cell['load_average'][1]}"
    )


def _counts(cell: Mapping[str, Any]) -> list[str]:
    """What our ways did: buckets that went another way, with the reason, and what auto settled on."""
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


def goal_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Goal, what was found in each cell, and whether it was reached."""
    rows = []
    for name, part in result["target"].items():
        found = ", ".join(f"{cell}: {_value(value)}" for cell, value in part["found"].items())
        reached = {True: "yes", False: "**no**", None: "not measured"}[part["reached"]]
        rows.append([_GOALS[name].format(goal=part["goal"]), found or "-", reached])
    return rows


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['value']:.2f} ({value['way']})"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def identity_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Cell, way, steps, whether the losses are the same, buckets that went dense."""
    return [
        [
            name, way, str(part["steps"]), "identical" if part["identical"] else f"differ by {part['largest_difference']:g}",
            number(part["last_loss"], 4), str(part["statistics"]["dense_after"] or "none"),
        ]
        for name, cell in result["cells"].items()
        for way, part in cell.get("identity", {}).items()
    ]  # fmt: skip


_IDENTITY_HEAD = ["cell", "way", "steps", "losses against dense in the same fixed point", "last loss", "dense instead"]
_GOAL_HEAD = ["goal", "found", "reached"]


def markdown(result: Mapping[str, Any]) -> str:
    """table.md: the goals, then a table a cell."""
    a_a = result["a_a"]
    lines = ["## Goals", "", _table(_GOAL_HEAD, goal_rows(result))]
    if a_a is not None:
        within = "within" if a_a["within"] else "NOT within"
        lines += [f"Dense against itself over all cells: {a_a['median']:.3f}, {within} {100 * a_a['limit']:.0f} %.", ""]
    for name, cell in timed(result["cells"]).items():
        lines += [f"## {name}", "", _said(cell), "", _table(_HEAD, _rows(cell))]
        lines += [f"- {line}" for line in _counts(cell)] + [""]
    checks = identity_rows(result)
    if checks:
        lines += ["## Losses, bit by bit", "", _table(_IDENTITY_HEAD, checks)]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |\n" for line in lines)


def write_compression_report(path: Path, result: Mapping[str, Any]) -> None:
    """report.html: goals, plots of time and bytes, a table a cell."""
    cells = timed(result["cells"])
    pieces = ["<h1>dynamix bench compression</h1>", f"<p>{html.escape(_provenance(result))}</p>"]
    pieces.append(_html_table(_GOAL_HEAD, goal_rows(result)))
    if cells:
        pieces += [
            "<h2>Time of an iteration over dense's</h2><p>Below 1 is faster; logarithmic.</p>",
            _bars(cells, lambda cell, name: cell["ratios"][f"{name}/dense"]["median"], "time / dense's"),
            "<h2>Bytes a host sends in a step, over dense's</h2>",
            _bars(cells, _sent_over_dense, "bytes / dense's"),
        ]
    for name, cell in cells.items():
        pieces += [f"<h2>{html.escape(name)}</h2><p>{html.escape(_said(cell))}</p>", _html_table(_HEAD, _rows(cell))]
        pieces += [f"<p>{html.escape(line)}</p>" for line in _counts(cell)]
    checks = identity_rows(result)
    if checks:
        pieces += ["<h2>Losses, bit by bit</h2>", _html_table(_IDENTITY_HEAD, checks)]
    keys = ("command", "plan", "commit", "cluster", "mechanisms", "scenario_sha256", "seeds", "machine")
    details = html.escape("\n".join(f"{key}: {result.get(key)}" for key in keys))
    pieces.append(f"<h2>How this was measured</h2><pre>{details}</pre>")
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>dynamix bench compression</title><style>{STYLE}</style>'
    path.write_text(page + "\n".join(pieces) + "</html>\n", encoding="utf-8")


def _provenance(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"Cluster: {result['cluster']}, hosts with shaped links on one machine ({machine['cores']} cores, {machine['cpu']}), "
        f"not a result of a real cluster. Commit {result['commit'] or 'unknown'}, seed {result['seeds'][0]}. Compare within a cell."
    )


def _sent_over_dense(cell: Mapping[str, Any], name: str) -> float:
    mine, dense = (cell["ways"][n]["sent_bytes_per_step"] for n in (name, "dense"))
    return float("nan") if mine is None or not dense else float(mine) / float(dense)


def _bars(cells: Mapping[str, Any], value: Any, what: str) -> str:
    names = [name for name in next(iter(cells.values()))["ways"] if name != "dense"]
    drawing, (axes,) = new_figure(1)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [value(cell, name) for cell in cells.values()]
        places = [x + i * width for x in range(len(cells))]
        axes.bar(
            places,
            heights,
            width,
            label=name,
            color=COLOURS[i % len(COLOURS)],
            hatch="//" if i >= len(COLOURS) else None,
        )
    axes.axhline(1.0, color="#222", lw=0.8, ls=":")
    axes.set(yscale="log", ylabel=what, xticks=[x + 0.4 - width / 2 for x in range(len(cells))])
    axes.set_xticklabels(list(cells), rotation=30 if len(cells) > 4 else 0, ha="right" if len(cells) > 4 else "center")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
    return svg(drawing)


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell.replace('**', ''))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
