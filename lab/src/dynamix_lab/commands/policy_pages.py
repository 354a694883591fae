"""What `dynamix policy evaluate` prints for people: readable in a terminal of 80 columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from dynamix.cli.policy_pages import SCORE, columns_table, facts, label, print_medians

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
    table = columns_table("cell", *map(label, names))
    for cell, scores in found["cells"].items():
        marks = [_mark(scores[other]["over_goodput"]) if other == name else "" for other in names]
        row = [f"{scores[n]['geometric_mean']:.3f}{mark}" for n, mark in zip(names, marks, strict=True)]
        table.add_row(Text(cell), *row)
    console.print(Text(f"{name} on simulated clusters, seed {seed}", "bold"))
    console.print(Text(f"{SCORE} A cell is a family of clusters and its number of workers."))
    console.print(table)
    legend = [(other, _BESIDE[other]) for other in beside if other in _BESIDE]
    marks_mean = "the policy; + faster than the goodput rule, - slower (95 % interval of paired runs)"
    console.print(facts([*legend, (label(name), marks_mean)]))
    console.print(Text("\nOver all cells: medians, and how often it beats the goodput rule", "bold"))
    print_medians(console, found["summary"], len(found["cells"]))


def _mark(over_goodput: Sequence[float]) -> str:
    """+ or - where the 95 % interval of the paired ratio to the goodput rule lies beside 1."""
    _, low, high = over_goodput
    return " +" if low > 1 else " -" if high < 1 else "  "
