"""The product beside the best of all opponents, place by place: what a reader asks who may pick any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamix_lab.opponents.tuning import LOCAL
from dynamix_lab.report import Section, Table, number, with_interval
from dynamix_lab.statistics import geometric_mean, paired_ratio
from dynamix_lab.suites.opponents.verdict import OPPONENTS, SINGLE, Times

OURS = ("dynamix-auto", "dynamix", "dynamix-parameters")
"""The product's rows, its own choice of meeting first: the first that ran is the one that is compared."""


def product_row(times: Mapping[str, Any]) -> str | None:
    """Which of the product's rows stands for it.

    >>> product_row({"single": [1.0], "dynamix": [1.0], "dynamix-parameters": [1.0]})
    'dynamix'
    """
    return next((row for row in OURS if row in times), None)


def beside_best(times: Times, row: str, speeds_sum: float | None) -> dict[str, Any]:
    """`row` beside the best opponents of a place, and its speed over one worker alone.

    speeds_sum   sum of the workers' speeds over the fastest's: the most that sharing samples can give; None: unknown

    >>> found = beside_best({"single": [9.0, 9.0], "static": [4.0, 4.4], "local": [3.0, 3.1], "x": [3.0, 3.0]}, "x", 4)
    >>> found["best"], found["best_synchronous"], found["over_single"], found["of_sum"]
    ('local', 'static', 3.0, 0.75)
    """
    means = {name: geometric_mean(list(values)) for name, values in times.items()}
    opponents = [name for name in means if name == SINGLE or name in (*OPPONENTS, *LOCAL)]
    best = min(opponents, key=means.__getitem__)
    synchronous = min((name for name in opponents if name in OPPONENTS), key=means.__getitem__)
    over_single = means[SINGLE] / means[row]
    return {
        "row": row,
        "best": best,
        "over_best": paired_ratio(times[row], times[best]).to_dict(),
        "best_synchronous": synchronous,
        "over_best_synchronous": paired_ratio(times[row], times[synchronous]).to_dict(),
        "over_single": over_single,
        "of_sum": None if speeds_sum is None else over_single / speeds_sum,
    }


def section(places: Mapping[str, Any]) -> Section | None:
    """One line for each place; None where the product did not run."""
    rows, found = [], []
    for text, part in places.items():
        row = product_row(part["times_s"])
        if row is None:
            continue
        one = beside_best(part["times_s"], row, part.get("speeds_sum"))
        found.append(one)
        best, synchronous = (with_interval(one[over], 2) for over in ("over_best", "over_best_synchronous"))
        speed = number(one["over_single"], 2)
        cells = [f"{best} {one['best']}", f"{synchronous} {one['best_synchronous']}", speed, number(one["of_sum"], 2)]
        rows.append([text, row, *cells])
    if not rows:
        return None
    ratios = [float(one["over_best"]["median"]) for one in found]
    said = [
        "A place's best opponent is known only afterwards: to be level with it everywhere is to have chosen right. "
        "The last column is the speed over one worker alone, as a part of the sum of the workers' speeds over the "
        "fastest's: at equal samples nothing is above 1.",
        f"Over the best opponent: {number(geometric_mean(ratios), 2)} in the mean, {number(max(ratios), 2)} at worst.",
    ]
    head = ["place", "ours", "over the best opponent", "over the best synchronous one", "over single, times", "of sum"]
    return Section("The product beside the best opponent of each place", text=said, table=Table(head, rows))


def link_section(places: Mapping[str, Any]) -> Section | None:
    """What a slow link costs: the same trials on the same devices with links that limit nothing.

    None where no row ran on both.
    """
    rows = []
    for text, part in places.items():
        for row, there in part.get("without_limit_s", {}).items():
            if there:
                here = part["times_s"][row]
                means = [number(geometric_mean(list(times)), 1) for times in (here, there)]
                rows.append([text, row, *means, with_interval(paired_ratio(here, there).to_dict(), 2)])
    if not rows:
        return None
    head = ["place", "row", "seconds", "with links that limit nothing", "ratio"]
    said = "The same trial on the same devices and seeds, once with links that limit nothing."
    return Section("What the slow link costs", text=[said], table=Table(head, rows))
