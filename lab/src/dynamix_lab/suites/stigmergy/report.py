"""table.md and report.html of `dynamix bench stigmergy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamix_lab.report import (
    Page,
    Section,
    Table,
    dot,
    legend_below,
    measured,
    new_figure,
    percent,
    provenance,
    with_interval,
)

# Cells that are not scenarios.
_KINDS = ("vanished", "recovery", "ablation")


def page(result: Mapping[str, Any]) -> str:
    """The sections with a plot of the scenarios, as a page."""
    first, *others = sections(result)
    drawn = Section("", figure=_plot(_scenarios(result["cells"])), caption="Time over static's; below 1 is faster.")
    made = Page(str(result["command"]), [first, drawn, *others], lead=[provenance(result)], details=measured(result))
    return made.html()


def sections(result: Mapping[str, Any]) -> list[Section]:
    """The results of the cells, without plots."""
    cells, scenarios = result["cells"], _scenarios(result["cells"])
    pairs = "In brackets the 95 % interval over pairs."
    made = [
        Section("Time over static's for the same progress", [pairs], _ratios(scenarios, "static")),
        Section("stigmergic's time over others'", [pairs], _against(scenarios | {"all": result})),
    ]
    vanished = {name: cell for name, cell in cells.items() if name.startswith("vanished-")}
    if vanished:
        said = "Half way a quarter of the workers are gone for good: time over static's."
        made.append(Section("A quarter gone", [said], _ratios(vanished, "static")))
    recovery = {name: cell for name, cell in cells.items() if name.startswith("recovery-")}
    if recovery:
        said = (
            "Windows after a lasting slowdown of one worker until 95 % of the lagged reference's pace: "
            "mean (95 % interval), share that recovered."
        )
        made.append(Section("Recovery", [said], _recovery(recovery)))
    ablations = {name.partition("-")[2]: cell for name, cell in cells.items() if name.startswith("ablation-")}
    if ablations:
        said = (
            "Time over the shipped rule's: with numbers learned for the ablation, and in square brackets with the "
            "shipped ones. `whole` takes nothing away, so it says what learning anew does."
        )
        made.append(Section("Ablations", [said], _ablations(ablations)))
    if result["decision_us"]:
        made.append(Section("Microseconds of a decision", (), _costs(result["decision_us"])))
    return made


def _scenarios(cells: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cell for name, cell in cells.items() if name.partition("-")[0] not in _KINDS}


def _ratios(cells: Mapping[str, Any], base: str) -> Table:
    names = [key.removesuffix(f"/{base}") for key in next(iter(cells.values()))["ratios"] if key.endswith(f"/{base}")]
    rows = [[name, *[with_interval(cell["ratios"][f"{n}/{base}"]) for n in names]] for name, cell in cells.items()]
    return Table(["cell", *names], rows)


def _against(cells: Mapping[str, Any]) -> Table:
    ratios = next(iter(cells.values()))["ratios"]
    bases = [key.partition("/")[2] for key in ratios if key.startswith("stigmergic/")]
    rows = [
        [name, *[with_interval(cell["ratios"][f"stigmergic/{base}"]) for base in bases]] for name, cell in cells.items()
    ]
    return Table(["cell", *bases], rows)


def _ablations(cells: Mapping[str, Any]) -> Table:
    def one(cell: Mapping[str, Any]) -> str:
        learned, shipped = (cell["ratios"][f"{name}/stigmergic"] for name in ("learned anew", "shipped numbers"))
        return f"{with_interval(learned)} [{shipped['median']:.2f}]"

    places = list(next(iter(cells.values()))["places"])
    rows = [[name, *[one(cell["places"][place]) for place in places]] for name, cell in cells.items()]
    return Table(["ablation", *places], rows)


def _recovery(cells: Mapping[str, Any]) -> Table:
    names = list(next(iter(cells.values()))["windows"])

    def one(part: Mapping[str, Any]) -> str:
        low, high = part["interval_of_mean"]
        return f"{part['mean']:.1f} ({low:.1f}-{high:.1f}), {percent(part['recovered'])}"

    return Table(["cell", *names], [[name, *[one(cell["windows"][n]) for n in names]] for name, cell in cells.items()])


def _costs(costs: list[dict[str, Any]]) -> Table:
    kinds = [name for name in costs[0] if name != "workers"]
    return Table(["workers", *kinds], [[f"{c['workers']:,}", *[f"{c[k]:.2f}" for k in kinds]] for c in costs])


def _plot(cells: Mapping[str, Any]) -> Any:
    figure, (axes,) = new_figure(height=1.5 + 0.28 * len(cells))
    names = [key.removesuffix("/static") for key in next(iter(cells.values()))["ratios"] if key.endswith("/static")]
    for i, name in enumerate(names):
        ratios = [cell["ratios"][f"{name}/static"]["median"] for cell in cells.values()]
        axes.plot(ratios, range(len(cells)), label=name, **dot(i))
    axes.axvline(1.0, color="#222", lw=0.8, ls=":")
    axes.set(yticks=range(len(cells)), xlabel="time / static's")
    axes.set_yticklabels(list(cells))
    axes.invert_yaxis()
    axes.grid(axis="y", lw=0.4)
    legend_below(axes)
    return figure
