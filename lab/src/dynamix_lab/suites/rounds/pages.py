"""The tables of `dynamix bench rounds`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamix.model.rounds import MOST
from dynamix_lab.report import Section, Table, number
from dynamix_lab.suites.rounds.jobs import JOBS

ROWS = ("rule", "guard", "adacomm", "qsr", "together", "product")
FACTORS, POWERS = (4, 6, 7, 8, 9, 10), (1 / 4, 1 / 3, 1 / 2)
Places = Sequence[Mapping[str, Any]]


def sections(result: Mapping[str, Any]) -> list[Section]:
    """What docs show of a result."""
    quiet = [place for place in result["places"] if place["jitter"] == 0]
    return [
        Section("Time over the best fixed number", table=means(quiet)),
        Section("Place by place", table=by_place(quiet)),
        Section("Other constants", table=constants(quiet)),
        Section("With jitter", table=jittered(result["places"])),
        Section("What u says", table=bends(result["bends"])),
    ]


def means(places: Places) -> Table:
    """By job, and of all but those of unlike data: geometric mean over places and the worst."""
    rows = []
    jobs = [job for job in JOBS if any(place["job"] == job for place in places)]
    groups = [(job, [place for place in places if place["job"] == job]) for job in jobs]
    groups += [("all whose data are alike", [place for place in places if not JOBS[place["job"]].unlike])]
    for name, some in groups:
        cells = []
        for row in ROWS:
            found = [place["over_best"][row] for place in some if row in place["over_best"]]
            cells.append(f"{np.exp(np.mean(np.log(found))):.2f}, {max(found):.2f}" if found else "–")
        rows.append([name, str(len(some)), *cells])
    return Table(["job", "places", *(f"{row}: mean, worst" for row in ROWS)], rows)


def by_place(places: Places) -> Table:
    """Seconds by fixed number of steps, and the rules over the best of these."""
    steps = sorted({int(row) for place in places for row in place["seconds"] if row.isdigit()})
    rows = []
    for place in sorted(places, key=lambda place: (list(JOBS).index(place["job"]), place["spread"])):
        times = [_seconds(place, str(n)) for n in steps]
        over = [number(place["over_best"].get(row), 2) for row in ROWS]
        rows.append([place["job"], f"{place['spread']:g}:1", f"{place['ratio']:g}", *times, str(place["best"]), *over])
    return Table(["job", "speeds", "exchange/piece", *(f"H = {n}, s" for n in steps), "best H", *ROWS], rows)


def _seconds(place: Mapping[str, Any], row: str) -> str:
    return number(place["seconds"].get(row), 1) + ("" if place["arrived"].get(row, True) else "*")


def constants(places: Places) -> Table:
    """What other rules of the form factor x ratio^power would take over the best fixed number, where data are alike.

    Read off the curve of the fixed numbers, between two of them by its logarithm: no learning rate of their own.
    """
    like = [place for place in places if not JOBS[place["job"]].unlike]
    rows = []
    for factor in FACTORS:
        cells = []
        for power in POWERS:
            over = [_at(place, factor * ((1 + JOBS[place["job"]].moments) * place["ratio"]) ** power) for place in like]
            cells.append(f"{np.exp(np.mean(np.log(over))):.2f}, {max(over):.2f}")
        rows.append([f"{factor:g}", *cells])
    return Table(["factor", *(f"power {power:.2g}: mean, worst" for power in POWERS)], rows)


def _at(place: Mapping[str, Any], steps: float) -> float:
    known = sorted((int(row), seconds) for row, seconds in place["seconds"].items() if row.isdigit())
    fixed, seconds = np.log(np.array(known)).T
    return float(np.exp(np.interp(np.log(np.clip(steps, 1.0, MOST)), fixed, seconds) - seconds.min()))


def jittered(places: Places) -> Table:
    """The rule over the best fixed number, and that number, at each jitter."""
    levels = sorted({place["jitter"] for place in places})
    rows = []
    for level in levels:
        some = [place for place in places if place["jitter"] == level]
        found = [place["over_best"]["rule"] for place in some]
        best = np.exp(np.mean(np.log([place["best"] for place in some])))
        mean = np.exp(np.mean(np.log(found)))
        rows.append([f"{level:g}", str(len(some)), f"{mean:.2f}", f"{max(found):.2f}", f"{best:.1f}"])
    return Table(["sd of a step's log time", "places", "rule: mean", "worst", "best H in the mean"], rows)


def bends(found: Sequence[Mapping[str, Any]]) -> Table:
    """u of every fixed number, and the samples that it needs over those of the number that needs fewest."""
    rows = []
    for one in sorted(found, key=lambda one: (list(JOBS).index(one["job"]), one["spread"], one["steps"])):
        alike = [o["samples"] for o in found if (o["job"], o["spread"]) == (one["job"], one["spread"])]
        over = number(one["samples"] / min(alike), 2)
        rows.append([one["job"], f"{one['spread']:g}:1", str(one["steps"]), number(one["u"], 2), over])
    return Table(["job", "speeds", "H", "u", "samples over the fewest"], rows)
