"""Prints `dynamix policy evaluate` for people: readable in a terminal of 80 columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dynamix.cli.policy_pages import columns_table, facts
from dynamix.policies.registry import parse_name

_SCORE = (
    "Every score is a ratio of times: how long the lagged reference takes for the same progress of training, over how "
    "long the policy takes. 1.00 is as fast as that reference, higher is faster. The lagged reference knows the true "
    "costs at the close of each window, but not the future."
)
_SUMMARY = (
    ("mean", "geometric mean of the score over clusters"),
    ("worst tenth", "one cluster of a cell in ten scores lower than this"),
    ("gap closed", "its part of the way from lb_bsp (0) to hedged (1), where they differ by 1 %; - without hedged"),
    ("faster, slower", "cells in which it beats the goodput rule, or loses to it, beyond the 95 % interval"),
)
_BESIDE = {
    "static": "equal sizes that never change",
    "lb_bsp": "sizes moved step by step until all workers finish together, at a constant global batch",
    "cannikin": "sizes and global batch of highest goodput, from fitted linear costs",
    "goodput": "our rule: the sizes of highest goodput that its model of the job predicts",
    "hedged": "a reference that knows the true costs and the chances of what comes next; no job can know them",
}


def print_evaluation(name: str, seed: int, found: Mapping[str, Any]) -> None:
    """The page of `dynamix policy evaluate`: scores by cell, their medians, and what the columns mean."""
    console = Console(highlight=False)
    beside = [other for other in next(iter(found["cells"].values())) if other != name]
    names = [*beside, name]
    table = columns_table("cell", *map(_label, names))
    for cell, scores in found["cells"].items():
        marks = [_mark(scores[other]["over_goodput"]) if other == name else "" for other in names]
        row = [f"{scores[n]['geometric_mean']:.3f}{mark}" for n, mark in zip(names, marks, strict=True)]
        table.add_row(Text(cell), *row)
    console.print(Text(f"{name} on simulated clusters, seed {seed}", "bold"))
    console.print(Text(f"{_SCORE} A cell is a family of clusters and its number of workers."))
    console.print(table)
    legend = [(other, _BESIDE[other]) for other in beside if other in _BESIDE]
    marks_mean = "the policy; + faster than the goodput rule, - slower (95 % interval: over_goodput in --json)"
    console.print(facts([*legend, (_label(name), marks_mean)]))
    console.print(Text("\nOver all cells: medians, and how often it beats the goodput rule", "bold"))
    _print_medians(console, found["summary"], len(found["cells"]))


def _print_medians(console: Console, summary: Mapping[str, Any], cells: int) -> None:
    table = columns_table("policy", *[title for title, _ in _SUMMARY])
    for name, score in summary.items():
        gap = "-" if score["gap_closed"] is None else f"{score['gap_closed']:.2f}"
        against = "" if name == "goodput" else f"{len(score['ahead_of_goodput'])}, {len(score['behind_goodput'])}"
        scores = f"{score['geometric_mean']:.3f}", f"{score['worst_decile']:.3f}"
        table.add_row(Text(_label(name)), *scores, gap, against)
    console.print(table)
    last = f"{_SUMMARY[-1][1]}; of {cells}"
    console.print(facts([*_SUMMARY[:-1], (_SUMMARY[-1][0], last)]))
    console.print()


def _label(name: str) -> str:
    """A name short enough for a table column."""
    parsed = parse_name(name) if ":" in name or name.endswith(".safetensors") else None
    if parsed is None or parsed.kind not in ("file", "class"):
        return name
    return parsed.attribute or Path(parsed.base).stem


def _mark(over_goodput: Sequence[float]) -> str:
    """+ or - if the 95 % interval of the paired ratio to the goodput rule excludes 1."""
    _, low, high = over_goodput
    return " +" if low > 1 else " -" if high < 1 else "  "
