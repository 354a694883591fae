"""What `dynamix bench scaling --cluster virtual` concludes from its runs, beside what the DYNAMIX paper reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamix_lab.harness.runs import CENSOR_FACTOR, is_learned
from dynamix_lab.statistics import censored, paired_ratio, time_to_target

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
# Student's t for a 95 % interval, by degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def conclude(cells: Mapping[str, Any]) -> dict[str, Any]:
    """`cells` (conclusions by name), the claimed pattern over all runs, and the table as Markdown."""
    found = {name: _cell(cell) for name, cell in cells.items()}
    patterns = {
        policy: [part["policies"][policy]["pattern"] for part in found.values() if policy in part["policies"]]
        for policy in OURS
    }
    shown = {policy: sum(map(sum, parts)) for policy, parts in patterns.items() if parts}
    of = {policy: sum(map(len, parts)) for policy, parts in patterns.items() if parts}
    pattern = {policy: {"runs": of[policy], "large_medium_small": shown[policy]} for policy in shown}
    return {"cells": found, "pattern": pattern, "raw": dict(cells), "table": markdown(found, pattern)}


def _cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios, cuts, accuracies and trajectories of one case at one number of workers."""
    runs, target, seeds = cell["runs"], cell["target"], cell["seeds"]
    static = [time_to_target(r["time_s"], r["score"], target) for r in runs["static"]]
    kept = [i for i, t in enumerate(static) if t is not None]
    head = {"target": target, "best_static": cell["best_static"], "sweep_s": cell["sweep_s"], "samples": cell["samples"],
            "sweep_cpu_s": round(cell["sweep_cpu_s"], 1), "seeds": [seeds[i] for i in kept]}  # fmt: skip
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
        "gain_at_equal_samples": difference(samples, base_samples),
        "accuracy_at_equal_time": [round(a, 4) for a in at_time],
        "gain_at_equal_time": difference(at_time, base_time),
        "mean_batch_by_third": [[round(b, 1) for b in thirds(r["global_batch"])] for r in runs],
        "pattern": [large_medium_small(r["global_batch"]) for r in runs],
        "wait_fraction": [r["wait_fraction"] for r in runs],
        "step_s": [r["step_s"] for r in runs],
        "cpu_s": [r["cpu_s"] for r in runs],
    }


def _accuracy(run: Mapping[str, Any], axis: str, at: float) -> float:
    """Mean of the last few scores up to a number of samples or seconds; a run that ended before counts as it ended."""
    known = [s for x, s in zip(run[axis], run["score"], strict=True) if x <= at * (1 + 1e-9)] or run["score"][:1]
    return float(np.mean(known[-SMOOTHED:]))


def difference(mine: Sequence[float], others: Sequence[float]) -> dict[str, float | None]:
    """Mean of paired differences with a 95 % interval by Student's t; None for a single pair.

    >>> difference([0.92, 0.94], [0.91, 0.91])
    {'mean': 0.02, 'low': -0.1071, 'high': 0.1471}
    """
    gaps = np.asarray(mine) - np.asarray(others)
    mean, count = float(gaps.mean()), len(gaps)
    if count < 2:
        return {"mean": round(mean, 4), "low": None, "high": None}
    half = _T[min(count - 2, len(_T) - 1)] * float(gaps.std(ddof=1)) / math.sqrt(count)
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4)}


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


def markdown(cells: Mapping[str, Any], pattern: Mapping[str, Any]) -> str:
    """A table for time, one for accuracy, one for batches, each with the attainable cut or the paper's figure first."""
    lines = [
        "| cell | target | best static | attainable cut (by) | policy | time / best static's | cut | of the attainable | the paper |"
    ]
    lines.append("|---" * 9 + "|")
    rows = [
        (cell, part, name, mine)
        for cell, part in cells.items()
        for name, mine in part["policies"].items()
        if name != "static"
    ]
    for cell, part, name, mine in rows:
        over = mine["over_static"]
        spread = "" if over["low"] is None else f" ({over['low']:.3f}-{over['high']:.3f})"
        fraction = "-" if mine["fraction_of_cut"] is None else f"{mine['fraction_of_cut']:.2f}"
        lines.append(
            f"| {cell} | {part['target']:.3f} | {part['best_static']} | {100 * part['attainable_cut']:.0f} % ({part['attained_by']}) | {name} | "
            f"{over['median']:.3f}{spread} | {100 * mine['cut']:.0f} % | {fraction} | {PAPER.get(cell, '') if name in OURS else ''} |"
        )
    lines += [
        f"\n{cell}: best static never reached the target {part['target']:.3f}"
        for cell, part in cells.items()
        if not part["policies"]
    ]
    lines += [
        "",
        "| cell | policy | accuracy at equal samples | gain on best static | accuracy at static's time | gain on best static | waiting |",
    ]
    lines.append("|---" * 7 + "|")
    for cell, _, name, mine in rows:
        means = [f"{np.mean(mine[key]):.4f}" for key in ("accuracy_at_equal_samples", "accuracy_at_equal_time")]
        gains = [_gain(mine[key]) for key in ("gain_at_equal_samples", "gain_at_equal_time")]
        waiting = f"{100 * np.mean(mine['wait_fraction']):.0f} %"
        lines.append(f"| {cell} | {name} | {means[0]} | {gains[0]} | {means[1]} | {gains[1]} | {waiting} |")
    lines += [
        "",
        "| cell | policy | global batch in the thirds of a run, seed by seed | large, then medium, then small |",
        "|---" * 4 + "|",
    ]
    for cell, _, name, mine in rows:
        batches = "; ".join(" ".join(f"{b:.0f}" for b in one) for one in mine["mean_batch_by_third"])
        lines.append(f"| {cell} | {name} | {batches} | {sum(mine['pattern'])} of {len(mine['pattern'])} |")
    for name, part in pattern.items():
        lines.append(f"\n{name}: large, then medium, then small in {part['large_medium_small']} of {part['runs']} runs")
    return "\n".join(lines) + "\n"


def _gain(gain: Mapping[str, float | None]) -> str:
    """In points."""
    said = f"{100 * (gain['mean'] or 0.0):+.1f}"
    return (
        said
        if gain["low"] is None or gain["high"] is None
        else f"{said} ({100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})"
    )
