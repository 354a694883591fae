"""What a person sees while runs go on, and the table at the end. Everything goes to stderr."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from dynamix_lab.harness.runs import PolicyRun
from dynamix_lab.report.tables import number


class Display:
    """A live table of runs on a terminal; elsewhere a line when a run starts and when it ends."""

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
        """One line, above the live table."""
        self.console.print(text, highlight=False)

    def update(self, runs: Sequence[PolicyRun]) -> None:
        """Show how far `runs` are; the last of them is going on."""
        if self._live is not None:
            self._live.update(_progress(runs, self.target))


def _progress(runs: Sequence[PolicyRun], target: float) -> Table:
    table = Table("policy", "seed", "time", "step", "accuracy", "", "loss", "batch size of each worker")
    for run in runs:
        best = 0.0 if math.isnan(run.accuracy) else run.accuracy
        filled = round(20 * min(1.0, best / target))
        bar = f"[{'green' if run.time_to_target_s else 'cyan'}]{'━' * filled}[dim]{'━' * (20 - filled)}"
        sizes = " ".join(str(b) for b in run.batch_sizes)
        accuracy, loss = number(run.accuracy, 3), number(run.loss, 3)
        table.add_row(run.policy, str(run.seed), f"{run.time_s:.0f} s", str(run.step), accuracy, bar, loss, sizes)
    return table


def end_table(runs: Sequence[PolicyRun], *, target: float) -> Table:
    """One line a run: the issue of everything."""
    table = Table(
        "policy", "seed", f"time to {target:.3f}", "final accuracy", "samples/s", "waiting", "batch sizes at the end"
    )
    for run in runs:
        reached = run.time_to_target_s
        table.add_row(
            run.policy,
            str(run.seed),
            "not reached" if reached is None else f"{reached:.1f} s",
            number(run.accuracy, 3),
            number(run.samples_per_s, 0),
            number(100 * run.wait_fraction, 0) + " %",
            " ".join(str(b) for b in run.batch_sizes),
        )
    return table


def ratio_lines(ratios: dict[str, dict[str, Any]]) -> list[str]:
    """Sentences about the ratios, what is attainable first."""
    lines = []
    reference = ratios.get("reference/static")
    if reference:
        cut = 100 * (1 - reference["median"])
        lines.append(f"attainable here (exact shares, batch 512): {cut:.0f} % less time than static")
    for name, ratio in ratios.items():
        if name == "reference/static":
            continue
        above, _, below = name.partition("/")
        spread = "" if ratio["low"] is None else f"  [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        lines.append(f"{above}: {ratio['median']:.2f} x the time of {below}{spread}")
    return lines


def policy_lines(result: dict[str, Any]) -> list[str]:
    """Says so if "dynamix" was not the shipped policy in this call; nothing otherwise.

    >>> policy_lines({"settings": {"policy": {"name": "mine.safetensors", "sha256": "0123456789abcdef"}}})
    ['"dynamix" was mine.safetensors in this call (sha256 0123456789ab)']
    """
    ran = result.get("settings", {}).get("policy")
    if not ran or ran["name"] == "shipped":
        return []
    which = f" (sha256 {ran['sha256'][:12]})" if "sha256" in ran else ""
    return [f'"dynamix" was {ran["name"]} in this call{which}']
