"""The simulator against the emulator: the same scenarios and policies predicted, from costs of static runs alone.

`dynamix bench fidelity --against RUN` reads a finished `bench tta` folder; `--predict` asks about policies that it did
not run. Costs of computing and of the exchange, jitter and the noise scale are fitted to the windows of static runs (`live_costs`); every other policy is predicted from the
scenarios' files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.arguments import watched
from dynamix.bench.launch import Settings, disturbance_seed
from dynamix.bench.live_costs import UNIT_BATCH, LiveCosts, fit_costs, moved_mbit, slowest_link
from dynamix.bench.reference import Reference, reference_total
from dynamix.bench.runs import AGAIN
from dynamix.emulator import Scenario, host_speeds, load_scenario
from dynamix.errors import ConfigError
from dynamix.policies import Policy, make_policy
from dynamix.policies.additive import AdditivePolicy
from dynamix.policies.base import boundary, part_of
from dynamix.policies.goodput import Goodput
from dynamix.policies.learned import LearnedPolicy
from dynamix.simulator import ClusterEnv, Clusters, Trace
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix.workloads import make_workload

EPOCH_SAMPLES = 24_000
TICK_S = 0.1
LONGEST_S = 1200.0
# Core-s of a decision, which rank 0 pays in its share: `dynamix bench overhead --decision-only --workers 4` of `goodput`
# and `dynamix`. The policies without a model of the job decide in less than half a millisecond.
RULE_S, LEARNED_S = 0.0027, 0.0058
NEW_SIZE_S = 0.008  # core-s, `python -m dynamix.bench.changecost`: 24.8 ms for the first step at a size, 16.7 when it comes again


class ScenarioEnv(ClusterEnv):
    """One simulated cluster on a scenario's hosts: the slowest link decides the bytes of an exchange; the rest of it is work
    that every host does on its own share of a core once it has computed, so it counts as far as that host ends last; and
    so do decisions, of `decision_s` core-s each, on the first, in the step that no window measures.

    Loss and latency are not modelled.
    """

    def __init__(self, scenario: Scenario, disturbed_by: int, costs: LiveCosts, clusters: Clusters, **how: Any) -> None:
        self.decision_s = 0.0
        self._decided = False
        self._scenario, self._seed, self._live = scenario, disturbed_by, costs
        self._moved = moved_mbit(scenario.workers)
        super().__init__(clusters, seed=disturbed_by, **how)
        workload = make_workload(Settings().workload)
        self.bounds = Bounds.of(clusters.shape[1], np.full(clusters.shape, workload.min_batch), workload.max_batch)

    def reset(self) -> Window:
        self._met: set[tuple[int, int]] = set()
        return super().reset()

    def step(self, sizes: Ints) -> Window:
        self._decided = True
        return super().step(sizes)

    def advance(self) -> tuple[Floats, Floats]:
        """One step; a worker's first at a size never met before prepares kernels, on its own share of a core too."""
        fresh = np.array([(i, size) not in self._met for i, size in enumerate(self.batch[0].tolist())])
        self._met |= set(enumerate(self.batch[0].tolist()))
        speeds = np.array(host_speeds(self._scenario, float(self.clock_s[0]), self._seed))
        busy, whole = super().advance()
        own = self._live.exchange_per_speed + NEW_SIZE_S * fresh
        if self._decided:
            own[0] += self.decision_s
            self._decided = False
        own = own / speeds
        late = float((busy[0] + own).max() - busy[0].max())
        self.clock_s = self.clock_s + late
        return busy, whole + late

    def exchange(self) -> Floats:
        bytes_s = self._moved / slowest_link(self._scenario, float(self.clock_s[0]), self._seed)
        return np.array([self._live.exchange_s + bytes_s])


def predict(scenario: Scenario, policy: str, seed: int, costs: LiveCosts) -> dict[str, float]:
    """Step time and time to the target of one run, s; a run that would take longer than `LONGEST_S` ends there."""
    settings = Settings()
    workers, cores = scenario.workers, np.array([host.cpu for host in scenario.hosts])
    ticks = np.arange(0.0, LONGEST_S, TICK_S)
    seeded = disturbance_seed(settings, seed)
    at = np.array([host_speeds(scenario, float(t), seeded) for t in ticks])
    changes = np.concatenate([[True], (np.diff(at, axis=0) != 0).any(1)])
    trace = Trace(ticks[changes], (cores / at[changes]) ** (1 + costs.small_share))
    base = np.array([settings.batch_size * workers])
    per_epoch = not policy.startswith("reference") and boundary(make_policy(policy)) == "epoch"
    interval, delay = (int(EPOCH_SAMPLES // base[0]), 0) if per_epoch else (settings.interval, 1)
    env = ScenarioEnv(
        scenario, seeded, costs, simulated_hosts(costs, cores, base), interval=interval, delay=delay, trace=trace
    )
    chosen = _policy(policy, scenario, seeded, env)
    learned = part_of(chosen, LearnedPolicy) or part_of(chosen, AdditivePolicy)
    env.decision_s = LEARNED_S if learned else RULE_S if part_of(chosen, Goodput) else 0.0
    window = env.reset()
    needed = costs.needed * costs.units(float(base[0]))
    while env.progress[0] < needed and env.clock_s[0] < LONGEST_S:
        window = env.step(chosen.decide(window, env.bounds))
    share = needed / float(env.progress[0])
    return {"step_s": float(env.clock_s[0]) / env.steps, "time_to_target_s": float(env.clock_s[0]) * min(share, 1.0)}


def simulated_hosts(costs: LiveCosts, cores: Floats, base: np.ndarray[Any, Any]) -> Clusters:
    """One cluster of hosts of `cores` each, that starts with `base` (1,) samples; disturbances come from a trace."""
    shape, one = (1, len(cores)), np.ones(1)
    never, unit = np.full(shape, 1e12), np.ones(shape)
    scale = cores[None] ** (1 + costs.small_share)
    ratio = float(base[0]) / UNIT_BATCH
    return Clusters(
        alpha=costs.alpha / scale, beta=costs.beta / scale, jitter_sd=costs.jitter_sd * unit,
        jitter_s=costs.jitter_s * unit, together_sd=costs.together_sd * one,
        slow_off_s=never, slow_on_s=unit, slow_strongest=unit, exchange_s=costs.exchange_s * one, overlap=one,
        stall=0 * one, neighbour_period_s=60 * one, neighbour_factor=one,
        noise_start=np.exp(costs.knots[0]) * ratio**costs.rho * one, noise_rho=costs.rho * one,
        noise_unit=costs.samples * costs.units(float(base[0])) * one, noise_growth=0 * one,
        noise_error=costs.noise_error * one, base_batch=base,
        missing_noise=np.zeros(1, bool), missing_training=np.zeros(1, bool), missing_host=np.zeros(1, bool),
        noise_knots=np.array([costs.knots]), noise_from=0 * one,
    )  # fmt: skip


def _policy(name: str, scenario: Scenario, seed: int, env: ClusterEnv) -> Policy:
    if name.startswith("reference"):
        return Reference(scenario, seed=seed, clock=lambda: float(env.clock_s[0]), total=reference_total(name))
    return watched(make_policy(name), None)


def compare(folder: Path, *, calibrate_on: str = "all") -> dict[str, Any]:
    """Measured and predicted step times and times to the target of every scenario of a `bench tta` folder.

    calibrate_on   scenarios, comma-separated, whose static runs costs are fitted to; "all"
    """
    result, costs = _fitted(folder, calibrate_on)
    tie = indistinct((result.get("a_a") or {}).get("each", []), pairs=len(result["seeds"]))
    out = {name: _compare_one(load_scenario(name), part, costs, tie) for name, part in result["scenarios"].items()}
    return {
        "calibrated_on": calibrate_on, "costs": asdict(costs), "tie": tie, "scenarios": out,
        "same_ranking": sum(part["same_ranking"] for part in out.values()),
        "worst_step_error": max(p["step_error"] for part in out.values() for p in part["policies"].values()),
    }  # fmt: skip


def forecast(
    folder: Path, policies: Sequence[str], *, seeds: int = 6, seed: int = 1000, calibrate_on: str = "all"
) -> dict[str, Any]:
    """Times to the target (s) that any policies would take on the scenarios of a `bench tta` folder, with its costs.

    For disturbances `seed`, `seed + 1`, ...; `ratio` is the geometric mean of times over those of the first policy. `late`
    counts runs that had not arrived after `LONGEST_S`, and are taken as so long.
    """
    if seeds < 1:
        raise ConfigError("seeds", seeds, "1 or more", "check the argument")
    for name in policies:
        reference_total(name) if name.startswith("reference") else make_policy(name)  # raises for an unknown one
    result, costs = _fitted(folder, calibrate_on)
    out: dict[str, dict[str, Any]] = {}
    for name in result["scenarios"]:
        scenario = load_scenario(name)
        times = {
            policy: np.array(
                [predict(scenario, policy, s, costs)["time_to_target_s"] for s in range(seed, seed + seeds)]
            )
            for policy in policies
        }
        logs = {policy: np.log(t / times[policies[0]]) for policy, t in times.items()}
        out[name] = {
            policy: {
                "time_to_target_s": float(times[policy].mean()), "ratio": float(np.exp(log.mean())),
                "error": float(log.std(ddof=1) / np.sqrt(seeds)) if seeds > 1 else None,
                "late": int((times[policy] >= LONGEST_S).sum()),
            }
            for policy, log in logs.items()
        }  # fmt: skip
    over_all = {
        policy: float(np.exp(np.mean([np.log(part[policy]["ratio"]) for part in out.values()]))) for policy in policies
    }
    return {"calibrated_on": calibrate_on, "seeds": [seed, seed + seeds - 1], "scenarios": out, "ratio": over_all}


def _fitted(folder: Path, calibrate_on: str) -> tuple[dict[str, Any], LiveCosts]:
    """result.json of a finished run, and the costs that the static runs of its scenarios `calibrate_on` tell."""
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
    """How far apart (relative) two policies' times over `pairs` pairs may be by the machine alone, 95 %.

    each   static against itself, one ratio per pair of all scenarios: their spread is that of any ratio of two runs

    >>> round(indistinct([1.1, 1 / 1.1, 1.1, 1 / 1.1], pairs=4), 2)
    0.1
    """
    if not each:
        return 0.05
    spread = float(np.sqrt(np.mean(np.square(np.log(each)))))
    return float(max(np.expm1(1.96 * spread / np.sqrt(pairs)), 0.02))


def _compare_one(scenario: Scenario, part: dict[str, Any], costs: LiveCosts, tie: float) -> dict[str, Any]:
    policies: dict[str, dict[str, float]] = {}
    for name, runs in part["policies"].items():
        if name == AGAIN or None in runs["time_to_target_s"]:
            continue
        predicted = [predict(scenario, name, seed, costs) for seed in part["seeds"]]
        step = [t / n for t, n in zip(runs["time_s"], runs["steps"], strict=True)]
        mean = {key: float(np.mean([p[key] for p in predicted])) for key in ("step_s", "time_to_target_s")}
        policies[name] = {
            "step_s": float(np.mean(step)), "predicted_step_s": mean["step_s"],
            "step_error": abs(mean["step_s"] / float(np.mean(step)) - 1),
            "time_to_target_s": float(np.mean(runs["time_to_target_s"])),
            "predicted_time_to_target_s": mean["time_to_target_s"],
        }  # fmt: skip
    return {"policies": policies, "same_ranking": same_ranking(policies, tie)}


def same_ranking(policies: dict[str, dict[str, float]], tie: float) -> bool:
    """Whether every two policies whose measured times differ by more than `tie` (relative) are predicted in that order."""
    names = list(policies)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            measured = np.log(policies[a]["time_to_target_s"] / policies[b]["time_to_target_s"])
            predicted = np.log(policies[a]["predicted_time_to_target_s"] / policies[b]["predicted_time_to_target_s"])
            if abs(measured) > np.log1p(tie) and measured * predicted < 0:
                return False
    return True
