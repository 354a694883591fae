"""What `dynamix bench scaling --cluster virtual` concludes from its runs, beside what the DYNAMIX paper reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamix_lab.harness.runs import CENSOR_FACTOR, is_learned
from dynamix_lab.report import (
    Page,
    Section,
    Table,
    measured,
    number,
    percent,
    provenance,
    with_interval,
)
from dynamix_lab.statistics import censored, paired_difference, paired_ratio, time_to_target

OURS = ("dynamix", "dynamix-paper")
GOAL_CUT, GOAL_FRACTION, GOAL_ACCURACY = 0.46, 0.95, -0.003
PATTERN_STEP = 1.05  # a third of a run counts as smaller than the one before if its batch is, by this factor
SMOOTHED = 3  # snapshots in an accuracy
# arXiv 2510.08522: (static accuracy, s; DYNAMIX accuracy, s); the cut is recomputed. Minutes for VGG-11.
PAPER: dict[str, str] = {
    "vgg16-sgd-8": "853 s to 652 s (-23.6 %), accuracy 85.3 % to 91.3 %",
    "vgg16-sgd-16": "543 s to 479 s (-11.8 %), accuracy 83.4 % to 91.5 %",
    "vgg16-sgd-32": "734 s to 421 s (-42.6 %), accuracy 81.3 % to 92.6 %",
    "vgg11-sgd-8": "190 min to 30 min at like accuracy (nodes not said)",
    "vgg11-adam-8": "80 min to 30 min, accuracy +6 points (nodes not said)",
}


def conclude(cells: Mapping[str, Any]) -> dict[str, Any]:
    """`cells` (conclusions by name), the claimed pattern over all runs, and `raw`: what they were concluded from."""
    found = {name: _cell(cell) for name, cell in cells.items()}
    patterns = {
        policy: [part["policies"][policy]["pattern"] for part in found.values() if policy in part["policies"]]
        for policy in OURS
    }
    shown = {policy: sum(map(sum, parts)) for policy, parts in patterns.items() if parts}
    of = {policy: sum(map(len, parts)) for policy, parts in patterns.items() if parts}
    pattern = {policy: {"runs": of[policy], "large_medium_small": shown[policy]} for policy in shown}
    return {"cells": found, "pattern": pattern, "raw": dict(cells)}


def _cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios, cuts, accuracies and trajectories of one case at one number of workers."""
    runs, target, seeds = cell["runs"], cell["target"], cell["seeds"]
    static = [time_to_target(r["time_s"], r["score"], target) for r in runs["static"]]
    kept = [i for i, t in enumerate(static) if t is not None]
    head = {name: cell[name] for name in ("target", "best_static", "sweep_s", "samples")}
    head |= {"sweep_cpu_s": round(cell["sweep_cpu_s"], 1), "seeds": [seeds[i] for i in kept]}
    if not kept:
        return {**head, "attainable_cut": None, "attained_by": None, "policies": {}}
    base = [float(t) for t in static if t is not None]
    policies = {
        name: _policy(name, [mine[i] for i in kept], [runs["static"][i] for i in kept], base, cell)
        for name, mine in runs.items()
    }
    rules = [name for name in policies if name != "static" and not is_learned(name)] or ["static"]
    by = min(rules, key=lambda name: policies[name]["over_static"]["median"])
    cut = 1 - policies[by]["over_static"]["median"]
    for name, part in policies.items():
        own = 1 - part["over_static"]["median"]
        part["cut"] = round(own, 4)
        part["fraction_of_cut"] = round(own / cut, 3) if cut > 0.02 else None
        part["goal_reached"] = bool(own >= min(GOAL_CUT, GOAL_FRACTION * max(cut, 0.0))) if name in OURS else None
    return {**head, "attainable_cut": round(cut, 4), "attained_by": by, "policies": policies}


def _policy(
    name: str,
    runs: Sequence[dict[str, Any]],
    static: Sequence[dict[str, Any]],
    base_s: Sequence[float],
    cell: Mapping[str, Any],
) -> dict[str, Any]:
    times = [time_to_target(r["time_s"], r["score"], cell["target"]) for r in runs]
    bound = [CENSOR_FACTOR * t for t in base_s]
    samples = [_accuracy(r, "samples", cell["samples"]) for r in runs]
    at_time = [_accuracy(r, "time_s", t) for r, t in zip(runs, base_s, strict=True)]
    base_samples = [_accuracy(r, "samples", cell["samples"]) for r in static]
    base_time = [_accuracy(r, "time_s", t) for r, t in zip(static, base_s, strict=True)]
    return {
        "time_to_target_s": [None if t is None else round(t, 2) for t in times],
        "over_static": paired_ratio(censored(times, bound).tolist(), list(base_s)).to_dict(),
        "accuracy_at_equal_samples": [round(a, 4) for a in samples],
        "gain_at_equal_samples": _points(samples, base_samples),
        "accuracy_at_equal_time": [round(a, 4) for a in at_time],
        "gain_at_equal_time": _points(at_time, base_time),
        "mean_batch_by_third": [[round(b, 1) for b in thirds(r["global_batch"])] for r in runs],
        "pattern": [large_medium_small(r["global_batch"]) for r in runs],
        "wait_fraction": [r["wait_fraction"] for r in runs],
        "step_s": [r["step_s"] for r in runs],
        "cpu_s": [r["cpu_s"] for r in runs],
    }


def _points(mine: Sequence[float], others: Sequence[float]) -> dict[str, float | None]:
    """`paired_difference` with four digits."""
    found = paired_difference(mine, others).to_dict()
    return {name: None if value is None else round(value, 4) for name, value in found.items()}


def _accuracy(run: Mapping[str, Any], axis: str, at: float) -> float:
    """Mean of the last few scores up to a number of samples or seconds; a run that ended before counts as it ended."""
    known = [s for x, s in zip(run[axis], run["score"], strict=True) if x <= at * (1 + 1e-9)] or run["score"][:1]
    return float(np.mean(known[-SMOOTHED:]))


def thirds(batch: Sequence[float]) -> list[float]:
    """Geometric mean of the global batch in the first, second and last third of the samples."""
    return [float(np.exp(np.log(part).mean())) for part in np.array_split(np.asarray(batch, dtype=np.float64), 3)]


def large_medium_small(batch: Sequence[float]) -> bool:
    """The pattern that the DYNAMIX paper says was learned: large batches first, then medium ones, then small ones.

    >>> large_medium_small([512, 512, 256, 256, 128, 128]), large_medium_small([128, 128, 256, 256, 512, 512])
    (True, False)
    """
    first, second, last = thirds(batch)
    return first > PATTERN_STEP * second and second > PATTERN_STEP * last


def page(result: Mapping[str, Any]) -> str:
    """report.html: the same tables."""
    lead = ["Real training on the virtual clock: only seconds are simulated.", provenance(result)]
    return Page(str(result["command"]), sections(result), lead=lead, details=measured(result)).html()


def sections(result: Mapping[str, Any]) -> list[Section]:
    """The tables: time with the attainable cut and the paper's figure, accuracy, and the batches of a run."""
    cells, pattern = result["cells"], result["pattern"]
    never = [
        f"{cell}: best static never reached the target {part['target']:.3f}."
        for cell, part in cells.items()
        if not part["policies"]
    ]
    shown = [
        f"{name}: large, then medium, then small in {part['large_medium_small']} of {part['runs']} runs."
        for name, part in pattern.items()
    ]
    return [
        Section("Time to the target", table=_times(cells), notes=never),
        Section("Accuracy", table=_accuracies(cells)),
        Section("Global batch in the thirds of a run, seed by seed", table=_batches(cells), notes=shown),
    ]


def _rows(cells: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], str, Mapping[str, Any]]]:
    return [
        (cell, part, name, mine)
        for cell, part in cells.items()
        for name, mine in part["policies"].items()
        if name != "static"
    ]


def _times(cells: Mapping[str, Any]) -> Table:
    head = ["cell", "target", "best static", "attainable cut (by)", "policy", "time / best static's", "cut"]
    rows = [
        [
            cell,
            f"{part['target']:.3f}",
            str(part["best_static"]),
            f"{percent(part['attainable_cut'])} ({part['attained_by']})",
            name,
            with_interval(mine["over_static"]),
            percent(mine["cut"]),
            number(mine["fraction_of_cut"], 2),
            PAPER.get(cell, "") if name in OURS else "",
        ]
        for cell, part, name, mine in _rows(cells)
    ]
    return Table([*head, "of the attainable", "the paper"], rows)


def _accuracies(cells: Mapping[str, Any]) -> Table:
    head = ["cell", "policy", "accuracy at equal samples", "gain on best static, points", "accuracy at static's time"]
    rows = [
        [
            cell,
            name,
            f"{np.mean(mine['accuracy_at_equal_samples']):.4f}",
            _gain(mine["gain_at_equal_samples"]),
            f"{np.mean(mine['accuracy_at_equal_time']):.4f}",
            _gain(mine["gain_at_equal_time"]),
            percent(float(np.mean(mine["wait_fraction"]))),
        ]
        for cell, _, name, mine in _rows(cells)
    ]
    return Table([*head, "gain on best static, points", "waiting"], rows)


def _batches(cells: Mapping[str, Any]) -> Table:
    rows = [
        [
            cell,
            name,
            "; ".join(" ".join(f"{b:.0f}" for b in one) for one in mine["mean_batch_by_third"]),
            f"{sum(mine['pattern'])} of {len(mine['pattern'])}",
        ]
        for cell, _, name, mine in _rows(cells)
    ]
    return Table(["cell", "policy", "global batch", "large, then medium, then small"], rows)


def _gain(gain: Mapping[str, float | None]) -> str:
    """In points."""
    said = f"{100 * (gain['mean'] or 0.0):+.1f}"
    if gain["low"] is None or gain["high"] is None:
        return said
    return f"{said} ({100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})"
