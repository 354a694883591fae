"""table.md of `dynamix bench stigmergy`."""

from __future__ import annotations

from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """Scenarios, failures, recovery, ablations and costs, a table each."""
    cells = result["cells"]
    kinds = ("failures", "vanished", "recovery", "ablations")
    scenarios = {name: cell for name, cell in cells.items() if name.partition("-")[0] not in kinds}
    parts = [
        "Time over static's for the same progress; in brackets the 95 % interval over pairs.\n",
        _ratios(scenarios, "static"),
    ]
    parts += ["stigmergic's time over others'.\n", _against(scenarios)]
    failures = {name: cell for name, cell in cells.items() if name.startswith(("failures-", "vanished-"))}
    if failures:
        parts += [
            "From half way on nobody decides (`-dead`), or a quarter of the workers are gone (`vanished`): time over static's.\n"
        ]
        parts += [_ratios({name: cell}, "static") for name, cell in failures.items()]
        parts += [
            f"{name}: part of its own gain that is left: {_named(cell['gain_left'])}\n"
            for name, cell in failures.items()
            if "gain_left" in cell
        ]
    recovery = {name: cell for name, cell in cells.items() if name.startswith("recovery-")}
    if recovery:
        parts += [
            "Windows after a lasting slowdown of one worker until 95 % of the lagged reference's pace: mean (95 % interval), share that recovered.\n"
        ]
        parts += [_recovery(recovery)]
    ablations = {name: cell for name, cell in cells.items() if name.startswith("ablations-")}
    if ablations:
        parts += ["Ablations: time over the whole rule's.\n", _ratios(ablations, "stigmergic")]
    parts += ["Microseconds of a decision.\n", _costs(result["decision_us"])]
    return "\n".join(parts)


def _cell(ratio: dict[str, float | None]) -> str:
    return f"{ratio['median']:.3f}" + ("" if ratio["low"] is None else f" ({ratio['low']:.3f}-{ratio['high']:.3f})")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *["| " + " | ".join(row) + " |" for row in rows]]) + "\n"


def _ratios(cells: dict[str, Any], base: str) -> str:
    names = [key.removesuffix(f"/{base}") for key in next(iter(cells.values()))["ratios"] if key.endswith(f"/{base}")]
    rows = [[name, *[_cell(cell["ratios"][f"{n}/{base}"]) for n in names]] for name, cell in cells.items()]
    return _table(["cell", *names], rows)


def _against(cells: dict[str, Any]) -> str:
    bases = [key.partition("/")[2] for key in next(iter(cells.values()))["ratios"] if not key.endswith("/static")]
    rows = [[name, *[_cell(cell["ratios"][f"stigmergic/{b}"]) for b in bases]] for name, cell in cells.items()]
    return _table(["cell", *bases], rows)


def _recovery(cells: dict[str, Any]) -> str:
    names = list(next(iter(cells.values()))["windows"])

    def one(part: dict[str, Any]) -> str:
        low, high = part["interval_of_mean"]
        return f"{part['mean']:.1f} ({low:.1f}-{high:.1f}), {100 * part['recovered']:.0f} %"

    rows = [[name, *[one(cell["windows"][n]) for n in names]] for name, cell in cells.items()]
    return _table(["cell", *names], rows)


def _costs(costs: list[dict[str, Any]]) -> str:
    kinds = [name for name in costs[0] if name != "workers"]
    return _table(["workers", *kinds], [[f"{c['workers']:,}", *[f"{c[k]:.2f}" for k in kinds]] for c in costs])


def _named(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * value:.0f} %" for name, value in values.items())
