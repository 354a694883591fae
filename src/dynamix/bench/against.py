"""The simulator against the emulator: the same scenarios and policies predicted, from costs fitted on one of them.

`dynamix bench fidelity --against RUN` reads a finished `bench tta` folder. Costs of computing and of the exchange, and
the noise scale, are fitted to the windows of one scenario; the others are predicted from their files alone.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.bench.demo import Settings, disturbance_seed
from dynamix.bench.reference import Reference, reference_total
from dynamix.bench.runs import AGAIN
from dynamix.emulator import Scenario, host_links, host_speeds, load_scenario
from dynamix.errors import ConfigError
from dynamix.policies import Policy, make_policy
from dynamix.policies.base import boundary
from dynamix.simulator import ClusterEnv, Clusters, Trace
from dynamix.telemetry.events import read_events
from dynamix.window import Floats, Window
from dynamix.workloads import make_workload

KNOTS = 9
EPOCH_SAMPLES = 24_000
TICK_S = 0.1
LONGEST_S = 1200.0


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """Fitted to one scenario: core-seconds alpha + beta b of a step, jitter and exchange; noise scale along training."""

    alpha: float
    beta: float
    small_share: float  # a host of `cpu` cores needs cpu^-small_share times as much: short slices lose their caches
    jitter_sd: float
    exchange_s: float
    knots: tuple[float, ...]  # log phi at equal parts of `samples`
    samples: float
    needed: float  # progress, in base-batch samples, at which static reached the target


def fit_costs(folder: Path, scenario: Scenario, result: dict[str, Any]) -> LiveCosts:
    """From a scenario's folder. Windows whose host changed its speed on the way are left out."""
    seeds = {seed: disturbance_seed(Settings(), seed) for seed in result["seeds"]}
    rows, exchanges, noise = [], [], []
    for event in read_events(folder / "events.jsonl"):
        window = Window.from_dict(event["window"])
        exchanges.append(float(np.nanmean(window.communication)))
        noise.append((float(event["samples_seen"]), float(window.noise_scale)))
        begun, ended = event["time_s"] - float(window.steps) * float(np.nanmax(window.step_time)), event["time_s"]
        before, after = (host_speeds(scenario, max(t, 0.0), seeds[event["seed"]]) for t in (begun, ended))
        for host, speed in enumerate(before):
            busy = float(window.compute[host])
            if speed == after[host] and np.isfinite(busy):
                rows.append((float(window.batch_size[host]), busy * speed, scenario.hosts[host].cpu))
    batch, busy, share = np.array(rows).T
    alpha, beta, small = 0.0, 1.0, 0.0
    for _ in range(20):  # in turn: the line for a given exponent, the exponent for a given line
        scaled = busy * share**small
        design = np.column_stack([np.ones_like(batch), batch]) / scaled[:, None]
        alpha, beta = np.linalg.lstsq(design, np.ones_like(batch), rcond=None)[0]
        left, logs = np.log(busy / (alpha + beta * batch)), np.log(share)
        small = -float(np.sum((logs - logs.mean()) * left) / max(np.sum((logs - logs.mean()) ** 2), 1e-9))
    residual = busy * share**small / (alpha + beta * batch) - 1
    knots, samples = _noise_knots(noise)
    costs = LiveCosts(
        float(max(alpha, 1e-6)), float(beta), small, float(np.median(np.abs(residual)) * 1.48), float(np.median(exchanges)),
        knots, samples, 0.0,
    )  # fmt: skip
    return LiveCosts(**{**{n: getattr(costs, n) for n in costs.__slots__}, "needed": _needed(result, costs)})


def _noise_knots(noise: list[tuple[float, float]]) -> tuple[tuple[float, ...], float]:
    samples, phi = np.array([pair for pair in noise if np.isfinite(pair[1]) and pair[1] > 0]).T
    edges = np.linspace(0, samples.max(), KNOTS + 1)
    middles = [np.median(phi[(samples >= a) & (samples <= b)]) for a, b in itertools.pairwise(edges)]
    return tuple(float(v) for v in np.log(middles)), float(samples.max())


def _needed(result: dict[str, Any], costs: LiveCosts) -> float:
    """Static's samples at the target; at the base batch a sample is one unit of progress."""
    static = result["policies"]["static"]
    reached = [
        rate * seconds
        for rate, seconds in zip(static["samples_per_s"], static["time_to_target_s"], strict=True)
        if seconds is not None
    ]
    if not reached:
        raise ConfigError("static", "never reached the target", "one seed at least", "calibrate on another scenario")
    return float(np.mean(reached))


class ScenarioEnv(ClusterEnv):
    """One simulated cluster whose links follow a scenario's schedule: the slowest decides a ring all-reduce's bytes.

    Loss and latency are not modelled; the exchange at rest, whose cost is processors', is in the clusters' `exchange_s`.
    """

    def __init__(
        self, scenario: Scenario, disturbed_by: int, gradient_bytes: int, clusters: Clusters, **how: Any
    ) -> None:
        self._scenario, self._seed, self._bytes = scenario, disturbed_by, gradient_bytes
        super().__init__(clusters, seed=disturbed_by, **how)

    def exchange(self) -> Floats:
        workers = self.clusters.shape[1]
        rates = [math.inf]
        for link in host_links(self._scenario, float(self.clock_s[0]), self._seed):
            ways = [rate for rate in (link.up_mbit_s, link.down_mbit_s) if rate is not None]
            rates += [max(rate - link.background_mbit_s, 0.1 * rate) for rate in ways]
        moved_mbit = 2 * (workers - 1) / workers * self._bytes * 8e-6
        return np.asarray(self.clusters.exchange_s + moved_mbit / min(rates))


def predict(scenario: Scenario, policy: str, seed: int, costs: LiveCosts) -> dict[str, float]:
    """Step time and time to the target of one run, s."""
    settings = Settings()
    workers, speeds = scenario.workers, np.array([host.cpu for host in scenario.hosts])
    ticks = np.arange(0.0, LONGEST_S, TICK_S)
    seeded = disturbance_seed(settings, seed)
    at = np.array([host_speeds(scenario, float(t), seeded) for t in ticks])
    changes = np.concatenate([[True], (np.diff(at, axis=0) != 0).any(1)])
    trace = Trace(ticks[changes], speeds / at[changes])
    base = np.array([settings.batch_size * workers])
    per_epoch = not policy.startswith("reference") and boundary(make_policy(policy)) == "epoch"
    interval, delay = (int(EPOCH_SAMPLES // base[0]), 0) if per_epoch else (settings.interval, 1)
    model = make_workload(settings.workload).make_model(0)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    env = ScenarioEnv(
        scenario, seeded, size, _clusters(costs, speeds, base), interval=interval, delay=delay, trace=trace
    )
    chosen = _policy(policy, scenario, seeded, env)
    window = env.reset()
    while env.progress[0] < costs.needed and env.clock_s[0] < LONGEST_S:
        window = env.step(chosen.decide(window, env.bounds))
    share = costs.needed / float(env.progress[0])
    return {"step_s": float(env.clock_s[0]) / env.steps, "time_to_target_s": float(env.clock_s[0]) * min(share, 1.0)}


def _clusters(costs: LiveCosts, speeds: Floats, base: np.ndarray[Any, Any]) -> Clusters:
    shape, one = (1, len(speeds)), np.ones(1)
    never, speeds = np.full(shape, 1e12), speeds ** (1 + costs.small_share)
    unit = np.ones(shape)
    return Clusters(
        alpha=costs.alpha / speeds[None], beta=costs.beta / speeds[None], jitter_sd=costs.jitter_sd * unit,
        slow_off_s=never, slow_on_s=unit, slow_strongest=unit, exchange_s=costs.exchange_s * one, overlap=one,
        stall=0 * one, neighbour_period_s=60 * one, neighbour_factor=one, noise_start=np.exp(costs.knots[0]) * one,
        noise_unit=costs.samples * one, noise_growth=0 * one, noise_error=0.2 * one, base_batch=base,
        missing_noise=np.zeros(1, bool), missing_training=np.zeros(1, bool), missing_host=np.zeros(1, bool),
        noise_knots=np.array([costs.knots]), noise_from=0 * one, memory_cap=np.full(shape, 512),
    )  # fmt: skip


def _policy(name: str, scenario: Scenario, seed: int, env: ClusterEnv) -> Policy:
    if name.startswith("reference"):
        return Reference(scenario, seed=seed, clock=lambda: float(env.clock_s[0]), total=reference_total(name))
    return make_policy(name)


def compare(folder: Path, *, calibrate_on: str) -> dict[str, Any]:
    """Measured and predicted step times and times to the target of every scenario of a `bench tta` folder."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        scenarios = result["scenarios"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("against", str(folder), "the folder of a finished `dynamix bench tta`", str(error)) from error
    if calibrate_on not in scenarios:
        raise ConfigError("calibrate_on", calibrate_on, ", ".join(scenarios), "name one of the run's scenarios")
    costs = fit_costs(folder / calibrate_on, load_scenario(calibrate_on), scenarios[calibrate_on])
    out = {name: _compare_one(load_scenario(name), part, costs) for name, part in scenarios.items()}
    return {
        "calibrated_on": calibrate_on, "costs": {n: getattr(costs, n) for n in costs.__slots__}, "scenarios": out,
        "same_ranking": sum(part["same_ranking"] for part in out.values()),
        "worst_step_error": max(p["step_error"] for part in out.values() for p in part["policies"].values()),
    }  # fmt: skip


def _compare_one(scenario: Scenario, part: dict[str, Any], costs: LiveCosts) -> dict[str, Any]:
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
    tie = max(abs((part["a_a"] or {"median": 1.05})["median"] - 1), 0.02)
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
