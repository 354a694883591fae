"""Summarises the runs of a comparison over trainings: interquartile means with intervals, a table, a figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamix_lab.excavation.aggregate import stratified
from dynamix_lab.excavation.config import ExperimentConfig

MEASURES = ("reward", "pellets_per_1000", "collisions_per_1000", "gini", "halves")


def summarise(config: ExperimentConfig, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Interquartile means over seeds by method and place ("all": over all places), and Lorenz curves.

    In "all", pellets are per agent, because places with more agents would outweigh the others.
    """
    methods: dict[str, Any] = {}
    places = config.places()
    opened = [{**r, "method": f"{r['method']}-open", "agents": r["open"]} for r in runs if "open" in r]
    for r in opened:
        for key in ("loss", "forced", "gate", "open", "large"):
            r.pop(key, None)
        if "open_large" in r:
            r["large"] = r.pop("open_large")
    for name in (shown for method in config.methods for shown in (method, f"{method}-open")):
        mine = [r for r in (*runs, *opened) if r["method"] == name and r["seed"] in config.seeds]
        mine.sort(key=lambda r: int(r["seed"]))
        if not mine:
            continue
        by_place = {place: _measures([r["agents"][place] for r in mine]) for place in places}
        per_agent = [[r["agents"][p]["pellets_per_1000"] / n for p, (_, n) in places.items()] for r in mine]
        losses = [r["loss"] for r in mine if "loss" in r]
        parts = {
            k: {**_estimate([loss[k] for loss in losses]), "seeds": [loss[k] for loss in losses]}
            for k in ("without", "again")
            if losses
        }
        large = {
            str(n): _measures([r["large"][str(n)] for r in mine])
            for n in config.large
            if all("large" in r for r in mine)
        }
        rests = [r["forced"] for r in mine if "forced" in r and "open" in r]
        forced = {
            k: stratified([f[k]["pellets_per_1000"] for f in rests]).to_dict() for k in (rests[0] if rests else ())
        }
        methods[name] = {
            **({"loss": parts} if losses else {}),
            **({"large": large} if large else {}),
            **({"forced": forced, "gates": [r["gate"] for r in mine]} if rests else {}),
            "seeds": [r["seed"] for r in mine],
            "agents": by_place,
            "all": {"pellets_per_1000_and_agent": stratified(per_agent).to_dict()},
            "seconds": [r["total_s"] for r in mine],
        }
    steps = sum(stage.steps for stage in config.stages) * config.worlds
    prints = {name: config.fingerprint(name) for name in methods if name in config.methods}
    facts = {"steps_of_worlds": steps, "fingerprints": prints, "config": dataclasses.asdict(config)}
    return {**facts, "methods": methods}


def table(summary: dict[str, Any]) -> str:
    """The summary as lines of text: interquartile mean [95 % interval] over seeds."""
    methods, places = summary["methods"], places_of(summary)
    wide = max(len("agents"), *map(len, places))
    lines = [f"{'agents':>{wide}}  {'method':<17}" + "".join(f"{name:>30}" for name in MEASURES)]
    for place in places:
        for name in methods:
            cells = methods[name]["agents"][place]
            lines.append(f"{place:>{wide}}  {name:<17}" + "".join(f"{_cell(cells[m]):>30}" for m in MEASURES))
    return "\n".join(lines)


def places_of(summary: Mapping[str, Any]) -> list[str]:
    """The names of the measured places, as in `ExperimentConfig.places`."""
    return list(next(iter(summary["methods"].values()))["agents"])


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw pellets by place (interquartile mean and its interval), and the Lorenz curves of the last place."""
    from matplotlib.figure import Figure

    figure, colours, colour = Figure(figsize=(11, 4), layout="constrained"), (f"C{n}" for n in range(10)), "C0"
    pellets, work = figure.subplots(1, 2)
    places = places_of(summary)
    for name, method in summary["methods"].items():
        cells = [method["agents"][place]["pellets_per_1000"] for place in places]
        known = [(n, c) for n, c in zip(places, cells, strict=True) if c["iqm"] is not None]
        x, mean = [n for n, _ in known], np.array([c["iqm"] for _, c in known])
        ends = np.array([[c["iqm"] if c[end] is None else c[end] for _, c in known] for end in ("low", "high")])
        whole = not name.endswith("-open")  # dashed, in the colour of the method that it belongs to
        colour = next(colours) if whole else colour
        line = {"color": colour, "linestyle": "-" if whole else "--", "label": name}
        pellets.errorbar(x, mean, np.abs(ends - mean), marker="o", capsize=3, **line)
        lorenz = method["agents"][places[-1]]["lorenz"]
        if lorenz is not None:  # None: no agent delivered anything
            work.plot(np.linspace(0, 1, len(lorenz)), lorenz, **line)
    work.plot([0, 1], [0, 1], color="0.7", linestyle=":", label="equal work")
    pellets.set(xlabel="agents", ylabel="pellets per 1,000 steps, all agents")
    if summary["config"]["drawn"]:
        pellets.tick_params(axis="x", labelrotation=75, labelsize=7)
    title = places[-1] if summary["config"]["drawn"] else f"{places[-1]} agents"
    work.set(xlabel="share of agents, least working first", ylabel="share of pellets", title=title)
    work.legend(frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(path, dpi=110)


def _cell(estimate: dict[str, float | None]) -> str:
    if estimate["iqm"] is None:
        return "-"
    interval = "" if estimate["low"] is None else f" [{estimate['low']:.2f}, {estimate['high']:.2f}]"
    return f"{estimate['iqm']:.2f}{interval}"


def _measures(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in MEASURES:
        out[name] = {**_estimate([r[name] for r in results]), "seeds": [r[name] for r in results]}
    curves = [r["lorenz"] for r in results if r["lorenz"] is not None]
    return {**out, "lorenz": np.mean(curves, axis=0).tolist() if curves else None}


def _estimate(values: Sequence[float | None]) -> dict[str, float | None]:
    """The estimate over the values that are not None."""
    known = [value for value in values if value is not None]
    return stratified(known).to_dict() if known else {"iqm": None, "low": None, "high": None}
