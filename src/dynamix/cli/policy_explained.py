"""What `dynamix policy explain` prints: readable in a terminal of 80 columns."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

MOST = 15  # features


def print_explained(name: str, found: Mapping[str, Any]) -> None:
    """How far the policy leaves the rule, and which features move it."""
    console = Console(highlight=False)
    clusters, workers, windows = found["clusters"], found["workers"], found["windows"]
    console.print(Text(f"{name}: a correction of the goodput rule", "bold"))
    console.print(Text(f"Seen on {clusters} simulated clusters of {workers} workers, {windows} windows each.\n"))
    console.print(Text("How its answers differ from the rule's", "bold"))
    heads = [f"{100 * at:.0f} %" for at in found["quantiles"]]
    table = _table("quantile of its answers", *heads)
    moved, total = found["differs"]["moved"], found["differs"]["total"]
    table.add_row("part of the round that other workers get", *[f"{100 * value:.1f} %" for value in moved])
    table.add_row("global batch over the rule's", *[f"{value:.3f}" for value in total])
    console.print(table)
    console.print(Text(f"{100 * found['differs']['same']:.0f} % of its answers are the rule's.\n"))
    console.print(Text("Which features move it", "bold"))
    table = _table("feature", "sizes", "global", *heads)
    for feature in found["features"][:MOST]:
        effects = [f"{100 * feature[key]:.1f} %" for key in ("shares", "total")]
        table.add_row(Text(feature["name"]), *effects, *[f"x{value:.2f}" for value in feature["size"]])
    console.print(table)
    for line in (
        "sizes, global: how much a worker's size, and the global batch, change when the feature is shuffled.",
        "x: what the net multiplies a worker's size by where only its feature is at that quantile.",
        "Features overlap: what is small here need not be useless, and what is large need not be needed.",
        "What each feature is: dynamix.features and dynamix.policies.learned.residual.",
    ):
        console.print(Text(line))


def _table(first: str, *others: str) -> Table:
    return Table(first, *[Column(title, justify="right") for title in others], box=SIMPLE_HEAD, pad_edge=False)
