"""Tables of `dynamix bench gossip`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamix_lab.report import Section, Table, number, sections_markdown
from dynamix_lab.statistics import paired_ratio

RULES = ("oracle", "gossip", "ends", "riding", "deadline", "clock", "tracker")
TUNED = RULES[4:]
SHOWN = (4, 8, 12, 16)  # exchanges after which sums are shown


def markdown(result: Mapping[str, Any]) -> str:
    """All tables."""
    return sections_markdown(sections(result))


def sections(result: Mapping[str, Any]) -> list[Section]:
    """Simulated paces, agreement and what it costs, live runs, ways to sum; what was not run is left out."""
    made = []
    if result["simulated"]:
        made += [
            Section("Pace, simulated", [_PACE], _paces(result)),
            Section("Agreement", [_AGREE], _agreement(result)),
        ]
    if result["live"]:
        made.append(Section("Live", [_LIVE], _live(result["live"])))
    if result["sums"]:
        made.append(Section("Ways to sum", [_SUMS], _sums(result["sums"])))
    return made


_PACE = (
    "Pieces that came to a meeting, each counting for what it teaches in a round of so many steps, in parts of what "
    "workers could have trained without ever waiting. Deadline, clock and tracker have the setting that is best in the "
    "row, in brackets; the last row has one setting for all."
)
_AGREE = (
    "Apart: standard deviation of the lengths with which workers began a round, in parts of it, in the mean. Settled: "
    "meetings after the partition until nearly all met and lengths were within 2 %. Of a worker in a round."
)
_LIVE = (
    "Useful: samples that came to a meeting and stayed, in parts of what hosts could have trained. Loss: held out, of "
    "the survivors at the end. Whole: seconds from the end of the cut to the first meeting of all survivors. Overruns: "
    "part of training steps that took longer than the device would, as this machine was busy."
)
_SUMS = "After so many exchanges of each worker with one other, 5 % of messages lost; in parts of the mean."


def _paces(result: Mapping[str, Any]) -> Table:
    rows = []
    for cell in result["simulated"]:
        row = [cell["place"], f"{cell['workers']:,}"]
        for rule in RULES:
            said = number(_mean(cell["rows"][rule], "pace"), 3)
            setting = cell["settings"].get(rule, "").partition("@")[2]
            row.append(f"{said} ({setting})" if setting else said)
        rows.append([*row, *[_over(cell, other) for other in RULES[2:]]])
    same = result["same"]
    last = [
        f"{same[rule]['mean']:.3f}" + (f" ({s})" if (s := same[rule]["row"].partition("@")[2]) else "")
        for rule in RULES
    ]
    ratios = [f"{same['gossip']['mean'] / same[rule]['mean']:.3f}" for rule in RULES[2:]]
    rows.append(["all, one setting", "", *last, *ratios])
    return Table(["place", "workers", *RULES, *[f"gossip over {rule}" for rule in RULES[2:]]], rows)


def _over(cell: Mapping[str, Any], other: str) -> str:
    mine, theirs = ([each["pace"] for each in cell["rows"][rule]] for rule in ("gossip", other))
    found = paired_ratio(mine, theirs).to_dict()
    if found["low"] is None:
        return f"{found['median']:.3f}"
    return f"{found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


def _agreement(result: Mapping[str, Any]) -> Table:
    head = ["place", "workers", "gossip apart", "riding apart", "messages", "bytes", "tracker's bytes a look"]
    head += [f"{rule} settled" for rule in ("gossip", "ends", "riding", *TUNED)]
    rows = []
    for cell in result["simulated"]:
        gossip, workers = cell["rows"]["gossip"], cell["workers"]
        row = [
            cell["place"],
            f"{workers:,}",
            percent2(_mean(gossip, "apart")),
            percent2(_mean(cell["rows"]["riding"], "apart")),
        ]
        row += [number(_mean(gossip, "messages"), 1), f"{_mean(gossip, 'bytes') or 0:,.0f}", f"{80 * workers:,}"]
        rows.append(row + [_settled(cell["rows"][rule]) for rule in ("gossip", "ends", "riding", *TUNED)])
    return Table(head, rows)


def percent2(value: float | None) -> str:
    """A small share.

    >>> percent2(0.00123)
    '0.12 %'
    """
    return "–" if value is None else f"{100 * value:.2f} %"


def _settled(entries: Sequence[Mapping[str, Any]]) -> str:
    known = [entry["settled"] for entry in entries]
    if all(value is None for value in known):
        return "–"
    never = sum(value is None for value in known)
    said = number(float(np.mean([value for value in known if value is not None])), 1)
    return f"{said}, never in {never} of {len(known)}" if never else said


def _live(runs: Sequence[Mapping[str, Any]]) -> Table:
    head = [
        "rule",
        "setting",
        "useful",
        "loss",
        "whole after, s",
        "rounds",
        "apart",
        "messages/s",
        "bytes/s",
        "survivors ended",
        "overruns",
    ]
    rows = []
    for run in runs:
        row = [run["rule"], f"{run['setting']:g}" if run["setting"] else "–", number(run["useful"], 3)]
        row += [number(run["loss"], 4), number(run["whole"], 1), str(run["rounds"]), percent2(run["apart"])]
        row += [
            number(run["messages"], 1),
            f"{run['bytes']:,.0f}",
            f"{run['ended']} of {run['survivors']}",
            percent2(run["overruns"]),
        ]
        rows.append(row)
    return Table(head, rows)


def _sums(cells: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for cell in cells:
        for way, found in cell["ways"].items():
            row = [f"{cell['workers']:,}", way, f"{found['bytes'][-1]:,.0f}"]
            row += [f"{percent2(found['error'][n - 1])}, {percent2(found['apart'][n - 1])}" for n in SHOWN]
            rows.append(row)
    return Table(["workers", "way", "bytes", *[f"error, apart after {n}" for n in SHOWN]], rows)


def _mean(entries: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [float(entry[name]) for entry in entries if entry[name] is not None]
    return float(np.mean(known)) if known else None
