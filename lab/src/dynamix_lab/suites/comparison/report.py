"""report.html of a comparison: one self-contained page with the table and three plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynamix_lab.harness.runs import PolicyRun
from dynamix_lab.report import Page, Section, measured, provenance
from dynamix_lab.suites.comparison.plots import plot_accuracy, plot_sizes, plot_time
from dynamix_lab.suites.comparison.table import caveats, legend, ratio_lines, result_table


def write_report(
    path: Path,
    runs: Sequence[PolicyRun],
    result: dict[str, Any],
    *,
    moves: Callable[[PolicyRun], Sequence[tuple[float, int]]] | None = None,
) -> None:
    """Write the page. `moves(run)` gives (time_s, host) of every move of the neighbour while the run went on."""
    target, seed = result["target"], runs[0].seed
    first_seed = [run for run in runs if run.seed == seed]
    dashed = (
        " A dashed line marks a move of the noisy neighbour; the number is the host that is slow from then on."
        if moves and any(moves(run) for run in first_seed)
        else ""
    )
    page = Page(
        f"Policies compared: {result['workload']} on {len(runs[0].batch_sizes)} uneven hosts",
        [
            Section("Every run", table=result_table(runs), notes=legend(runs, target)),
            Section(
                "Accuracy against time",
                figure=plot_accuracy(runs, target),
                caption=f"Accuracy on held-out data. A colour is a policy, a line a seed; the dotted line is the "
                f"target, {target:.3f}.",
            ),
            Section(
                "Batch size of each worker against time",
                figure=plot_sizes(first_seed, moves),
                caption=f"Samples a step of each worker, seed {seed}. Lines of equal sizes hide each other.{dashed}",
            ),
            Section(
                "Where each worker's time went",
                figure=plot_time(first_seed),
                caption=f"Mean seconds of a step of each worker, seed {seed}. Compute: forward and backward. Data: "
                "waiting for the loader. Communication: the exchange of gradients. Wait: for a slower worker.",
            ),
        ],
        lead=[*caveats(result), *ratio_lines(result["ratios"]), provenance(result)],
        details=measured(result),
    )
    path.write_text(page.html(), encoding="utf-8")
