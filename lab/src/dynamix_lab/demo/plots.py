"""Plots of runs: accuracy, and every worker's batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamix_lab.emulator import Scenario, host_speeds
from dynamix_lab.harness.runs import PolicyRun
from dynamix_lab.report import legend_beside, look, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Moves = Callable[[PolicyRun], Sequence[tuple[float, int]]]


def plot_accuracy(runs: Sequence[PolicyRun], target: float) -> Figure:
    """Accuracy on held-out data against time: a line for each run, a colour for each policy."""
    figure, (axes,) = new_figure()
    names = list(dict.fromkeys(run.policy for run in runs))
    for run in runs:
        first = next(r for r in runs if r.policy == run.policy) is run
        times, scores = [s.time_s for s in run.snapshots], [s.score for s in run.snapshots]
        axes.plot(times, scores, label=run.policy if first else None, **look(names.index(run.policy)))
    axes.axhline(target, color="#222", lw=0.8, ls=":", label="target")
    axes.margins(y=0.08)
    axes.set(xlabel="seconds", ylabel="test accuracy")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend_beside(axes)
    return figure


def plot_sizes(runs: Sequence[PolicyRun], moves: Moves | None = None) -> Figure:
    """Batch size of each worker against time, a panel for each run; dashed lines where `moves` says."""
    figure, panels = new_figure(len(runs))
    largest = 0.0
    for axes, run in zip(panels, runs, strict=True):
        times, sizes = _sizes_over_time(run)
        largest = max(largest, float(sizes.max()))
        for worker in range(sizes.shape[1]):
            axes.step(times, sizes[:, worker], where="post", label=f"worker {worker}", **look(worker))
        for time_s, host in moves(run) if moves else ():
            if 0 < time_s < run.time_s:
                axes.axvline(time_s, color="#999", lw=0.8, ls="--")
                axes.annotate(
                    f" {host}", (time_s, 0.97), xycoords=("data", "axes fraction"), fontsize=8, color="#555", va="top"
                )
        axes.set(ylabel="batch size")
        axes.set_title(run.policy, loc="left")
    for axes in panels:  # shared, and only now known: the numbers of hosts stand above the highest line
        axes.set(ylim=(0, 1.25 * largest))
        axes.set_xlim(left=0)
    legend_beside(panels[0])
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


def moves(scenario: Scenario, time_s: float, seed: int) -> list[tuple[float, int]]:
    """(time_s, host) of every time a host became slower in a run of `time_s`, with the disturbances of `seed`."""
    found, before = [], host_speeds(scenario, 0.0, seed)
    for tick in range(1, int(time_s * 10) + 1):
        now = host_speeds(scenario, tick / 10, seed)
        found += [(tick / 10, host) for host in range(len(now)) if now[host] < before[host] - 1e-9]
        before = now
    return found
