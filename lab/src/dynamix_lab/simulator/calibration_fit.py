"""Makes `calibration.json` from public measurements: `dynamix bench calibration FOLDER OUT.json`.

FOLDER holds the files named in `SOURCES` (not shipped). The fit writes coefficients, their errors, and errors on
held-out points.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.window import Floats
from dynamix_lab.simulator.calibration import GRID, MIN_R2

KNOTS = 9
QUANTILES = 21
SOURCES = {
    "fits/affine_step_time.csv": "step times of the Sia artifact (siasosp23/artifacts aaf7a0d), fitted",
    "fits/nonaffine_step_time.csv": "the same tables, where an affine fit has R2 < 0.9",
    "fits/noise_scale_curves.csv": "Pollux artifact (petuum/adaptdl, osdi21-artifact c793c70)",
    "gavel/simulation_throughputs.json": "stanford-futuredata/gavel c4fa4009, MIT",
    "jabas/resnet50_comp_profile.csv": "unist-ssl/JABAS b15fd5e1, MIT",
    "pai/job_*_norm.csv": "alibaba/clusterdata 7a6c496e, cluster-trace-gpu-v2020, CC-BY-4.0",
}
# Steps to the target against the batch with a constant learning rate, measured on mnist1d (docs/design/simulator.md).
STEP_COUNT_RATIO = {"value": 0.43, "source": "dynamix bench stepcount, seeds 9001 and 9002"}
# Spread between workers of 100 PAI jobs: coefficient of variation of mini-batch times, median and 90th percentile.
PAI_SPREAD = {"median": 0.087, "p90": 0.97}


def fit_all(folder: Path) -> dict[str, Any]:
    """The content of calibration.json."""
    affine = [_affine_row(row) for row in _rows(folder / "fits/affine_step_time.csv")]
    held_out = {"jabas": _held_out(_jabas(folder)), "gavel": _held_out(_gavel_alone(folder))}
    return {
        "sources": SOURCES,
        "affine": affine,
        "noise": _noise(folder),
        "curves": _curves(folder, affine),
        "colocation": _colocation(folder),
        "processes": _processes(folder),
        "step_count_ratio": STEP_COUNT_RATIO,
        "held_out": held_out,
    }


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _affine_row(row: dict[str, str]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "gpu": row["gpu"],
        "alpha_s": float(row["alpha_ms"]) / 1e3,
        "beta_s": float(row["beta_ms_per_sample"]) / 1e3,
        "r2": float(row["r2"]),
        "batch_min": int(row["batch_min"]),
        "batch_max": int(row["batch_max"]),
    }


def _curves(folder: Path, affine: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tables with R2 < 0.9 as factors on their affine fit, interpolated in log batch, and constant outside the data."""
    tables: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in _rows(folder / "fits/nonaffine_step_time.csv"):
        seconds = float(row["relative_step_time"]) * float(row["smallest_batch_ms"]) / 1e3
        tables[row["model"], row["gpu"]].append((float(row["batch"]), seconds))
    fits = {(fit["model"], fit["gpu"]): fit for fit in affine if fit["r2"] < MIN_R2}
    curves = []
    for (model, gpu), points in sorted(tables.items()):
        if (model, gpu) not in fits:
            continue
        fit, (batch, seconds) = fits[model, gpu], np.array(sorted(points)).T
        factor = seconds / (fit["alpha_s"] + fit["beta_s"] * batch)
        on_grid = np.interp(GRID, np.log2(batch), factor)
        curves.append({"model": model, "gpu": gpu, "factors": [round(float(f), 4) for f in on_grid]})
    return curves


def _noise(folder: Path) -> list[dict[str, Any]]:
    """log phi = f(progress) + rho log(B/B0): least squares with hat functions at KNOTS; bert and ncf are dropped."""
    series: dict[tuple[str, int], list[tuple[float, float, float, float]]] = defaultdict(list)
    for row in _rows(folder / "fits/noise_scale_curves.csv"):
        phi = float(row["noise_scale_samples"])
        if phi > 0 and row["model"] not in ("bert", "ncf"):
            steps, run = float(row["progress_base_steps"]), float(row["run_batch"])
            series[row["model"], int(row["base_batch"])].append((float(row["progress_fraction"]), run, phi, steps))
    fitted = []
    for (model, base), points in sorted(series.items()):
        progress, run, phi, steps = np.array(points).T
        at = np.linspace(0, 1, KNOTS)
        hats = np.maximum(0, 1 - np.abs(progress[:, None] - at) * (KNOTS - 1))
        design = np.column_stack([hats, np.log(run / base)])
        smooth = 0.3 * np.diff(np.eye(KNOTS + 1)[:KNOTS], 2, axis=0)  # keeps knots without points near their neighbours
        target = np.concatenate([np.log(phi), np.zeros(len(smooth))])
        solution, *_ = np.linalg.lstsq(np.concatenate([design, smooth]), target, rcond=None)
        residual = np.log(phi) - design @ solution
        fitted.append(
            {
                "model": model,
                "base_batch": base,
                "knots": [round(float(v), 4) for v in solution[:-1]],
                "rho": round(float(solution[-1]), 4),
                "residual": round(float(residual.std()), 4),
                "samples": round(float(steps.max()) * base),
            }
        )
    return fitted


# ---------------------------------------------------------------- held-out errors

Points = dict[str, list[tuple[float, float]]]  # job and GPU -> (batch, seconds)


def _jabas(folder: Path) -> Points:
    points: Points = defaultdict(list)
    for row in _rows(folder / "jabas/resnet50_comp_profile.csv"):
        if row["num_models"] == "1":
            points[f"{row['model']}, {row['gpu_type']}"].append((float(row["lbs"]), float(row["total_time"]) / 1e3))
    return points


def _gavel(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    raw = (folder / "gavel/simulation_throughputs.json").read_text(encoding="utf-8")
    return {gpu: table for gpu, table in json.loads(raw).items() if "unconsolidated" not in gpu}


def _job(key: str) -> tuple[str, int, int]:
    """("ResNet-18", 16, 1) from "('ResNet-18 (batch size 16)', 1)"; batch 0 if none is named."""
    name, gpus = ast.literal_eval(key)
    found = re.match(r"(.*) \(batch size (\d+)\)$", name)
    return (found[1], int(found[2]), gpus) if found else (name, 0, gpus)


def _gavel_alone(folder: Path) -> Points:
    points: Points = defaultdict(list)
    for gpu, table in _gavel(folder).items():
        for key, others in table.items():
            model, batch, gpus = _job(key)
            if batch and gpus == 1 and others["null"] > 0:
                points[f"{model}, {gpu}"].append((float(batch), 1.0 / others["null"]))
    return points


def _held_out(points: Points) -> dict[str, Any]:
    """Predicts each batch size from an affine fit to the job's other sizes; relative errors.

    `inside`: sizes between others, which is how the simulator uses a fit. `ends`: the smallest and the largest, to
    which the fit must extrapolate, mostly by a factor of two.
    """
    inside, ends, by_job = [], [], {}
    for job, pairs in sorted(points.items()):
        batch, seconds = np.array(sorted(pairs)).T
        if len(batch) < 4:
            continue
        errors = [_error_without(batch, seconds, i) for i in range(len(batch))]
        inside += errors[1:-1]
        ends += [errors[0], errors[-1]]
        by_job[job] = {"inside": round(float(np.mean(errors[1:-1])), 4), "r2": round(_r2(batch, seconds), 4)}
    return {"inside": _spread(inside), "ends": _spread(ends), "jobs": len(by_job), "by_job": by_job}


def _spread(errors: list[float]) -> dict[str, float]:
    mean, median, p90 = np.mean(errors), np.median(errors), np.quantile(errors, 0.9)
    named = {"mean_absolute": mean, "median": median, "p90": p90}
    return {name: round(float(value), 4) for name, value in named.items()} | {"points": len(errors)}


def _error_without(batch: Floats, seconds: Floats, i: int) -> float:
    kept = np.arange(len(batch)) != i
    design = np.column_stack([np.ones(kept.sum()), batch[kept]]) / seconds[kept, None]  # relative errors, as scored
    alpha, beta = np.linalg.lstsq(design, np.ones(kept.sum()), rcond=None)[0]
    return float(abs(alpha + beta * batch[i] - seconds[i]) / seconds[i])


def _r2(batch: Floats, seconds: Floats) -> float:
    slope, offset = np.polyfit(batch, seconds, 1)
    return float(1 - np.var(seconds - offset - slope * batch) / np.var(seconds))


# ---------------------------------------------------------------- disturbances


def _colocation(folder: Path) -> dict[str, list[float]]:
    """Quantiles of alone/together throughput of jobs that share a GPU while both run."""
    found = {}
    for gpu, table in sorted(_gavel(folder).items()):
        slowdowns = []
        for key, others in table.items():
            if _job(key)[2] != 1 or others["null"] <= 0:
                continue
            pairs = [pair[0] for name, pair in others.items() if name != "null" and min(pair) > 0]
            slowdowns += [others["null"] / together for together in pairs]
        quantiles = np.quantile(np.maximum(slowdowns, 1.0), np.linspace(0, 1, QUANTILES))
        found[gpu] = [round(float(q), 3) for q in quantiles]
    return found


def _processes(folder: Path) -> dict[str, dict[str, float]]:
    """The three PAI jobs: spread between workers, jitter within them, and episodes far above the job's median."""
    names = {2: "steady-uneven", 1: "late-straggler", 3: "several-stragglers"}
    found = {}
    for job, name in names.items():
        times, per_worker = _pai(folder / f"pai/job_{job}_norm.csv")
        log = np.log(per_worker)  # (slots, W)
        common = np.median(log, 1, keepdims=True)
        relative = log - common
        level = np.median(relative, 0)
        inside = relative - level
        slow = _smoothed(inside) > math.log(1.08)
        memory = float(np.sum(inside[1:] * inside[:-1]) / np.sum(inside[:-1] ** 2))
        quiet = inside[~slow]
        lengths = _episodes(slow, float(np.median(np.diff(times))))
        found[name] = {
            "workers": float(per_worker.shape[1]),
            "spread": round(float(level.std()), 4),
            "jitter": round(float(quiet.std()), 4),
            "memory": round(memory, 3),
            "slow_workers": float(slow.any(0).sum()),
            "slow_share": round(float(slow.mean()), 4),
            "slow_factor": round(float(np.exp(inside[slow].mean())), 3) if slow.any() else 1.0,
            "slow_mean_s": round(float(np.mean(lengths)), 1) if lengths else 0.0,
            "duration_s": float(times[-1]),
        }
    return found | {"spread-of-100-jobs": PAI_SPREAD}


def _pai(path: Path) -> tuple[Floats, Floats]:
    """(slots,) times and (slots, W) mini-batch times of the workers; gaps are interpolated."""
    workers: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in _rows(path):
        workers[int(row["worker"])].append((float(row["time"]), float(row["batch_time_norm"])))
    series = [np.array(sorted(points)).T for _, points in sorted(workers.items())]
    times = min((s[0] for s in series), key=len)
    return times, np.column_stack([np.interp(times, *s) for s in series])


def _smoothed(values: Floats, width: int = 9) -> Floats:
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(values, ((width // 2,) * 2, (0, 0)), "edge"), width, 0)
    return np.asarray(np.median(windows, -1))


def _episodes(slow: np.ndarray[Any, Any], slot_s: float) -> list[float]:
    lengths = []
    for column in slow.T:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], column.astype(int), [0]])))
        lengths += [slot_s * float(b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return lengths


def write_calibration(folder: Path, out: Path) -> dict[str, Any]:
    """Write `out` and return its content. Raises `ConfigError` if a file is missing or `out` cannot be written."""
    try:
        fitted = fit_all(folder)
        out.write_text(json.dumps(fitted, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        allowed = f"a folder with {', '.join(SOURCES)}, and a file that can be written"
        raise ConfigError("sources, file", (str(folder), str(out)), allowed, str(error)) from error
    return fitted


def lines(held_out: Mapping[str, Any]) -> list[str]:
    """The errors on held-out points, as text."""
    return [
        "{}: {} {mean_absolute:.1%} mean, {p90:.1%} p90, {points} points".format(source, place, **part[place])
        for source, part in held_out.items()
        for place in ("inside", "ends")
    ]
