"""Where sums that never decode beat everything else, by the model of bytes and hops: `dynamix bench compression-map`.

Hosts with equal full-duplex links to one switch, `W` of them, exchange the gradient of an embedding. Each rank's rows
are partly those of all ranks (`overlap`), partly nobody else's. A cell's time is hops times seconds a hop plus the
bytes of the busiest link direction over its rate; computing is left out, of which the homomorphic ways have the most.

Others: dense, torch's sparse all-reduce (`sparse=True`), `gather` and `blocks` of this library; the second is
OmniReduce's idea with blocks of exactly one row, which is their best. Homomorphic: compaction, LHC in two phases and in
one, and through an aggregator inside the switch, or on a host with a link like all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dynamix.compression.spread import Sent, Spread
from dynamix.compression.traffic import traffic
from dynamix.compression.ways import AGGREGATED
from dynamix_lab.report import Section, Table

WORKERS = (4, 8, 16)
RATES_GBIT_S = (0.1, 1.0, 10.0)
OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
ROWS, WIDTH = 40_000, 64
HOP_S = 1e-4
OTHERS = ("dense", "sparse=True", "gather", "blocks")
HOMOMORPHIC = ("compaction", "lhc", "lhc-one-phase", "aggregator in the switch", "aggregator on a host")
GOAL = 1.5
TABLES = ("ratings", "rows-")  # jobs, or how their names begin


@dataclass(frozen=True)
class MapCell:
    """One point of the grid.

    >>> MapCell(4, 1.0, 1.0, 0.01).spread.union_bytes == MapCell(4, 1.0, 1.0, 0.01).spread.sizes[0]
    True
    """

    workers: int
    rate_gbit_s: float
    overlap: float
    density: float
    rows: int = ROWS
    width: int = WIDTH

    @property
    def spread(self) -> Spread:
        own = self.density * self.rows
        union = min(own * (self.overlap + self.workers * (1 - self.overlap)), self.rows)
        row, index = 4 * self.width, min(4 * own, self.rows / 8)  # as rows are written: numbers, or a bit each
        of_union = index * union / own
        sizes = [round(own * row + index)] * self.workers
        return Spread(sizes, round(union * row + of_union), self.rows * row, round(of_union))

    def seconds(self, way: str, hop_s: float = HOP_S) -> float:
        """What an exchange takes, without computing."""
        return sent(way, self.spread, self.rows).seconds(byte_s=8e-9 / self.rate_gbit_s, hop_s=hop_s)

    def ratio(self, way: str, hop_s: float = HOP_S) -> float:
        """How many times as fast as the best other way."""
        return min(self.seconds(other, hop_s) for other in OTHERS) / self.seconds(way, hop_s)


def sent(way: str, spread: Spread, rows: int) -> Sent:
    """As `dynamix.compression.traffic.traffic`, for the ways here that it does not know, too.

    The index of the others is four bytes a row there, or one bit; torch's has eight bytes.
    """
    workers = len(spread.sizes)
    row = spread.dense_bytes / rows + 4
    if way == "sparse=True":  # three all-gathers, on rings
        return Sent((workers - 1) * max(spread.sizes) * (row + 4) / row, 3 * (workers - 1))
    if way == "aggregator in the switch":
        return traffic(f"{AGGREGATED}compaction", spread)
    if way == "aggregator on a host":
        inside = traffic(f"{AGGREGATED}compaction", spread)
        return Sent(workers * inside.bytes, inside.hops)
    return traffic(way, spread)


def cells() -> Iterator[MapCell]:
    """The grid."""
    for point in itertools.product(WORKERS, RATES_GBIT_S, OVERLAPS, DENSITIES):
        yield MapCell(*point)


def make_map(hop_s: float = HOP_S) -> dict[str, Any]:
    """Every cell: the best other way, and how many times as fast each homomorphic way is."""
    found = []
    for cell in cells():
        best = min(OTHERS, key=lambda way: cell.seconds(way, hop_s))
        ratios = {way: round(cell.ratio(way, hop_s), 3) for way in HOMOMORPHIC}
        point = {"workers": cell.workers, "rate_gbit_s": cell.rate_gbit_s, "overlap": cell.overlap}
        found.append({**point, "density": cell.density, "best_other": best, "ratios": ratios})
    return {"hop_s": hop_s, "rows": ROWS, "width": WIDTH, "others": OTHERS, "cells": found}


def compare(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Bytes a host sends by the model beside those that its interface counted, for a result of `bench compression`.

    A gather, or blocks, of more than dense goes dense. `sparse=True` only where the gradient is nothing but tables.
    """
    names = {"sparse": "sparse=True", "aggregator-compaction": "aggregator in the switch"}
    names["aggregator-lhc"] = f"{AGGREGATED}lhc-one-phase"
    found = []
    for name, cell in result["cells"].items():
        seen = cell.get("ways", {}).get("gather", {}).get("spread")
        if seen is None:
            continue
        spread = Spread(seen["sizes"], seen["union_bytes"], seen["dense_bytes"], seen.get("index_bytes", 0))
        for way, measured in cell["ways"].items():
            model = names.get(way, way)
            known = model in (*OTHERS, *HOMOMORPHIC) or model.startswith(AGGREGATED)
            if way == "sparse" and not cell["job"].startswith(TABLES):
                continue
            if known and measured["sent_bytes_per_step"]:
                rows = spread.dense_bytes // (4 * WIDTH)
                bytes_ = sent(model, spread, rows).bytes
                if way in ("gather", "blocks"):
                    bytes_ = min(bytes_, sent("dense", spread, rows).bytes)
                ratio = measured["sent_bytes_per_step"] / bytes_
                found.append({"cell": name, "way": way, "model": round(bytes_), "measured_over_model": round(ratio, 3)})
    return found


def sections(result: Mapping[str, Any]) -> list[Section]:
    """The largest ratio of each way by workers and rate, and where; the model beside measured bytes."""
    rows = []
    for workers, rate in itertools.product(WORKERS, RATES_GBIT_S):
        there = [one for one in result["cells"] if (one["workers"], one["rate_gbit_s"]) == (workers, rate)]
        rows.append([str(workers), f"{rate:g}", *(_largest(there, way) for way in HOMOMORPHIC)])
    said = (
        f"How many times as fast as the best other way, at most, and at which overlap and density; then how many of "
        f"{len(there)} cells are above 1 and reach {GOAL:g}. A hop takes {1e3 * result['hop_s']:g} ms."
    )
    made = [Section("Where homomorphic sums win", [said], Table(["W", "Gbit/s", *HOMOMORPHIC], rows))]
    others = {way: sum(one["best_other"] == way for one in result["cells"]) for way in OTHERS}
    best = [[way, str(count)] for way, count in others.items()]
    made.append(Section("The best of the others", (), Table(["way", f"cells of {len(result['cells'])}"], best)))
    if result.get("against"):
        made.append(beside_the_model(result["against"]))
    return made


def beside_the_model(compared: Sequence[Mapping[str, Any]]) -> Section:
    """What `compare` found, a row a way: how far measured bytes are from the model's, and in which cell most."""
    rows = []
    for way in dict.fromkeys(one["way"] for one in compared):
        there = sorted((one for one in compared if one["way"] == way), key=lambda one: one["measured_over_model"])
        ratios = [one["measured_over_model"] for one in there]
        least, most = (f"{one['measured_over_model']:.2f} ({one['cell']})" for one in (there[0], there[-1]))
        rows.append([way, str(len(there)), least, f"{median(ratios):.2f}", most])
    said = "Bytes that a host's interface sent over those of the model of bytes; packets' own headers are in the first."
    head = ["way", "cells", "least", "median", "most"]
    return Section("The model beside measured bytes", [said], Table(head, rows))


def _largest(there: Sequence[Mapping[str, Any]], way: str) -> str:
    best = max(there, key=lambda one: one["ratios"][way])
    ahead, reached = (sum(one["ratios"][way] > least for one in there) for least in (1.0, GOAL))
    return f"{best['ratios'][way]:.2f} ({best['overlap']:g}, {best['density']:g}); {ahead}, {reached}"
