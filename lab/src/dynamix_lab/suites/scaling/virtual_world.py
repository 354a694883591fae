"""The `paper-like` scenario at any number of workers, as a world that real training on the virtual clock can run in."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamix.emulator import Scenario, load_scenario
from dynamix.errors import ConfigError
from dynamix_lab.suites.fidelity.live_costs import LiveCosts
from dynamix_lab.suites.fidelity.scenario_env import ScenarioEnv, simulated_hosts, slowdowns
from dynamix_lab.tasks.net_costs import NetCosts

# What a step costs beside its samples and bytes: of the order that `bench fidelity --against` finds on emulated hosts.
SMALL_SHARE, EXCHANGE_S, EXCHANGE_PER_SPEED = 0.1, 0.002, 0.004
JITTER_S, JITTER_SD, TOGETHER_SD = 0.005, 0.05, 0.05


def at_workers(name: str, workers: int) -> Scenario:
    """A shipped scenario with its hosts repeated until there are `workers`; disturbances reach each host by itself.

    >>> at_workers("paper-like", 16).workers
    16
    """
    scenario = load_scenario(name)
    if workers < 1 or workers % scenario.workers:
        raise ConfigError(
            "workers", workers, f"a multiple of {scenario.workers}, the hosts of {name}", "choose another"
        )
    return scenario.model_copy(update={"hosts": scenario.hosts * (workers // scenario.workers)})


class NetEnv(ScenarioEnv):
    """One simulated cluster on a scenario's hosts that trains a net of given costs.

    scenario    its hosts' shares of a core, links and disturbances
    net         processor seconds of a step, bytes of a gradient
    seed        of the disturbances
    batch_size  samples per worker at the start
    longest_s   virtual seconds until which disturbances are drawn; the last state holds on
    """

    def __init__(self, scenario: Scenario, net: NetCosts, *, seed: int, batch_size: int, longest_s: float) -> None:
        workers = scenario.workers
        # The noise scale of this world is never asked: training has its own.
        costs = LiveCosts(
            net.alpha_s,
            net.beta_s,
            SMALL_SHARE,
            EXCHANGE_S,
            EXCHANGE_PER_SPEED,
            JITTER_S,
            JITTER_SD,
            TOGETHER_SD,
            knots=(0.0, 0.0),
            samples=1.0,
            needed=1.0,
        )
        cores = np.array([host.cpu for host in scenario.hosts])
        clusters = simulated_hosts(costs, cores, np.array([workers * batch_size]))
        trace = slowdowns(scenario, seed, longest_s, exponent=1 + SMALL_SHARE)
        super().__init__(scenario, seed, costs, clusters, interval=1, delay=1, trace=trace)
        self._moved = 2 * (workers - 1) / workers * net.gradient_bytes * 8e-6  # Mbit over each link, a ring
        self.reset()


def described() -> dict[str, Any]:
    """The assumed part of the costs, for results."""
    return {
        "small_share": SMALL_SHARE,
        "exchange_s": EXCHANGE_S,
        "exchange_per_speed": EXCHANGE_PER_SPEED,
        "jitter_s": JITTER_S,
        "jitter_sd": JITTER_SD,
        "together_sd": TOGETHER_SD,
    }
