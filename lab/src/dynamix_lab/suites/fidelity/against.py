"""The simulator against the emulator: the same scenarios and policies predicted, from costs of its runs that hold the
global batch.

`dynamix bench fidelity --against RUN` reads a finished `bench tta` folder; `--predict` asks about policies that it did
not run. Costs of computing and of the exchange, jitter and the noise scale are fitted to the windows of runs
that hold the global batch (`live_costs`); whoever chooses it is predicted from the scenarios' files (`predicted`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix_lab.harness.launch import LaunchSettings
from dynamix_lab.harness.reference import references
from dynamix_lab.harness.runs import AGAIN
from dynamix_lab.suites.fidelity.live_costs import LiveCosts, fit_costs
from dynamix_lab.suites.fidelity.predicted import Predicted, PredictedRun, predict_all
from dynamix_lab.suites.fidelity.scenario_env import LONGEST_S

Tell = Callable[[str, float], None]


def silent(what: str, done: float) -> None:
    """Tell nobody."""


def compare(folder: Path, *, calibrate_on: str = "all", trained: bool = False, tell: Tell = silent) -> dict[str, Any]:
    """Measured and predicted step times and times to the target of every scenario of a `bench tta` folder.

    calibrate_on   scenarios, comma-separated, whose runs costs are fitted to; "all"
    trained        predict by the training itself (`predicted.train`), not by a model of it
    """
    result, costs = _fitted(folder, calibrate_on)
    tie = indistinct((result.get("a_a") or {}).get("each", []), pairs=len(result["seeds"]))
    arrived = {
        name: [
            policy
            for policy, runs in part["policies"].items()
            if policy != AGAIN and None not in runs["time_to_target_s"]
        ]
        for name, part in result["scenarios"].items()
    }
    jobs = [
        PredictedRun(name, policy, seed)
        for name, policies in arrived.items()
        for policy in policies
        for seed in result["scenarios"][name]["seeds"]
    ]
    predicted = predict_all(jobs, costs, trained=trained, tell=tell)
    out = {
        name: _compare_one(part, arrived[name], {job: p for job, p in predicted.items() if job.scenario == name}, tie)
        for name, part in result["scenarios"].items()
    }
    return {
        "calibrated_on": calibrate_on,
        "trained": trained,
        "costs": asdict(costs),
        "tie": tie,
        "scenarios": out,
        "same_ranking": sum(part["same_ranking"] for part in out.values()),
        "worst_step_error": max(p["step_error"] for part in out.values() for p in part["policies"].values()),
    }


def forecast(
    folder: Path,
    policies: Sequence[str],
    *,
    seeds: int = 6,
    seed: int = 1000,
    calibrate_on: str = "all",
    trained: bool = False,
    tell: Tell = silent,
) -> dict[str, Any]:
    """Times to the target (s) that any policies would take on the scenarios of a `bench tta` folder, with its costs.

    For seeds (of disturbances, and of data and weights where `trained`) `seed`, `seed + 1`, ...; `ratio` is the
    geometric mean of times over those of the first policy. `late` counts runs that had not arrived after `LONGEST_S`,
    and are taken as so long.
    """
    if seeds < 1:
        raise ConfigError("seeds", seeds, "1 or more", "check the argument")
    for name in policies:
        make_policy(name, others=references(LaunchSettings().scenario))  # raises for an unknown one
    result, costs = _fitted(folder, calibrate_on)
    every = range(seed, seed + seeds)
    jobs = [PredictedRun(name, policy, s) for name in result["scenarios"] for policy in policies for s in every]
    predicted = predict_all(jobs, costs, trained=trained, tell=tell)
    out: dict[str, dict[str, Any]] = {}
    for name in result["scenarios"]:
        times = {
            policy: np.array([predicted[PredictedRun(name, policy, s)].time_to_target_s for s in every])
            for policy in policies
        }
        logs = {policy: np.log(t / times[policies[0]]) for policy, t in times.items()}
        out[name] = {
            policy: {
                "time_to_target_s": float(times[policy].mean()),
                "ratio": float(np.exp(log.mean())),
                "error": float(log.std(ddof=1) / np.sqrt(seeds)) if seeds > 1 else None,
                "late": int((times[policy] >= LONGEST_S).sum()),
                "steps": float(np.mean([predicted[PredictedRun(name, policy, s)].steps for s in every])),
            }
            for policy, log in logs.items()
        }
    over_all = {
        policy: float(np.exp(np.mean([np.log(part[policy]["ratio"]) for part in out.values()]))) for policy in policies
    }
    return {
        "calibrated_on": calibrate_on,
        "trained": trained,
        "seeds": [seed, seed + seeds - 1],
        "scenarios": out,
        "ratio": over_all,
    }


def _fitted(folder: Path, calibrate_on: str) -> tuple[dict[str, Any], LiveCosts]:
    """result.json of a finished run, and the costs that its scenarios `calibrate_on` tell."""
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        scenarios = result["scenarios"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("against", str(folder), "the folder of a finished `dynamix bench tta`", str(error)) from error
    names = list(scenarios) if calibrate_on == "all" else calibrate_on.split(",")
    unknown = [name for name in names if name not in scenarios]
    if unknown:
        raise ConfigError("calibrate_on", unknown[0], f"all, {', '.join(scenarios)}", "name the run's scenarios")
    return result, fit_costs(folder, {name: scenarios[name] for name in names})


def indistinct(each: Sequence[float], *, pairs: int) -> float:
    """How far apart (relative) two policies' times over `pairs` pairs may be by the machine alone: the half width of a
    95 % interval by Student's t.

    each   static against itself, one ratio per pair of all scenarios: their spread is that of any ratio of two runs

    >>> round(indistinct([1.1, 1 / 1.1, 1.1, 1 / 1.1], pairs=4), 2)
    0.14
    """
    if not each:
        return 0.05
    spread = float(np.sqrt(np.mean(np.square(np.log(each)))))
    return float(max(np.expm1(stats.t.ppf(0.975, len(each)) * spread / np.sqrt(pairs)), 0.02))


def _compare_one(
    part: dict[str, Any], arrived: Sequence[str], predicted: Mapping[PredictedRun, Predicted], tie: float
) -> dict[str, Any]:
    policies: dict[str, dict[str, float]] = {}
    for name in arrived:
        runs, mine = part["policies"][name], [p for job, p in predicted.items() if job.policy == name]
        step = float(np.mean([t / n for t, n in zip(runs["time_s"], runs["steps"], strict=True)]))
        predicted_step = float(np.mean([p.step_s for p in mine]))
        policies[name] = {
            "step_s": step,
            "predicted_step_s": predicted_step,
            "step_error": abs(predicted_step / step - 1),
            "time_to_target_s": float(np.mean(runs["time_to_target_s"])),
            "predicted_time_to_target_s": float(np.mean([p.time_to_target_s for p in mine])),
            "steps": float(np.mean(runs["steps"])),
            "predicted_steps": float(np.mean([p.steps for p in mine])),
        }
    return {"policies": policies, "same_ranking": same_ranking(policies, tie)}


def same_ranking(policies: dict[str, dict[str, float]], tie: float) -> bool:
    """Whether every two policies whose measured times differ by more than `tie` (relative) are predicted in that
    order.
    """
    names = list(policies)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            measured = np.log(policies[a]["time_to_target_s"] / policies[b]["time_to_target_s"])
            predicted = np.log(policies[a]["predicted_time_to_target_s"] / policies[b]["predicted_time_to_target_s"])
            if abs(measured) > np.log1p(tie) and measured * predicted < 0:
                return False
    return True
