"""What a step costs on this machine's emulated hosts, from the windows of a finished `bench tta`.

Only runs of static sizes are read: the machine is measured with what never adapts, and every adaptive policy is then
predicted. A host of `speed` cores computes b samples in (alpha + beta b) / speed^(1 + small_share) s: short slices lose
their caches. The exchange is processors' work too: whoever arrives last shows its own part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.bench.launch import Settings, disturbance_seed
from dynamix.bench.runs import AGAIN
from dynamix.emulator import Scenario, host_links, host_speeds, load_scenario
from dynamix.errors import ConfigError
from dynamix.simulator.env import TOGETHER_MEMORY
from dynamix.telemetry.events import read_events
from dynamix.window import Floats, Window
from dynamix.workloads import make_workload

KNOTS = 9


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """alpha (core-s), beta (core-s per sample) and small_share of computing; exchange_s and exchange_per_speed of the
    exchange at rest, with its bytes on the slowest link on top; jitter_s (s), jitter_sd and together_sd (relative) of
    every step; log noise scale at equal parts of `samples`; progress, in base-batch samples, `needed` for the target."""

    alpha: float
    beta: float
    small_share: float
    exchange_s: float
    exchange_per_speed: float
    jitter_s: float
    jitter_sd: float
    together_sd: float
    knots: tuple[float, ...]
    samples: float
    needed: float

    def seconds(self, batch: Floats, speed: Floats) -> Floats:
        """Computing of `batch` samples on hosts of `speed` cores, s."""
        return np.asarray((self.alpha + self.beta * batch) / speed ** (1 + self.small_share))


def is_static(name: str) -> bool:
    """Runs that never adapt."""
    return name in ("static", AGAIN) or name.startswith("static:")


def moved_mbit(workers: int) -> float:
    """What a ring all-reduce of the demo's gradients sends over each link, Mbit."""
    model = make_workload(Settings().workload).make_model(0)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return 2 * (workers - 1) / workers * size * 8e-6


def slowest_link(scenario: Scenario, time_s: float, seed: int) -> float:
    """Mbit/s left to the job on the slowest link at `time_s`; infinite where no rate is limited."""
    rates = [np.inf]
    for link in host_links(scenario, time_s, seed):
        ways = [rate for rate in (link.up_mbit_s, link.down_mbit_s) if rate is not None]
        rates += [max(rate - link.background_mbit_s, 0.1 * rate) for rate in ways]
    return float(min(rates))


def fit_costs(folder: Path, results: Mapping[str, dict[str, Any]]) -> LiveCosts:
    """From the static runs of these scenarios of a `bench tta` folder. Raises `ConfigError` if they tell too little."""
    parts = [_read(folder / name, load_scenario(name), result) for name, result in results.items()]
    batch, busy, speed, spread, group = (np.concatenate([part[i] for part in parts]) for i in range(5))
    if len(np.unique(batch)) < 2:
        fix = "run `dynamix bench tta` with static and static:64 among its policies"
        raise ConfigError("static sizes", sorted(set(batch.tolist())), "two different ones at least", fix)
    alpha, beta, small = _computing(batch, busy, speed)
    left = np.log(busy * speed ** (1 + small) / (alpha + beta * batch))
    together = _common(left, group)
    slices, relative = _spread(spread, busy)
    exchange, slowest = (np.concatenate([part[i] for part in parts]) for i in (5, 6))
    at_rest, per_speed = _line(1 / slowest, exchange)
    knots, samples = _noise_knots([pair for part in parts for pair in part[7]])
    return LiveCosts(
        alpha, beta, small, at_rest, per_speed, slices, relative, together, knots, samples, _needed(results.values())
    )


def _read(folder: Path, scenario: Scenario, result: dict[str, Any]) -> tuple[Any, ...]:
    """Rows of hosts whose speed did not change in a window (batch, busy s, speed, variance, window), and rows of windows
    (exchange s, slowest speed), with the noise scales of all windows."""
    hosts, windows, noise = [], [], []
    moved = moved_mbit(scenario.workers)
    for index, event in enumerate(e for e in read_events(folder / "events.jsonl") if is_static(e["policy"])):
        window, seed = Window.from_dict(event["window"]), disturbance_seed(Settings(), event["seed"])
        noise.append((float(event["samples_seen"]), float(window.noise_scale)))
        began, ended = event["time_s"] - float(window.steps) * float(np.nanmax(window.step_time)), event["time_s"]
        before, after = (host_speeds(scenario, max(t, 0.0), seed) for t in (began, ended))
        links = slowest_link(scenario, max(began, 0.0), seed), slowest_link(scenario, ended, seed)
        if before == after and links[0] == links[1]:
            windows.append((float(np.nanmean(window.communication)) - moved / links[0], min(before)))
        for host, speed in enumerate(before):
            busy = float(window.compute[host]) + float(np.nan_to_num(window.data[host]))
            if speed == after[host] and np.isfinite(busy):
                hosts.append((float(window.batch_size[host]), busy, speed, float(window.compute_std[host]) ** 2, index))
    rows = np.array(hosts).T.reshape(5, -1)
    rows[4] += 1e6 * hash_of(scenario.name)  # windows of different scenarios are different
    exchanges = np.array(windows).T.reshape(2, -1)
    return (*rows, *exchanges, noise)


def hash_of(name: str) -> int:
    """A small number that tells names apart, the same in every process."""
    return sum(name.encode()) % 997


def _computing(batch: Floats, busy: Floats, speed: Floats) -> tuple[float, float, float]:
    """alpha, beta and the exponent's excess, in turn: the line for a given exponent, the exponent for a given line."""
    small, logs = 0.0, np.log(speed)
    alpha, beta = 0.0, 1.0
    for _ in range(30):
        scaled = busy * speed ** (1 + small)
        design = np.column_stack([np.ones_like(batch), batch]) / scaled[:, None]
        alpha, beta = (float(v) for v in np.linalg.lstsq(design, np.ones_like(batch), rcond=None)[0])
        alpha = max(alpha, 1e-6)
        left = np.log(busy * speed / (alpha + beta * batch))
        small = -float(np.sum((logs - logs.mean()) * left) / max(float(np.sum((logs - logs.mean()) ** 2)), 1e-9))
    return alpha, beta, small


def _common(left: Floats, group: Floats) -> float:
    """Relative sd per step of what a window's hosts have in common, from the covariance of their residuals."""
    products, count = 0.0, 0
    for window in np.unique(group):
        mine = left[group == window]
        if len(mine) > 1:
            products += float(mine.sum() ** 2 - (mine**2).sum())
            count += len(mine) * (len(mine) - 1)
    steps = Settings().interval
    lags = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    shrunk = float((TOGETHER_MEMORY**lags).mean())  # variance of a window's mean over a step's
    return float(np.sqrt(max(products / max(count, 1), 0.0) / shrunk))


def _spread(variance: Floats, busy: Floats) -> tuple[float, float]:
    """sd in seconds and relative sd of single steps, from windows' variances = slices^2 + (relative * mean)^2."""
    known = np.isfinite(variance) & (variance > 0)
    at_rest, rising = _line(busy[known] ** 2, variance[known])
    return float(np.sqrt(at_rest)), float(np.sqrt(rising))


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Intercept and slope, neither negative, of relative least squares through medians of ten groups along x."""
    order = np.array_split(np.argsort(x), 10)
    points = np.array([(np.median(x[part]), np.median(y[part])) for part in order if len(part)])
    design = np.column_stack([np.ones(len(points)), points[:, 0]]) / points[:, 1:]
    fixed, slope = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)[0]
    if slope < 0:
        return float(np.median(y)), 0.0
    if fixed < 0:
        return 0.0, float(np.median(y / x))
    return float(fixed), float(slope)


def _noise_knots(noise: Iterable[tuple[float, float]]) -> tuple[tuple[float, ...], float]:
    samples, phi = np.array([pair for pair in noise if np.isfinite(pair[1]) and pair[1] > 0]).T
    edges = np.linspace(0, samples.max(), KNOTS + 1)
    middles = [np.median(phi[(samples >= a) & (samples <= b)]) for a, b in itertools.pairwise(edges)]
    return tuple(float(v) for v in np.log(middles)), float(samples.max())


def _needed(results: Iterable[dict[str, Any]]) -> float:
    """Static's samples at the target; at the base batch a sample is one unit of progress."""
    reached = [
        rate * seconds
        for result in results
        for rate, seconds in zip(
            result["policies"]["static"]["samples_per_s"],
            result["policies"]["static"]["time_to_target_s"],
            strict=True,
        )
        if seconds is not None
    ]
    if not reached:
        raise ConfigError("static", "never reached the target", "one seed at least", "calibrate on another scenario")
    return float(np.mean(reached))
