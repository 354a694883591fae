"""`dynamix bench gossip`: rounds that meet over parameters where nobody is in charge.

How workers should sum what they gossip; what the gossiped rule is worth in simulated worlds of up to 10,000 workers,
beside a deadline, Hivemind's tracker and sums that ride on the meeting; and live, on emulated hosts of which some are
killed and whose network is cut for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dynamix.errors import ConfigError
from dynamix_lab.emulator import probe_mechanisms
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Page, measured, provenance
from dynamix_lab.suites.gossip import pages
from dynamix_lab.suites.gossip.live import GossipPlace, play_live
from dynamix_lab.suites.gossip.rules import EndRule, Ends, Fixed, Gossiped, Oracle, Riding, SharedClock, Tracker
from dynamix_lab.suites.gossip.simulate import Play
from dynamix_lab.suites.gossip.sketches import ways_to_sum
from dynamix_lab.suites.gossip.world import GROUP, PLACES, GossipWorld, made_world

KINDS = ("sums", "simulated", "live")
PLAIN = ("oracle", "gossip", "ends", "riding")
TUNED = ("deadline", "clock", "tracker")
SETTINGS = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0)
LIVE = (
    ("gossip", 0.0),
    ("ends", 0.0),
    ("riding", 0.0),
    *(("deadline", seconds) for seconds in (1.0, 2.0, 4.0)),
    *(("tracker", pieces) for pieces in (4.0, 8.0)),
)
GROUPED = range(2 * GROUP, 5000)  # workers at the place where groups meet: with more it takes long
_SEEDS = {8: 8, 64: 4}


@dataclass(frozen=True, slots=True)
class GossipPlan:
    """What one call runs.

    seeds        the most worlds of a place and number of workers; fewer with many workers
    live         rows by rule and setting
    live_seeds   runs of each
    """

    only: tuple[str, ...] = KINDS
    workers: tuple[int, ...] = (8, 64, 1000, 10_000)
    places: tuple[str, ...] = PLACES
    seeds: int = 8
    live: tuple[tuple[str, float], ...] = LIVE
    live_seeds: int = 1

    @classmethod
    def of(cls, *, quick: bool, only: tuple[str, ...] | None = None, live_seeds: int = 1) -> GossipPlan:
        """All of it, or 8 workers in simulation alone."""
        if quick:
            return cls(only or ("sums", "simulated"), (8,), ("churn", "partition"), 1, LIVE[:1], 1)
        return cls(only or KINDS, live_seeds=live_seeds)

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        for name in self.only:
            if name not in KINDS:
                raise ConfigError("only", name, ", ".join(KINDS), "check the spelling")
        for place in self.places:
            if place not in PLACES:
                raise ConfigError("places", place, ", ".join(PLACES), "check the spelling")
        if min(self.workers) < 2 or min(self.seeds, self.live_seeds) < 1:
            raise ConfigError("workers, seeds", (self.workers, self.seeds), "2 or more; 1 or more", "check both")

    def worlds(self, workers: int) -> list[int]:
        """Seeds of the worlds of so many workers."""
        return list(range(min(self.seeds, _SEEDS.get(workers, 1))))


@dataclass(frozen=True)
class GossipSuite(Suite):
    """A cell is a number of workers for sums, a place and a number of workers, or a live run."""

    plan: GossipPlan
    name: str = "gossip"
    grows: ClassVar[frozenset[str]] = frozenset({"only", "live_seeds"})

    def facts(self) -> dict[str, Any]:
        mechanisms = {name: found[1] or "yes" for name, found in probe_mechanisms().items()}
        seeds = list(range(self.plan.seeds))
        scenario = GossipPlace().scenario().sha256
        return {
            "cluster": "simulator and emulator",
            "mechanisms": mechanisms,
            "seeds": seeds,
            "scenario_sha256": scenario,
        }

    def cells(self) -> list[Cell]:
        plan, made = self.plan, list[Cell]()
        if "sums" in plan.only:
            made += [Cell(f"sums-{workers}", ("sums", workers)) for workers in plan.workers]
        if "simulated" in plan.only:
            pairs = [(place, workers) for workers in plan.workers for place in plan.places]
            pairs = [(place, workers) for place, workers in pairs if place != "groups" or workers in GROUPED]
            made += [
                Cell(f"{place.replace(' ', '-')}-{workers}", ("simulated", place, workers)) for place, workers in pairs
            ]
        if "live" in plan.only:
            for seed in range(plan.live_seeds):
                made += [Cell(f"live-{rule}-{at:g}-{seed}", ("live", rule, at, seed)) for rule, at in plan.live]
        return made

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        kind, *what = cell.what
        if kind == "sums":
            found = [ways_to_sum(what[0], seed) for seed in range(3)]
            return {"kind": kind, "workers": what[0], "ways": _mean_of(found)}
        if kind == "simulated":
            place, workers = what
            rows = compared(place, workers, self.plan.worlds(workers))
            return {"kind": kind, "place": place, "workers": workers, "rows": rows}
        rule, setting, seed = what
        folder = context.folder.path / "ranks" / cell.key
        found_live = play_live(GossipPlace(), rule, setting, folder, seed=seed, keep_awake=True)
        return {"kind": kind, "rule": rule, "setting": setting, "seed": seed, **found_live}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        return {"target": None, **concluded(list(cells.values()))}

    def table(self, result: Mapping[str, Any]) -> str:
        return pages.markdown(result)

    def page(self, result: Mapping[str, Any]) -> str:
        lead = [provenance(result)]
        return Page(str(result["command"]), pages.sections(result), lead=lead, details=measured(result)).html()


def _mean_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: {what: np.mean([each[name][what] for each in found], axis=0).tolist() for what in found[0][name]}
        for name in found[0]
    }


def rule_of(row: str, world: GossipWorld, seed: int) -> EndRule:
    """The rule of a row by name: "gossip", "ends", "riding", "oracle", "deadline@8", "clock@8", "tracker@8"."""
    kind, _, value = row.partition("@")
    if kind == "gossip":
        return Gossiped(world, np.random.default_rng([seed, world.workers, 12]))
    if kind == "deadline":
        return Fixed(float(value))
    if kind == "clock":
        return SharedClock(float(value))
    if kind == "tracker":
        return Tracker(float(value), world)
    if kind in ("riding", "ends"):
        return Ends(world) if kind == "ends" else Riding(world)
    return Oracle()


def compared(place: str, workers: int, seeds: list[int]) -> dict[str, list[dict[str, Any]]]:
    """What every rule makes of the same worlds, by row; an entry a world."""
    rows = list(PLAIN)
    rows += [f"{kind}@{setting:g}" for kind in TUNED for setting in SETTINGS]
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in rows}
    for seed in seeds:
        world = made_world(place, workers, seed)
        for row in rows:
            rng = np.random.default_rng([seed, workers, 13])
            rule, size = rule_of(row, world, seed), GROUP if place == "groups" else None
            found[row].append(Play(world, rule, rng, gossips=row in ("gossip", "ends"), size=size).run())
    return found


def concluded(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """What the cells mean together; see `pages`."""
    simulated = [cell for cell in cells if cell["kind"] == "simulated"]
    return {
        "sums": [cell for cell in cells if cell["kind"] == "sums"],
        "simulated": [chosen(cell) for cell in simulated],
        "same": same_everywhere(simulated),
        "live": [cell for cell in cells if cell["kind"] == "live"],
    }


def chosen(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A place with the best setting of the rules that have one, which is known only afterwards."""
    rows = dict(cell["rows"])
    best = {kind: _best(rows, kind) for kind in TUNED}
    kept = {row: rows[row] for row in PLAIN}
    kept |= {kind: rows[row] for kind, row in best.items()}
    return {"place": cell["place"], "workers": cell["workers"], "settings": best, "rows": kept}


def _best(rows: Mapping[str, Any], kind: str) -> str:
    names = [name for name in rows if name.startswith(f"{kind}@")]
    return max(names, key=lambda name: float(np.mean([each["pace"] for each in rows[name]])))


def same_everywhere(simulated: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every rule the one setting whose pace over all places is highest in the geometric mean, with its paces."""
    if not simulated:
        return {}
    names = simulated[0]["rows"]
    paces = {row: [float(np.mean([e["pace"] for e in cell["rows"][row]])) for cell in simulated] for row in names}
    means = {row: float(np.exp(np.mean(np.log(values)))) for row, values in paces.items()}
    best = {row: row for row in PLAIN}
    for kind in TUNED:
        best[kind] = max((row for row in names if row.startswith(f"{kind}@")), key=lambda row: means[row])
    return {kind: {"row": row, "mean": means[row], "paces": paces[row]} for kind, row in best.items()}
