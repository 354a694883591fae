"""What `auto` decides on given links, step by step; `recorded_ways.json` holds what 0.2 decided (commit 4bbfdc7).

Times come from the model of bytes and hops, with computing beside them, so that decisions repeat on every machine.
"""

from __future__ import annotations

import itertools
from typing import Any

from dynamix.compression.auto import Chooser
from dynamix.compression.spread import Spread
from dynamix.compression.traffic import traffic

COMPUTING = {"dense": 0.0, "gather": 1e-9, "blocks": 1.3e-9, "compaction": 1.1e-9, "lhc": 2e-9}  # seconds a byte
THROUGH = ("gather", "blocks", "compaction", "aggregator-compaction", "aggregator-lhc-one-phase")
STEPS = 1200


def spreads() -> dict[str, Spread]:
    """Gradients of 2 to 16 ranks, from nearly empty to full, from ranks that hold the same to ranks that do not."""
    found = {}
    for workers, own, overlap in itertools.product((2, 8, 16), (0.002, 0.05, 0.4, 1.0), (0.0, 0.7, 1.0)):
        union = min(own * (overlap + workers * (1 - overlap)), 1.01)
        dense = 4_000_000
        sizes = [round(own * dense * (1 + 0.1 * (rank % 3))) for rank in range(workers)]
        found[f"{workers} ranks, {own}, {overlap}"] = Spread(
            sizes, round(union * dense), dense, round(0.03 * union * dense)
        )
    return found


def sent() -> dict[str, dict[str, list[float]]]:
    """Bytes and hops of every way at each spread."""
    ways = ("dense", "fixed", "gather", "blocks", "compaction", "lhc", "lhc-one-phase", *THROUGH[3:], "aggregator-lhc")
    return {
        name: {way: [(one := traffic(way, spread)).bytes, one.hops] for way in ways}
        for name, spread in spreads().items()
    }


def decided(chooser: Chooser, before: Spread, after: Spread, byte_s: float, hop_s: float) -> list[list[Any]]:
    """Runs of equal ways as [way, steps], and what the chooser knows at the end. Half way the gradient changes."""
    taken: list[list[Any]] = []
    for step in range(STEPS):
        spread = before if step < STEPS // 2 else after
        way, timed = chooser.next()
        cost = traffic(way, spread)
        full = way in ("gather", "blocks") and cost.bytes > traffic("dense", spread).bytes
        if full:
            cost = traffic("dense", spread)
        computing = COMPUTING.get(way.removeprefix("aggregator-").removesuffix("-one-phase"), 0.0) * spread.dense_bytes
        seconds = cost.seconds(byte_s=byte_s, hop_s=hop_s) + computing + 1e-6 * (step * 7919 % 13)
        due = chooser.due
        chooser.record(seconds if timed else None, full=full)
        if due:
            chooser.agree(chooser.report(hop_s=hop_s, byte_s=byte_s), None if way == "dense" else spread)
        if taken and taken[-1][0] == way:
            taken[-1][1] += 1
        else:
            taken.append([way, 1])
    return [*taken, [sorted(chooser.cost_s.items())]]


def decisions() -> dict[str, Any]:
    """By link and gradient, over the group alone and with an aggregator."""
    found: dict[str, Any] = {}
    names = list(spreads())
    for place, name in enumerate(names):
        other = names[(place * 5 + 7) % len(names)]
        for byte_s, hop_s in ((8e-8, 5e-4), (8e-9, 5e-5), (1e-10, 2e-5)):
            for kind in ("group", "aggregator"):
                chooser = Chooser() if kind == "group" else Chooser(THROUGH)
                trace = decided(chooser, spreads()[name], spreads()[other], byte_s, hop_s)
                found[f"{kind}: {name}, then {other}: {byte_s} s a byte, {hop_s} s a hop"] = trace
    return found
