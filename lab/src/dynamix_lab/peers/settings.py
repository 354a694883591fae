"""The settings that the runs of one call of `dynamix bench peers` share."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from typing import get_args

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix_lab.emulator import load_scenario
from dynamix_lab.emulator.cluster import Mechanism
from dynamix_lab.emulator.scenario import check_machine
from dynamix_lab.harness.reference import references
from dynamix_lab.installed import how_to_install
from dynamix_lab.tasks import Workload
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS

MOST_STEPS = 100_000  # no run reaches it within its time


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The settings that the runs of a call share.

    scenario  shipped name or file of the emulator's scenario
    seeds     how many; seed, seed + 1, ...
    clock_s   ends every run after this time instead of at the target
    quick     a smoke run: little data, few steps, an easy target
    policies  to run, in this order; "reference" knows the scenario's true speeds
    mechanism   of the emulation: "auto", "privileged" or "duty-cycle" (no root)
    """

    scenario: str = "demo"
    seeds: int = 1
    seed: int = 0
    quick: bool = False
    policies: tuple[str, ...] = ()
    clock_s: float | None = None
    workload: str = "mnist1d"
    interval: int = 5
    lr_rule: str = "adascale"
    disturbance_seed: int = field(default=1000)
    mechanism: Mechanism = "auto"

    def check(self) -> None:
        """Raise `ConfigError` for impossible values, before anything is started."""
        if self.seeds < 1:
            raise ConfigError("seeds", self.seeds, "1 or more", "check the argument")
        if self.clock_s is not None and not 1 <= self.clock_s <= 86_400:
            raise ConfigError("clock", self.clock_s, "1 to 86400 seconds", "check the argument")
        used = sorted(set(range(self.seed, self.seed + self.seeds)) & set(TUNING_SEEDS))
        if not 0 <= self.seed < 2**31 or used:
            allowed = f"0 to 2147483647, except {', '.join(map(str, TUNING_SEEDS))} (the target was fixed on them)"
            raise ConfigError("seed", used[0] if used else self.seed, allowed, "take another seed")
        if self.mechanism not in get_args(Mechanism):
            raise ConfigError("mechanism", self.mechanism, ", ".join(get_args(Mechanism)), "use auto")
        check_machine(load_scenario(self.scenario), len(os.sched_getaffinity(0)))
        for package in ("matplotlib", "mnist1d") if self.workload.startswith("mnist1d") else ("matplotlib",):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(package, "not installed", "installed", how_to_install("bench"))
        for name in self.policies:
            make_policy(name, others=references(self.scenario))

    def train_samples(self) -> int:
        return 2400 if self.quick else 24_000

    def test_samples(self) -> int:
        return 400 if self.quick else 4_000

    def snapshot_samples(self) -> int:
        return 1000 if self.quick else 4000

    def max_steps(self) -> int:
        return 16 if self.quick else 4000 if self.clock_s is None else MOST_STEPS

    def target(self, workload: Workload) -> float:
        """The target of its metric. With a clock a workload may have none. Then it is 1, and no time to it is
        reported."""
        if self.quick:
            return 0.15
        return 1.0 if self.clock_s is not None and workload.target is None else workload.fixed_target()


def disturbance_seed(settings: LaunchSettings, seed: int) -> int:
    """Differs from the seed of model and data. All runs of one pair share both."""
    return settings.disturbance_seed + seed
