"""Shows a user the progress of runs. Everything goes to stderr."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from dynamix_lab.harness.runs import PolicyRun
from dynamix_lab.report.tables import number


class Display:
    """A live table of runs on a terminal; without a terminal a line when a run starts and when it ends."""

    def __init__(self, *, target: float, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.target = target
        self._live: Live | None = None

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, refresh_per_second=4, transient=True) as self._live:
            yield
        self._live = None

    def say(self, text: str) -> None:
        """Print one line above the live table."""
        self.console.print(text, highlight=False, markup=False)

    def update(self, runs: Sequence[PolicyRun]) -> None:
        """Show the progress of `runs`; the last of them is running."""
        if self._live is not None:
            self._live.update(_progress(runs, self.target))


def _progress(runs: Sequence[PolicyRun], target: float) -> Table:
    others = ("seed", "time", "samples", "accuracy", "", "loss", "batch size of each worker")
    table = Table(Column("policy", overflow="fold"), *others)
    for run in runs:
        best = 0.0 if math.isnan(run.accuracy) else run.accuracy
        filled = round(20 * min(1.0, best / target))
        bar = f"[{'green' if run.time_to_target_s else 'cyan'}]{'━' * filled}[dim]{'━' * (20 - filled)}"
        sizes = " ".join(str(b) for b in run.batch_sizes)
        accuracy, loss = number(run.accuracy, 3), number(run.loss, 3)
        table.add_row(run.policy, str(run.seed), f"{run.time_s:.0f} s", str(run.samples), accuracy, bar, loss, sizes)
    return table
