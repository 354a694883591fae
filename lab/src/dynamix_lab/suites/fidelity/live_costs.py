"""What a step costs on this machine's emulated hosts, from the windows of a finished `bench tta`.

Only runs that hold the global batch are read (static sizes, and rules that move shares alone: three static sizes tell
too little of what small ones cost); whoever chooses the batch is then predicted. A host of `speed` cores computes b
samples in (alpha + beta b) bend(b) / speed^(1 + small_share) s: short slices lose their caches, and the line bends
where sizes outgrow one. The exchange is processors' work too: whoever arrives last shows its own part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.events.records import read_events
from dynamix.window import Floats, Window
from dynamix_lab.emulator import Scenario, host_speeds, load_scenario
from dynamix_lab.harness.launch import LaunchSettings, disturbance_seed
from dynamix_lab.opponents.course import ring_mbit, slowest_link
from dynamix_lab.simulator.env import NOISE_MEMORY, TOGETHER_MEMORY
from dynamix_lab.tasks import make_workload

KNOTS = 9
SIZES = 2.0 ** np.arange(3, 10)  # of `LiveCosts.bend`
FEW = 1.0  # weight of "no bend" at a size, beside 1 for every cell that was met there
UNIT_BATCH = 512  # progress is counted in samples of this global batch, the base batch of four hosts
RATES = np.linspace(0.0, 0.8, 17)  # candidates for the growth of log phi with log B


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """alpha (core-s), beta (core-s per sample), small_share and bend (log factors at `SIZES`) of computing; exchange_s
    and exchange_per_speed of the exchange at rest, with its bytes on the slowest link on top; jitter_s (s), jitter_sd
    and together_sd (relative) of every step; log noise scale at equal parts of `samples` of progress, at the unit
    batch, its growth `rho` with log B and the sd `noise_error` of what is measured of it; progress `needed` for the
    target, in samples at the unit batch.
    """

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
    rho: float = 0.0
    noise_error: float = 0.2
    bend: tuple[float, ...] = (0.0,) * len(SIZES)

    def seconds(self, batch: Floats, speed: Floats) -> Floats:
        """Computing of `batch` samples on hosts of `speed` cores, s."""
        return np.asarray((self.alpha + self.beta * batch) * self.bent(batch) / speed ** (1 + self.small_share))

    def bent(self, batch: Floats) -> Floats:
        """Factors on the line by batch size, of its shape."""
        return np.asarray(np.exp(np.interp(np.log(np.maximum(batch, 1.0)), np.log(SIZES), self.bend)))

    def units(self, base: float) -> float:
        """Progress at global batch `base`, in its own samples, over the same in samples at the unit batch."""
        return _units(self.knots, self.rho, base)


def moved_mbit(workers: int) -> float:
    """What a ring all-reduce of the demo's gradients sends over each link, Mbit."""
    model = make_workload(LaunchSettings().workload).make_model(0)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return ring_mbit(workers, size)


def fit_costs(folder: Path, results: Mapping[str, dict[str, Any]]) -> LiveCosts:
    """From the runs that hold the global batch in these scenarios of a `bench tta` folder. Raises `ConfigError` if they
    tell too little."""
    parts = [_read(folder / name, load_scenario(name), result) for name, result in results.items()]
    batch, busy, speed, spread, group = (np.concatenate([part[i] for part in parts]) for i in range(5))
    runs = [run for part in parts for run in part[7]]
    totals = sorted({round(float(np.median(run.batch))) for run in runs})
    if len(totals) < 2 or len(batch) == 0:
        fix = "run `dynamix bench tta` with static and static:64 among its policies"
        raise ConfigError("global batches held", totals, "two different ones at least", fix)
    alpha, beta, small, bend = _computing(batch, busy, speed)
    left = np.log(busy * speed ** (1 + small) / (alpha + beta * batch)) - _hats(batch) @ bend
    together = _common(left, group)
    slices, relative = _spread(spread, busy)
    exchange, slowest = (np.concatenate([part[i] for part in parts]) for i in (5, 6))
    at_rest, per_speed = _line(1 / slowest, exchange)
    rho, knots, samples = _noise(runs)
    error = _noise_error(runs)
    needed = _needed(results, knots, rho)
    return LiveCosts(
        alpha,
        beta,
        small,
        at_rest,
        per_speed,
        slices,
        relative,
        together,
        knots,
        samples,
        needed,
        rho,
        error,
        tuple(bend.tolist()),
    )


@dataclass(frozen=True, slots=True)
class RunNoise:
    """What a run's windows tell of its training: samples, global batch and log phi (NaN if unknown) of each."""

    samples: Floats
    batch: Floats
    log_phi: Floats

    @classmethod
    def of(cls, windows: list[tuple[float, float, float]]) -> RunNoise:
        seen, batch, phi = np.array(windows).T
        known = np.isfinite(phi) & (phi > 0)
        log_phi = np.where(known, np.log(np.where(known, phi, 1.0)), np.nan)
        return cls(np.diff(seen, prepend=0.0), batch, log_phi)

    def own(self, rho: float) -> Floats:
        """log phi at the unit batch."""
        return np.asarray(self.log_phi + rho * np.log(UNIT_BATCH / self.batch))

    def progress(self) -> Floats:
        """After each window, in samples at the unit batch, as AdaScale counts it."""
        phi = np.exp(self.log_phi)
        gain = (phi + UNIT_BATCH) / (phi + self.batch)
        return np.asarray((self.samples * np.where(np.isnan(gain), 1.0, gain)).cumsum())


def _read(folder: Path, scenario: Scenario, result: dict[str, Any]) -> tuple[Any, ...]:
    """Rows of hosts whose speed did not change in a window (batch, busy s, speed, variance, window), and rows of
    windows (exchange s, slowest speed); and the `RunNoise`s."""
    hosts, windows = [], []
    noise: dict[tuple[str, int, int], list[tuple[float, float, float]]] = {}
    moved = moved_mbit(scenario.workers)
    for index, event in enumerate(_holding(list(read_events(folder / "events.jsonl")), scenario.workers)):
        window, seed = Window.from_dict(event["window"]), disturbance_seed(LaunchSettings(), event["seed"])
        run = noise.setdefault(_run(event), [])
        run.append((float(event["samples_seen"]), float(window.batch_size.sum()), float(window.noise_scale)))
        if int(window.steps) > LaunchSettings().interval:
            continue  # an epoch: hosts may have changed in it, and changed back
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
    return (*rows, *exchanges, [RunNoise.of(run) for run in noise.values()])


def _run(event: dict[str, Any]) -> tuple[str, int, int]:
    return event["policy"], event["seed"], event.get("attempt", 0)


def _holding(events: list[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    """Events of the runs whose global batch, once chosen, stays within a sample per worker."""
    batches: dict[tuple[str, int, int], list[int]] = {}
    for event in events:
        batches.setdefault(_run(event), []).append(sum(event["window"]["batch_size"]))
    held = {run for run, b in batches.items() if len(b) > 2 and max(b[1:]) - min(b[1:]) <= workers}
    return [event for event in events if _run(event) in held]


def hash_of(name: str) -> int:
    """A small number that tells names apart, the same in every process."""
    return sum(name.encode()) % 997


def _computing(batch: Floats, busy: Floats, speed: Floats) -> tuple[float, float, float, Floats]:
    """alpha, beta and the exponent's excess, in turn: the line for a given exponent, the exponent for a given line.
    Every cell of half an octave of sizes by half an octave of speeds weighs the same, however many windows fell there.
    What is left by size bends the line."""
    place = np.floor(2 * np.log2(np.column_stack([batch, speed])))
    _, cell = np.unique(place, axis=0, return_inverse=True)
    weight = np.sqrt(1.0 / np.bincount(cell.ravel())[cell.ravel()])  # of a residual, before it is squared
    small, logs = 0.0, np.log(speed)
    spread = weight * (logs - np.average(logs, weights=weight**2))
    alpha, beta = 0.0, 1.0
    for _ in range(40):
        scaled = busy * speed ** (1 + small) / weight
        design = np.column_stack([np.ones_like(batch), batch]) / scaled[:, None]
        alpha, beta = (float(v) for v in np.linalg.lstsq(design, weight, rcond=None)[0])
        alpha = max(alpha, 1e-6)
        left = weight * np.log(busy * speed / (alpha + beta * batch))
        small = -float((spread * left).sum() / max(float((spread**2).sum()), 1e-9))
    left = weight * np.log(busy * speed ** (1 + small) / (alpha + beta * batch))
    hats, sizes = _hats(batch) * weight[:, None], np.log(SIZES)
    design = np.vstack([hats, FEW * np.eye(len(SIZES))])
    bend = np.linalg.lstsq(design, np.concatenate([left, np.zeros(len(SIZES))]), rcond=None)[0]
    met = hats.sum(0) > 0
    return alpha, beta, small, np.interp(sizes, sizes[met], bend[met])  # beyond what was met, as at its end


def _hats(batch: Floats) -> Floats:
    """Shares (n, len(SIZES)) of the two nearest of `SIZES`, linear in the logarithm."""
    one = np.eye(len(SIZES))
    return np.column_stack([np.interp(np.log(batch), np.log(SIZES), row) for row in one])


def _common(left: Floats, group: Floats) -> float:
    """Relative sd per step of what a window's hosts have in common, from the covariance of their residuals."""
    products, count = 0.0, 0
    for window in np.unique(group):
        mine = left[group == window]
        if len(mine) > 1:
            products += float(mine.sum() ** 2 - (mine**2).sum())
            count += len(mine) * (len(mine) - 1)
    steps = LaunchSettings().interval
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


def _noise(runs: Sequence[RunNoise]) -> tuple[float, tuple[float, ...], float]:
    """rho, log phi at equal parts of the progress at the unit batch, and the whole progress: the rho with which runs at
    different batches agree best on phi at equal progress."""
    if not any(np.isfinite(run.log_phi).any() for run in runs):
        raise ConfigError(
            "noise scale", "never measured", "windows with a noise scale", "take a run of two ranks or more"
        )
    found = []
    for rho in RATES:
        x = np.concatenate([run.progress() for run in runs])
        y = np.concatenate([run.own(rho) for run in runs])
        x, y = x[np.isfinite(y)], y[np.isfinite(y)]
        part = np.minimum((x / x.max() * KNOTS).astype(int), KNOTS - 1)
        met = np.unique(part)
        knots = np.interp(np.arange(KNOTS), met, [np.median(y[part == k]) for k in met])
        found.append((float(np.abs(y - knots[part]).mean()), float(rho), tuple(map(float, knots)), float(x.max())))
    return min(found)[1:]


def _noise_error(runs: Sequence[RunNoise]) -> float:
    """sd of log phi's errors, from its changes between windows of a run beyond what they usually are there."""
    changes = np.concatenate([_less_median(np.diff(run.log_phi)) for run in runs])
    return float(1.4826 * np.nanmedian(np.abs(changes)) / np.sqrt(2 * (1 - NOISE_MEMORY)))


def _less_median(x: Floats) -> Floats:
    known = x[np.isfinite(x)]
    return np.asarray(known - np.median(known)) if len(known) else known


def _units(knots: Sequence[float], rho: float, base: float) -> float:
    phi = np.exp(np.asarray(knots)) * (base / UNIT_BATCH) ** rho
    return float(np.mean((phi + base) / (phi + UNIT_BATCH)))


def _needed(results: Mapping[str, dict[str, Any]], knots: Sequence[float], rho: float) -> float:
    """Progress at the target at the unit batch, the mean over static's scenarios and seeds."""
    bases = {name: float(LaunchSettings().batch_size * load_scenario(name).workers) for name in results}
    reached = [
        rate * seconds / _units(knots, rho, bases[name])
        for name, result in results.items()
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
