"""report.html: one self-contained page with the table and three plots per run."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamix_lab.harness.display import policy_lines, ratio_lines
from dynamix_lab.harness.runs import PolicyRun
from dynamix_lab.report import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")
_PARTS = {"compute": "#55a868", "data": "#ccb974", "communication": "#64b5cd", "wait": "#c44e52"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; } th, td { padding: .3em .8em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } svg { max-width: 100%; height: auto; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; }
"""


def write_report(
    path: Path,
    runs: Sequence[PolicyRun],
    result: dict[str, Any],
    *,
    moves: Callable[[PolicyRun], Sequence[tuple[float, int]]] | None = None,
) -> None:
    """Write the page. `moves(run)` gives (time_s, host) of every move of the neighbour while the run went on."""
    first_seed = [run for run in runs if run.seed == runs[0].seed]
    pieces = [
        f"<h1>dynamix demo: {html.escape(result['workload'])} on {len(runs[0].batch_sizes)} uneven hosts</h1>",
        f"<p>{html.escape(_provenance(result))}</p>",
        "".join(f"<p>{html.escape(line)}</p>" for line in [*policy_lines(result), *ratio_lines(result["ratios"])]),
        _table(runs, result["target"]),
        "<h2>Accuracy against time</h2>",
        svg(_plot_accuracy(runs, result["target"])),
        "<h2>Batch size of each worker against time</h2><p>A dashed line marks the noisy neighbour's move, with the host "
        f"it halves from then on. Seed {runs[0].seed}.</p>",
        svg(_plot_sizes(first_seed, moves)),
        "<h2>Where each worker's time went</h2><p>Mean seconds per step of each worker.</p>",
        svg(_plot_time(first_seed)),
        f"<h2>How this was measured</h2><pre>{html.escape(_details(result))}</pre>",
    ]
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>dynamix demo</title><style>{STYLE}</style>'
    path.write_text(page + "\n".join(pieces) + "</html>\n", encoding="utf-8")


def _provenance(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"Cluster: {result['cluster']}, one machine ({machine['cores']} cores, {machine['cpu']}). Commit "
        f"{result['commit'] or 'unknown'}, seeds {', '.join(map(str, result['seeds']))}."
    )


def _details(result: dict[str, Any]) -> str:
    keys = ("command", "commit", "cluster", "mechanisms", "scenario", "scenario_sha256", "seeds", "order", "machine")
    return "\n".join(f"{key}: {result.get(key)}" for key in keys)


def _table(runs: Sequence[PolicyRun], target: float) -> str:
    head = ("policy", "seed", f"time to {target:.3f} (s)", "final accuracy", "samples/s", "waiting (%)", "sizes at end")
    rows = [
        (
            run.policy,
            str(run.seed),
            number(run.time_to_target_s, 1) if run.time_to_target_s is not None else "not reached",
            number(run.accuracy, 3),
            number(run.samples_per_s, 0),
            number(100 * run.wait_fraction, 0),
            " ".join(map(str, run.batch_sizes)),
        )
        for run in runs
    ]
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + f"</tr>{body}</table>"


def _plot_accuracy(runs: Sequence[PolicyRun], target: float) -> Figure:
    figure, (axes,) = new_figure(1)
    names = list(dict.fromkeys(run.policy for run in runs))
    for run in runs:
        place = names.index(run.policy)
        first = next(r for r in runs if r.policy == run.policy) is run
        times, scores = [s.time_s for s in run.snapshots], [s.score for s in run.snapshots]
        axes.plot(times, scores, color=COLOURS[place % 8], lw=1.5, label=run.policy if first else None)
    axes.axhline(target, color="#222", lw=0.8, ls=":")
    axes.set(xlabel="seconds", ylabel="test accuracy", ylim=(0, 1))
    axes.legend(frameon=False)
    return figure


def _plot_sizes(runs: Sequence[PolicyRun], moves: Callable[[PolicyRun], Sequence[tuple[float, int]]] | None) -> Figure:
    figure, panels = new_figure(len(runs))
    for axes, run in zip(panels, runs, strict=True):
        times, sizes = _sizes_over_time(run)
        for worker in range(sizes.shape[1]):
            axes.step(times, sizes[:, worker], where="post", color=COLOURS[worker % 8], label=f"worker {worker}")
        for time_s, host in moves(run) if moves else ():
            if 0 < time_s < run.time_s:
                axes.axvline(time_s, color="#999", lw=0.8, ls="--")
                axes.annotate(str(host), (time_s, 1.0), xycoords=("data", "axes fraction"), fontsize=8, color="#666")
        axes.set(ylabel="batch size", title=run.policy, ylim=(0, None))
    panels[0].legend(frameon=False, ncols=4, fontsize=8)
    panels[-1].set(xlabel="seconds")
    return figure


def _sizes_over_time(run: PolicyRun) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """When each allocation came into force, and the sizes (n, W), from the events to the run's end."""
    changes = [(e["from_step"], e["allocation"]) for e in run.events if e["decision"] == "new"]
    first = run.events[0]["window"]["batch_size"] if run.events else run.batch_sizes
    ends = [0.0, *run.step_ends_s]
    times = [0.0] + [ends[min(step, len(ends) - 1)] for step, _ in changes] + [run.time_s]
    sizes = [first] + [allocation for _, allocation in changes]
    return np.array(times), np.array([*sizes, sizes[-1]])


def _plot_time(runs: Sequence[PolicyRun]) -> Figure:
    figure, panels = new_figure(1, columns=len(runs))
    for axes, run in zip(panels, runs, strict=True):
        base = np.zeros(len(run.batch_sizes))
        for name, values in run.where_time_went().items():
            if len(values):
                axes.bar(range(len(values)), values, bottom=base, color=_PARTS[name], label=name, width=0.7)
                base = base + np.array(values)
        axes.set(title=run.policy, xlabel="worker", xticks=range(len(run.batch_sizes)))
    panels[0].set(ylabel="seconds per step")
    if panels[0].containers:
        panels[0].legend(frameon=False, fontsize=8)
    return figure


def new_figure(rows: int, *, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure in the reports' style, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4 if rows == 1 else 2.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=columns == 1, sharey=True, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid.flat)


def svg(figure: Figure) -> str:
    """A figure as SVG to put into a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
