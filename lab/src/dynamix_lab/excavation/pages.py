"""The tables of a comparison on the excavation task, from result.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamix_lab.excavation.config import HAND, LEARNED_GATE, base
from dynamix_lab.excavation.gate_search import GateSearch
from dynamix_lab.excavation.summary import places_of
from dynamix_lab.report import Section, Table, number


def sections(result: Mapping[str, Any]) -> list[Section]:
    """Sections on pellets by number of agents, division of work, larger grounds, and forced rest, if measured."""
    methods, agents = result["methods"], places_of(result)
    if result["config"].get("drawn"):
        rows = [[n, *(_cell(m["agents"][n]["pellets_per_1000"], 0) for m in methods.values())] for n in agents]
        trained = [f"{name} ({len(m['seeds'])} trainings)" for name, m in methods.items()]
        return [Section("Pellets per 1,000 steps on grounds never learned on", table=Table(["ground", *trained], rows))]
    most = agents[-1]
    by_agents = [
        [name, str(len(m["seeds"])), *(_cell(m["agents"][n]["pellets_per_1000"], 0) for n in agents)]
        for name, m in methods.items()
    ]
    crowd = []
    for name, m in methods.items():
        cells, loss = m["agents"][most], m.get("loss", {})
        parts = [_cell(loss[key], 2) if key in loss else "–" for key in ("without", "again")]
        figures = [("pellets_per_1000", 0), ("gini", 2), ("halves", 2), ("collisions_per_1000", 0)]
        crowd.append([name, *(_cell(cells[key], digits) for key, digits in figures), *parts, _learned(result, name)])
    heads = ["method", "trainings", *(f"{n} agents" if n != "1" else "1 agent" for n in agents)]
    head = ["method", "pellets", "Gini", "halves", "collisions", "without the three busiest", "when they are back"]
    head += ["learned in steps of a world, gate included"]
    made = [
        Section("Pellets per 1,000 steps", table=Table(heads, by_agents)),
        Section(f"With {most} agents", table=Table(head, crowd)),
    ]
    large = {name: m["large"] for name, m in methods.items() if "large" in m}
    if large:
        counts = list(next(iter(large.values())))
        rows = [
            [
                name,
                *(
                    _cell(found[n][key], digits)
                    for n in counts
                    for key, digits in (("pellets_per_1000", 0), ("gini", 2))
                ),
            ]
            for name, found in large.items()
        ]
        heads = ["method", *(f"{n} agents: {what}" for n in counts for what in ("pellets", "Gini"))]
        made.append(
            Section(f"On larger grounds, learned with {most}: a tunnel for every {most}", table=Table(heads, rows))
        )
    forced = {name: m["forced"] for name, m in methods.items() if "forced" in m}
    if forced:
        counts = list(next(iter(forced.values())))
        rows = [[name, *(_cell(f[k], 0) for k in counts)] for name, f in forced.items()]
        made.append(Section("Pellets where so many are made to rest", table=Table(["motion", *counts], rows)))
    return made


def _learned(result: Mapping[str, Any], method: str) -> str:
    """Steps of a world, in millions, in the lessons and in the search for a gate."""
    config, name = result["config"], base(method.removesuffix("-open"))
    steps = 0 if name in (*HAND, "random") else result["steps_of_worlds"]
    if name in LEARNED_GATE and not method.endswith("-open"):
        steps += GateSearch(**config["gate"]).steps(config["task"]["horizon"])
    return f"{steps / 1e6:.1f} million" if steps else "0"


def _cell(estimate: Mapping[str, Any], digits: int) -> str:
    if estimate["iqm"] is None or estimate["low"] is None:
        return number(estimate["iqm"], digits)
    return f"{estimate['iqm']:.{digits}f} ({estimate['low']:.{digits}f} to {estimate['high']:.{digits}f})"
