"""Summarises the measurements of `dynamix bench compression`: medians, ratios to dense and to the bound, goals. Pure
functions.

A rank's exchange lasts from its gradient being ready to the mean being there, so it includes waiting for slower ranks.
The minimum over ranks is that of the last rank, which waits for none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dynamix_lab.harness.runs import A_A_LIMIT
from dynamix_lab.statistics import paired_ratio
from dynamix_lab.suites.compression.exchanges import AGAIN, AGGREGATED, OURS
from dynamix_lab.suites.compression.jobs import SPARSEST

GOALS = {
    "aggregation": 10.0,  # times dense's throughput: best of ours, sparsest job, slowest link
    "iteration": 3.74,  # times dense's speed there (the paper's largest)
    "compaction_bytes": 1.2,  # times the bound, at most, wherever most is zero
    "lhc_bytes": 1.6,
    "auto_time": 1.03,  # times dense's, at most, in every cell
    "auto_best": 1.05,  # times the best way's, among those that `auto` can choose
    "gather_sparse": 1.0,  # times plain `sparse=True`'s, at most
}
CANDIDATES = ("gather", "blocks", "compaction", "lhc")  # what `auto` can choose besides dense
RESAMPLES = 500  # few rounds need few
SPARSE = 0.2  # compression is meant for gradients with a smaller fraction of nonzero elements


def summarise(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise one cell from its ranks' measurements."""
    names = list(ranks[0]["ways"])
    dense_bytes = ranks[0]["dense_bytes"]
    ways = {
        name: _way([rank["ways"][name] for rank in ranks], dense_bytes, aggregated=name in AGGREGATED) for name in names
    }
    return {
        "dense_bytes": dense_bytes,
        "ways": ways,
        "ratios": {f"{name}/dense": _ratio(ways, name, "iteration_s") for name in names if name != "dense"},
        "exchange_ratios": {
            f"{name}/dense": _ratio(ways, name, "exchange_s")
            for name in names
            if name != "dense" and ways[name]["exchange_s"]
        },
    }


def _losses(way: Mapping[str, Any]) -> list[float]:
    return [loss for turn in way["turns"] for loss in turn["loss"]]


def _way(ranks: Sequence[Mapping[str, Any]], dense_bytes: int, *, aggregated: bool) -> dict[str, Any]:
    """Summarise one way in one cell. Lists run over rounds; other numbers are over all timed steps."""
    rounds = range(len(ranks[0]["turns"]))
    iterations = [np.array(ranks[0]["turns"][r]["iteration_s"]) for r in rounds]
    timed = ranks[0]["turns"][0]["exchange_s"] is not None  # plain DDP's exchange cannot be timed separately
    exchanges = [np.min([rank["turns"][r]["exchange_s"] for rank in ranks], axis=0) for r in rounds] if timed else []
    steps = sum(len(times) for times in iterations)
    all_iterations = np.concatenate(iterations)
    exchange = float(np.median(np.concatenate(exchanges))) if timed else None
    sent = _sum(turn["sent"] for rank in ranks for turn in rank["turns"])
    received = _sum(turn["received"] for rank in ranks for turn in rank["turns"])
    payload = _sum(turn["payload"] for turn in ranks[0]["turns"])
    bound = float(np.mean([turn["bound"] for turn in ranks[0]["turns"]]))
    per_host = None if sent is None else sent / steps / len(ranks)
    times_sent = 1.0 if aggregated else 2 * (len(ranks) - 1) / len(ranks)  # times a payload's size that a host sends
    return {
        "iteration_s": [round(float(np.median(times)), 6) for times in iterations],
        "exchange_s": [round(float(np.median(times)), 6) for times in exchanges],
        "iteration_median_s": float(np.median(all_iterations)),
        "iteration_p10_s": float(np.quantile(all_iterations, 0.1)),
        "iteration_p90_s": float(np.quantile(all_iterations, 0.9)),
        "iteration_mean_s": float(all_iterations.mean()),
        "exchange_median_s": exchange,
        "aggregation_bytes_per_s": None if exchange is None else dense_bytes / exchange,
        "sent_bytes_per_step": per_host,
        "received_bytes_per_step": None if received is None else received / steps / len(ranks),
        "payload_bytes_per_step": None if payload is None else payload / steps,
        "bound_bytes": bound,
        "nonzero": float(np.mean([turn["nonzero"] for turn in ranks[0]["turns"]])),
        "payload_over_bound": None if payload is None else payload / steps / bound,
        "sent_over_bound": None if per_host is None else per_host / (times_sent * bound),
        "timed_steps": steps,
        "loss": [_finite(loss) for loss in _losses(ranks[0])],
        "statistics": ranks[0]["statistics"],
        "chosen": ranks[0]["chosen"],
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if any(v is None for v in known) else float(sum(v for v in known if v is not None))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(ways: Mapping[str, Any], name: str, what: str) -> dict[str, float | None]:
    """Time of `name` over dense's: geometric mean over rounds, each pair from one round."""
    return paired_ratio(ways[name][what], ways["dense"][what], resamples=RESAMPLES).to_dict()


def join(cells: Mapping[str, Any]) -> dict[str, Any]:
    """All timed cells together: `policies` has a list by pair for each way; in `ratios` all cells have equal weight."""
    if not cells:
        return {"pairs": [], "policies": {}, "ratios": {}, "a_a": None}
    names = [n for n in next(iter(cells.values()))["ways"] if all(n in cell["ways"] for cell in cells.values())]
    pairs = [[c, r] for c, cell in cells.items() for r in range(len(cell["ways"]["dense"]["iteration_s"]))]
    policies = {
        name: {key: [value for cell in cells.values() for value in cell["ways"][name][key]] for key in ("iteration_s",)}
        for name in names
    }
    each = {n: {c: cell["ways"][n]["iteration_s"] for c, cell in cells.items()} for n in names}
    ratios = {
        f"{n}/dense": paired_ratio(each[n], each["dense"], resamples=RESAMPLES).to_dict() for n in names if n != "dense"
    }
    own = ratios.get(f"{AGAIN}/dense")
    a_a = None
    if own is not None and own["median"] is not None:
        a_a = {**own, "limit": A_A_LIMIT, "within": bool(abs(own["median"] - 1) <= A_A_LIMIT)}
    return {"pairs": pairs, "policies": policies, "ratios": ratios, "a_a": a_a}


def judge(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Each goal with its values by cell, and whether all of them reach it; null if no cell has a value."""
    sparsest = {name: cell for name, cell in cells.items() if cell["job"] == SPARSEST}
    slowest = min((cell["rate_mbit_s"] for cell in sparsest.values()), default=None)
    there = {name: cell for name, cell in sparsest.items() if cell["rate_mbit_s"] == slowest}
    goals = {
        "aggregation": _goal("aggregation", {n: _best(cell, "exchange_ratios") for n, cell in there.items()}),
        "iteration": _goal("iteration", {n: _best(cell, "ratios") for n, cell in there.items()}),
        "compaction_bytes": _goal("compaction_bytes", _over_bound(cells, "compaction"), most=True),
        "lhc_bytes": _goal("lhc_bytes", _over_bound(cells, "lhc"), most=True),
        "auto_time": _goal("auto_time", _of_auto(cells), most=True),
    }
    goals["auto_best"] = _goal("auto_best", _medians(over_best, cells), most=True)
    own = (join(cells)["a_a"] or {}).get("high")  # the difference between dense and itself
    goals["gather_sparse"] = _goal(
        "gather_sparse", _medians(over_sparse, cells), most=True, scatter=max(own or 1.0, 1.0)
    )
    return goals


def _goal(name: str, found: Mapping[str, Any], *, most: bool = False, scatter: float = 1.0) -> dict[str, Any]:
    """The goal with `found` by cell: a number, or a mapping with "value". Values up to `scatter` times it also pass."""
    values = [v["value"] if isinstance(v, Mapping) else v for v in found.values()]
    goal = GOALS[name]
    reached = all(v <= goal * scatter if most else v >= goal for v in values) if values else None
    made = {"goal": goal, "at": "most" if most else "least", "found": dict(found), "reached": reached}
    return made if scatter == 1.0 else {**made, "scatter": scatter}


def _best(cell: Mapping[str, Any], ratios: str) -> dict[str, Any]:
    """How many times dense's speed the best of ours has."""
    mine = [name for name in cell["ways"] if name in OURS]
    best = min(mine, key=lambda name: cell[ratios][f"{name}/dense"]["median"])
    return {"way": best, "value": 1 / cell[ratios][f"{best}/dense"]["median"]}


def _over_bound(cells: Mapping[str, Any], way: str) -> dict[str, float]:
    return {
        name: cell["ways"][way]["payload_over_bound"]
        for name, cell in cells.items()
        if way in cell["ways"] and cell["ways"][way]["nonzero"] <= SPARSE
    }


def over_best(cell: Mapping[str, Any]) -> dict[str, Any] | None:
    """Auto's time over the best time of the ways that it can choose, with its interval and that way's name."""
    there = [way for way in ("dense", *CANDIDATES) if way in cell["ways"]]
    best = min(there, key=lambda way: cell["ways"][way]["iteration_median_s"])
    return {**_over(cell, "auto", best), "way": best} if "auto" in cell["ways"] else None


def over_sparse(cell: Mapping[str, Any]) -> dict[str, Any] | None:
    """The hook's time with sparse tensors over that of plain DDP, with its interval."""
    both = {"gather-sparse", "sparse"} <= cell["ways"].keys()
    return _over(cell, "gather-sparse", "sparse") if both else None


def _medians(of: Callable[[Mapping[str, Any]], dict[str, Any] | None], cells: Mapping[str, Any]) -> dict[str, float]:
    found = {name: of(cell) for name, cell in cells.items()}
    return {name: float(ratio["median"] or math.nan) for name, ratio in found.items() if ratio is not None}


def _over(cell: Mapping[str, Any], way: str, other: str) -> dict[str, Any]:
    mine, theirs = cell["ways"][way]["iteration_s"], cell["ways"][other]["iteration_s"]
    return paired_ratio(mine, theirs, resamples=RESAMPLES).to_dict()


def _of_auto(cells: Mapping[str, Any]) -> dict[str, float]:
    """Time over dense's."""
    return {name: cell["ratios"]["auto/dense"]["median"] for name, cell in cells.items() if "auto" in cell["ways"]}
