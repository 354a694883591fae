"""report.html of the suites: the table, and a plot of every policy's place in every cell."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from dynamix_lab.demo.report import COLOURS, STYLE, new_figure, svg


def write_simulated_report(path: Path, result: dict[str, Any]) -> None:
    """Cells of `bench tta --cluster simulator` or `bench scaling`: time of the lagged reference over each policy's."""
    cells: dict[str, Any] = result["cells"]
    names = list(next(iter(cells.values()))["policies"])
    drawing, (axes,) = new_figure(1)
    if result["command"].startswith("bench scaling"):
        workers = [int(cell.rpartition("-")[2]) for cell in cells]
        for i, name in enumerate(names):
            line = [cell["policies"][name]["lagged_over_time"] for cell in cells.values()]
            axes.plot(workers, line, marker="o", ms=3, label=name, **_look(i))
        axes.set(xscale="log", xlabel="workers", ylabel="time of lagged / time")
    else:
        for i, name in enumerate(names):
            line = [cell["policies"][name]["lagged_over_time"] for cell in cells.values()]
            axes.plot(
                line, range(len(cells)), "o", ms=5, label=name, color=_look(i)["color"], mfc="none" if i > 7 else None
            )
        axes.set(yticks=range(len(cells)), xlabel="time of lagged / time (1: as fast as the lagged reference)")
        axes.set_yticklabels(list(cells))
        axes.invert_yaxis()
        axes.grid(axis="y", lw=0.4)
        drawing.set_size_inches(10, 1.5 + 0.28 * len(cells))
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
    rows = [
        [cell, f"{100 * c['attainable_cut']:.0f} % ({c['attained_by']})", f"{100 * c['interior_share']:.0f} %"]
        + [f"{p['lagged_over_time']:.3f} / {p['worst_decile']:.3f}" for p in c["policies"].values()]
        for cell, c in cells.items()
    ]
    said = "Simulated clusters. A cell is time of the lagged reference / time of the policy for the same progress, geometric mean / worst decile."
    _write(path, result, said, ["cell", "attainable cut (by)", "interior", *names], rows, svg(drawing))


def write_live_report(path: Path, result: dict[str, Any]) -> None:
    """Scenarios of `bench tta`: each policy's time over the best static's; every scenario's own report is linked."""
    cuts: dict[str, Any] = result["cuts"]
    names = list(next(iter(cuts.values()))["over_best_static"])
    drawing, (axes,) = new_figure(1)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [cut["over_best_static"].get(name, float("nan")) for cut in cuts.values()]
        axes.bar([x + i * width for x in range(len(cuts))], heights, width, label=name, color=_look(i)["color"])
    axes.axhline(1.0, color="#222", lw=0.8, ls=":")
    axes.set(xticks=[x + 0.4 - width / 2 for x in range(len(cuts))], ylabel="time to target / best static's")
    axes.set_xticklabels(list(cuts))
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
    rows = [
        [scenario, cut["best_static"], f"{100 * cut['attainable_cut']:.0f} % ({cut['attained_by']})"]
        + [f"{cut['over_best_static'][name]:.3f}" for name in names]
        for scenario, cut in cuts.items()
    ]
    links = " ".join(f'<a href="{html.escape(s)}/report.html">{html.escape(s)}</a>' for s in cuts)
    said = "Emulated clusters on one machine. A cell is time to the target over the best static's there, geometric mean of the pairs."
    head = ["scenario", "best static", "attainable cut (by)", *names]
    _write(path, result, said, head, rows, svg(drawing) + f"<p>Each by itself: {links}</p>")


def _look(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "ls": "-" if i < len(COLOURS) else "--", "lw": 1.2}


def _write(path: Path, result: dict[str, Any], said: str, head: list[str], rows: list[list[str]], plot: str) -> None:
    table = "<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"
    table += "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    seeds = ", ".join(map(str, result["seeds"]))
    made = f"dynamix {result['command']}, commit {result['commit'] or 'unknown'}, seeds {seeds}, cluster {result['cluster']}, {result['machine']['cores']} cores ({result['machine']['cpu']})"
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>dynamix bench</title><style>{STYLE}</style>'
    body = f"<h1>{html.escape(result['command'])}</h1><p>{html.escape(said)}</p><p>{html.escape(made)}</p>{table}</table>{plot}"
    path.write_text(page + body + "</html>\n", encoding="utf-8")
