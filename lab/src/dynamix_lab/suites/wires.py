"""What `scripts/wires` measures: moves of workers that step apart, over slow links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamix_lab.report import Table, number, with_interval
from dynamix_lab.statistics import paired_ratio

OTHER = "parameters"  # the row that the others are compared with


def conclude(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """By place and row: ratios of seconds to OTHER and to `kept`, and of held-out losses to OTHER.

    runs   of each place: row -> seconds and held_out_loss, for every run
    """
    found: dict[str, Any] = {}
    for place, of in runs.items():
        seconds = {row: [run[row]["seconds"] for run in of] for row in of[0]}
        losses = {row: sum(run[row]["held_out_loss"] for run in of) for row in of[0]}
        found[place] = {
            row: {
                "over": paired_ratio(seconds[row], seconds[OTHER]).to_dict(),
                "over_kept": paired_ratio(seconds[row], seconds["kept"]).to_dict(),
                "loss": losses[row] / losses[OTHER],
            }
            for row in sorted(of[0])
            if row != OTHER
        }
    return {"places": found}


def table(result: Mapping[str, Any]) -> Table:
    """A row for each way of sending at each place."""
    rows = [
        [
            place,
            row,
            with_interval(of["over"], 2),
            "1" if row == "kept" else with_interval(of["over_kept"], 2),
            number(of["loss"], 3),
        ]
        for place, ways in result["places"].items()
        for row, of in ways.items()
    ]
    return Table(["place", "row", "seconds over parameters", "over kept", "held-out loss over parameters"], rows)
