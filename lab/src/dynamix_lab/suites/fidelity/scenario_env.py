"""A scenario's emulated hosts as a simulated cluster: their shares of a core, links and disturbances, with fitted
costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.window import Bounds, Floats, Window
from dynamix_lab.emulator import Scenario, host_speeds
from dynamix_lab.emulator.schedule import next_change_s
from dynamix_lab.harness.launch import LaunchSettings
from dynamix_lab.opponents.course import slowest_link
from dynamix_lab.simulator import ClusterEnv, Clusters, SlowdownTrace
from dynamix_lab.simulator.compute import Costs
from dynamix_lab.suites.fidelity.live_costs import UNIT_BATCH, LiveCosts, moved_mbit
from dynamix_lab.tasks import make_workload

NEW_SIZE_S = 0.008  # core-s, as measured: 24.8 ms for the first step at a size, 16.7 when it comes again


@dataclass(frozen=True)
class HostCosts(Costs):
    """Computing of emulated hosts: the line, bent by size as `live` says."""

    live: LiveCosts | None = None

    @property
    def affine(self) -> bool:
        return False

    def seconds(self, batch: Floats) -> Floats:
        assert self.live is not None
        return np.asarray(super().seconds(batch) * self.live.bent(batch))


class ScenarioEnv(ClusterEnv):
    """One simulated cluster on a scenario's hosts: the slowest link decides the bytes of an exchange; the rest of it is
    work that every host does on its own share of a core once it has computed, so it counts as far as that host ends
    last.

    Loss and latency are not modelled.
    """

    def __init__(self, scenario: Scenario, disturbed_by: int, costs: LiveCosts, clusters: Clusters, **how: Any) -> None:
        self._scenario, self._seed, self._live = scenario, disturbed_by, costs
        self._moved = moved_mbit(scenario.workers)
        super().__init__(clusters, seed=disturbed_by, **how)
        self.costs = HostCosts(clusters.alpha, clusters.beta, live=costs)
        workload = make_workload(LaunchSettings().workload)
        self.bounds = Bounds.of(clusters.shape[1], np.full(clusters.shape, workload.min_batch), workload.max_batch)

    def reset(self) -> Window:
        self._met: set[tuple[int, int]] = set()
        return super().reset()

    def advance(self, running: np.ndarray | None = None) -> tuple[Floats, Floats]:
        """One step; a worker's first at a size never met before prepares kernels while it computes, on its own share of
        a core.
        """
        batch = self.batch[0].tolist()
        fresh = np.array([size > 0 and (i, size) not in self._met for i, size in enumerate(batch)])
        self._met |= set(enumerate(batch))
        speeds = np.array(host_speeds(self._scenario, float(self.clock_s[0]), self._seed))
        plain, whole = super().advance()
        busy = plain + NEW_SIZE_S * fresh / speeds
        late = float((busy[0] + self._live.exchange_per_speed / speeds).max() - plain[0].max())
        self.clock_s = self.clock_s + late
        return busy, whole + late

    def exchange(self) -> Floats:
        bytes_s = self._moved / slowest_link(self._scenario, float(self.clock_s[0]), self._seed)
        return np.array([self._live.exchange_s + bytes_s])


def simulated_hosts(costs: LiveCosts, cores: Floats, base: np.ndarray[Any, Any]) -> Clusters:
    """One cluster of hosts of `cores` each, that starts with `base` (1,) samples; disturbances come from a trace."""
    shape, one = (1, len(cores)), np.ones(1)
    never, unit = np.full(shape, 1e12), np.ones(shape)
    scale = cores[None] ** (1 + costs.small_share)
    ratio = float(base[0]) / UNIT_BATCH
    return Clusters(
        alpha=costs.alpha / scale,
        beta=costs.beta / scale,
        jitter_sd=costs.jitter_sd * unit,
        jitter_s=costs.jitter_s * unit,
        together_sd=costs.together_sd * one,
        slow_off_s=never,
        slow_on_s=unit,
        slow_strongest=unit,
        exchange_s=costs.exchange_s * one,
        overlap=one,
        stall=0 * one,
        neighbour_period_s=60 * one,
        neighbour_factor=one,
        noise_start=np.exp(costs.knots[0]) * ratio**costs.rho * one,
        noise_rho=costs.rho * one,
        noise_unit=costs.samples * costs.units(float(base[0])) * one,
        noise_growth=0 * one,
        noise_error=costs.noise_error * one,
        base_batch=base,
        missing_noise=np.zeros(1, bool),
        missing_training=np.zeros(1, bool),
        missing_host=np.zeros(1, bool),
        noise_knots=np.array([costs.knots]),
        noise_from=0 * one,
    )


def slowdowns(scenario: Scenario, seed: int, longest_s: float, *, exponent: float) -> SlowdownTrace:
    """Factors on computing at every change of the hosts' shares of a core until `longest_s`."""
    times: list[float] = [0.0]
    while (following := next_change_s(scenario, times[-1])) is not None and following < longest_s:
        times.append(following)
    cores = np.array([host.cpu for host in scenario.hosts])
    now = np.array([host_speeds(scenario, t, seed) for t in times])
    return SlowdownTrace(np.array(times), (cores / now) ** exponent)
