"""What the runs of ways of meeting say: times to the target on networks of several speeds, and who is first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamix.window import Floats
from dynamix_lab.statistics import geometric_mean
from dynamix_lab.suites.rounds.jobs import JOBS, WORKERS, RoundsJob, exchange_s, meeting_s, pass_s, speeds_of
from dynamix_lab.suites.rounds.rows import FIXED, RATIOS
from dynamix_lab.suites.rounds.train import JITTERS, shares_together

EVERY_STEP = f"together@{WORKERS}"
Cells = Sequence[Mapping[str, Any]]


def reached_at(loss: Floats, target: float) -> float | None:
    """The score, between two of them, at which a curve reached the target; None if it did not.

    Scores are smoothed by the median of three, so that one lucky score does not count.

    >>> reached_at(np.array([3.0, 2.0, 0.5, 1.9, 1.0, 0.9, 0.8]), 1.0)
    3.0
    """
    padded = np.concatenate([loss[:1], loss, loss[-1:]])
    smooth = np.median(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0)
    below = np.flatnonzero(smooth <= target)
    if not len(below):
        return None
    at = int(below[0])
    if not at or not np.isfinite(smooth[at - 1]):
        return float(at)
    return at - 1 + float((smooth[at - 1] - target) / (smooth[at - 1] - smooth[at]))


def samples_needed(run: Mapping[str, Any], job: RoundsJob) -> float:
    """Samples until the target; infinite where it was not reached."""
    at = reached_at(_losses(run), job.target)
    return math.inf if at is None else float(np.interp(at, np.arange(len(run["samples"])), run["samples"]))


def _or_none(samples: float) -> float | None:
    return round(samples) if math.isfinite(samples) else None


def _losses(run: Mapping[str, Any]) -> Floats:
    return np.array([math.inf if loss is None else loss for loss in run["loss"]])


def time_s(run: Mapping[str, Any], job: RoundsJob, exchange: float, jitter: int) -> tuple[float, bool]:
    """Seconds to the target where a meeting takes `exchange` seconds, and whether it was reached.

    A run that did not reach it counts with the time of all it trained.
    """
    whole = np.array(run["busy_s"])[:, jitter] + exchange * np.array(run["meetings"])
    at = reached_at(_losses(run), job.target)
    return (float(whole[-1]), False) if at is None else (float(np.interp(at, np.arange(len(whole)), whole)), True)


def together_s(run: Mapping[str, Any], job: RoundsJob, speeds: Floats, pieces: int) -> dict[str, Any]:
    """A run over gradients, at other speeds: its steps, each as long as the slowest worker's pass in the mean."""
    shares, random = shares_together(pieces * job.piece, speeds), np.random.default_rng(0)
    drawn = random.standard_normal((4000, WORKERS))
    step_s = [float((np.exp(sd * drawn - sd**2 / 2) * pass_s(shares, speeds)).max(1).mean()) for sd in JITTERS]
    return {**run, "busy_s": [[one * done for one in step_s] for done in run["meetings"]]}


def compared(cells: Cells) -> dict[str, Any]:
    """Every job at every spread of speeds, exchange and jitter: seconds by row, and what they are over the best fixed
    number of steps; with the means of these."""
    by_group: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for cell in cells:
        by_group.setdefault((cell["job"], cell["spread"]), {})[cell["row"]] = cell
    places = [
        place(job, spread, rows, {**by_group.get((job, 1.0), {}), **rows}, ratio, jitter)
        for (job, spread), rows in by_group.items()
        if all(str(steps) in rows for steps in FIXED) and all(f"rule@{ratio:g}" in rows for ratio in RATIOS)
        for ratio in RATIOS
        for jitter in range(len(JITTERS))
    ]
    rows = [
        {
            **{name: cell[name] for name in ("job", "spread", "row", "rate", "tried")},
            "samples": [_or_none(samples_needed(run, JOBS[cell["job"]])) for run in cell["runs"]],
        }
        for cell in cells
    ]
    return {"rows": rows, "places": places, "bends": [bend for cell in cells if (bend := bent(cell)) is not None]}


def place(
    name: str, spread: float, rows: Mapping[str, Any], known: Mapping[str, Any], ratio: float, jitter: int
) -> dict[str, Any]:
    """One place: geometric means over seeds."""
    job, speeds = JOBS[name], speeds_of(spread)
    found, arrived = dict[str, float](), dict[str, bool]()
    for row, cell in known.items():
        kind, _, value = row.partition("@")
        if (kind in ("rule", "guard", "product") and float(value) != ratio) or (row not in rows and kind != "together"):
            continue
        if kind == "product" and jitter:
            continue
        runs, exchange = cell["runs"], meeting_s(job, speeds, ratio)
        if kind == "together":
            runs = [together_s(run, job, speeds, int(value)) for run in runs]
            exchange = exchange_s(job, speeds, ratio)
        times = [time_s(run, job, exchange, jitter) for run in runs]
        key = kind if kind in ("rule", "guard", "product") else row
        found[key] = geometric_mean([seconds for seconds, _ in times])
        arrived[key] = all(there for _, there in times)
    if EVERY_STEP in found:  # one step, gradients: pieces as large as the others', and no moments travel
        found["1"], arrived["1"] = found[EVERY_STEP], arrived[EVERY_STEP]
    fixed = {row: seconds for row, seconds in found.items() if row.isdigit()}
    best = min(fixed, key=lambda row: fixed[row])
    groups = {"together": [s for row, s in found.items() if row.startswith("together")]}
    groups |= {kind: [s for row, s in found.items() if row.startswith(kind)] for kind in ("adacomm", "qsr")}
    over: dict[str, float] = {row: found[row] / fixed[best] for row in ("rule", "guard", "product") if row in found}
    over |= {kind: min(times) / fixed[best] for kind, times in groups.items() if times}
    return {
        "job": name, "spread": spread, "ratio": ratio, "jitter": JITTERS[jitter], "seconds": found, "arrived": arrived,
        "best": int(best), "over_best": over,
    }  # fmt: skip


def bent(cell: Mapping[str, Any]) -> dict[str, Any] | None:
    """u over the runs of a fixed number of steps, all measurements together; None of other rows."""
    if not cell["row"].isdigit():
        return None
    parts = np.array([part for run in cell["runs"] for part in run["bent"]]).sum(0)
    job = JOBS[cell["job"]]
    needed = [min(samples_needed(run, job), run["samples"][-1]) for run in cell["runs"]]
    u = 1.0 - parts[0] / parts[1] if parts[1] > 0 else None
    return {
        "job": cell["job"],
        "spread": cell["spread"],
        "steps": int(cell["row"]),
        "u": u,
        "samples": geometric_mean(needed),
    }
