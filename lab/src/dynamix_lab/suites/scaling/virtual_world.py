"""The `paper-like` scenario at any number of workers, as a world that real training on the virtual clock can run in."""

from __future__ import annotations

from typing import Any

from dynamix.errors import ConfigError
from dynamix_lab.emulator import Scenario, load_scenario
from dynamix_lab.suites.fidelity.quota_world import (
    EXCHANGE_PER_SPEED,
    EXCHANGE_S,
    JITTER_S,
    JITTER_SD,
    SMALL_SHARE,
    TOGETHER_SD,
    QuotaWorld,
    quota_costs,
)
from dynamix_lab.tasks.net_costs import NetCosts


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


class NetEnv(QuotaWorld):
    """`QuotaWorld` of a scenario that trains a net of given costs: processor seconds of a step, bytes of a gradient."""

    def __init__(self, scenario: Scenario, net: NetCosts, *, seed: int, batch_size: int, longest_s: float) -> None:
        super().__init__(
            scenario,
            quota_costs(net.alpha_s, net.beta_s),
            seed=seed,
            gradient_bytes=net.gradient_bytes,
            batch_size=batch_size,
            longest_s=longest_s,
        )


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
