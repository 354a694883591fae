"""The worlds of `dynamix bench stigmergy`: simulated scenarios in phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynamix.policies.protocol import Policy
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window
from dynamix_lab.simulator import ClusterEnv, Clusters, rollout_path, sample_family
from dynamix_lab.suites.simulated import world_of

Factory = Callable[[ClusterEnv], Policy]

# Scenario -> the family of its clusters. All but `elastic` are one phase.
FAMILIES = {
    "even": "affine-quiet",
    "steady": "pai-steady",
    "drifting": "ar1-jitter",
    "slowdowns": "affine-slowdowns",
    "contended": "link-contention",
    "rotating": "rotating-neighbours",
    "periodic": "periodic-neighbours",
    "elastic": "affine-slowdowns",
}


@dataclass(frozen=True, slots=True)
class Phase:
    """Clusters that do not change for a time. A job that gains or loses workers restarts with equal shares."""

    clusters: Clusters
    windows: int


def phases_of(scenario: str, clusters: int, workers: int, windows: int, seed: int) -> list[Phase]:
    """The phases of a scenario; `elastic`: all workers, then three quarters of them, then all again."""
    world = sample_family(FAMILIES[scenario], clusters, workers, seed)
    if scenario == "even":
        world = alike(world)
    if scenario != "elastic":
        return [Phase(world, windows)]
    third = windows // 3
    return [Phase(world, third), Phase(without_a_quarter(world), third), Phase(world, windows - 2 * third)]


def vanishing(clusters: int, workers: int, windows: int, seed: int) -> list[Phase]:
    """Halfway, a quarter of the workers are lost for good."""
    world = sample_family("affine-slowdowns", clusters, workers, seed)
    return [Phase(world, windows // 2), Phase(without_a_quarter(world), windows - windows // 2)]


def alike(world: Clusters) -> Clusters:
    """The same clusters with all workers like the first."""
    first = {
        name: np.repeat(value[:, :1], world.shape[1], 1)
        for name in ("alpha", "beta", "curve", "memory_cap")
        if (value := getattr(world, name)) is not None
    }
    changes: dict[str, Any] = first
    return replace(world, **changes)


def without_a_quarter(world: Clusters) -> Clusters:
    """The first three quarters of the workers, at the same global batch except for the remainder of equal shares."""
    count, workers = world.shape
    left = max(workers - max(workers // 4, 1), 1)
    changes: dict[str, Any] = {}
    for name in set(world.__slots__) - {"noise_knots"}:
        value = getattr(world, name)
        if value is not None and value.shape == (count, workers):
            changes[name] = value[:, :left]
    share = -(-world.base_batch // left)
    if world.memory_cap is not None:
        share = np.minimum(share, world.memory_cap[:, :left].min(-1))
    return replace(world, **changes, base_batch=share * left)


class OwnPace:
    """Every worker decides for itself, without any trace: its size is its own speed times the first step's seconds.

    A step takes all workers equally long, so all know that time without communication. None knows the global batch.
    """

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight
        self.pace: Floats | None = None
        self.speed: Floats | None = None

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        with np.errstate(divide="ignore", invalid="ignore"):
            seen = 1.0 / window.seconds_per_sample
        if self.pace is None:
            # The slowest worker's seconds: a step's, less the transfer, which all measure alike.
            self.pace = np.where(np.isfinite(window.compute), window.compute, 0.0).max(-1, keepdims=True)
        before = seen if self.speed is None else self.speed
        self.speed = np.where(np.isfinite(seen), before + self.weight * (seen - before), before)
        known = np.isfinite(self.speed) & (self.pace > 0)
        wish = np.where(known, self.speed * self.pace, window.batch_size)
        return project(np.clip(wish, bounds.low, bounds.high), bounds, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class SlowedEnv(ClusterEnv):
    """A `ClusterEnv` whose first worker takes `factor` times as long from window `from_window` on."""

    factor, from_window = 2.5, 1 << 60

    def slowdown(self) -> Floats:
        factors = super().slowdown()
        if self.windows >= self.from_window:
            factors = factors.copy()
            factors[:, 0] *= self.factor
        return factors


def play(make: Factory, phases: list[Phase], *, seed: int, interval: int, delay: int) -> Floats:
    """Seconds and progress (points, 2, C) of a policy over all phases. Every phase has a new policy, as after a
    restart.
    """
    path = [np.zeros((2, phases[0].clusters.shape[0]))]
    for i, phase in enumerate(phases):
        policy, env, windows = world_of(
            make, phase.clusters, seed=seed + 7 * i, windows=phase.windows, interval=interval, delay=delay
        )
        path += [path[-1] + moved for moved in rollout_path(policy, env, windows)]
    return np.array(path)
