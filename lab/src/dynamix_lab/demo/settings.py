"""What one call of `dynamix demo` runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.policies.registry import parse_name
from dynamix_lab.demo.rows import SCENARIO, TRIALS, WORKLOAD
from dynamix_lab.emulator import load_scenario, shipped_scenarios
from dynamix_lab.emulator.cluster import Mechanism, load_permitted
from dynamix_lab.experiment.places import JOBS, JobNumbers
from dynamix_lab.harness.runs import AGAIN, policy_facts
from dynamix_lab.installed import how_to_install
from dynamix_lab.opponents.runs import RunLimits
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.statistics import balanced_order
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS

PATIENCE_S = 180.0  # a run ends here at the latest
CENSOR_FACTOR = 3.0  # or at so many times static's time: about what one device takes where all are used well
QUICK_S, QUICK_SAMPLES = 2.0, 500  # of a smoke run: how long it is, and how often it is scored


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The arguments of a call.

    seeds      how many pairs; seed, seed + 1, ...
    quick      a smoke run: every row ends after two seconds of its clock
    scenario   shipped name or file of a scenario of device hosts
    rows       of `TRIALS`
    policy     any name or file of a policy, for the row dynamix instead of the shipped one
    mechanism  of the emulation: "auto", "privileged" or "duty-cycle" (no root)
    command    the command line, for the result
    """

    seeds: int = 1
    seed: int = 0
    quick: bool = False
    scenario: str = SCENARIO
    rows: tuple[str, ...] = tuple(TRIALS)
    policy: str | None = None
    mechanism: Mechanism = "auto"
    command: str = "dynamix demo"

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be run, before anything is started."""
        if self.seeds < 1:
            raise ConfigError("seeds", self.seeds, "1 or more", "check the argument")
        used = sorted({self.seed, *range(self.seed, self.seed + self.seeds)} & set(TUNING_SEEDS))
        if not 0 <= self.seed < 2**31 or used:
            allowed = f"0 to 2147483647, except {', '.join(map(str, TUNING_SEEDS))} (the target was fixed on them)"
            raise ConfigError("seed", used[0] if used else self.seed, allowed, "take another seed")
        for row in self.rows:
            if row not in TRIALS:
                raise ConfigError("rows", row, ", ".join(TRIALS), "check the spelling")
        if self.policy is not None and "dynamix" not in self.rows:
            raise ConfigError("policy", self.policy, "with the row dynamix", "add dynamix to --rows")
        if load_permitted(self.scenario, self.mechanism).device is None:
            allowed = f"a scenario of device hosts: {', '.join(_device_scenarios())}, or a file with `device`"
            fix = "take hosts with a device"
            raise ConfigError("scenario", self.scenario, allowed, fix)
        for package in ("matplotlib", "mnist1d"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(package, "not installed", "installed", how_to_install("bench"))
        for trial in self.trials.values():
            if trial.policy is not None:
                make_policy(trial.policy)

    @property
    def job(self) -> JobNumbers:
        """The job, with its target."""
        return JOBS[WORKLOAD]

    @property
    def limits(self) -> RunLimits:
        """When a run ends at the latest, and how often it is scored."""
        if self.quick:
            return RunLimits(time_s=QUICK_S, every_samples=QUICK_SAMPLES)
        return RunLimits(time_s=PATIENCE_S, every_samples=self.job.every_samples)

    @property
    def trials(self) -> dict[str, Trial]:
        """Run -> what it does. Several seeds run static twice (the A/A pair)."""
        chosen = {row: trial for row, trial in TRIALS.items() if row in self.rows}
        if self.policy is not None:
            chosen["dynamix"] = replace(chosen["dynamix"], policy=self.policy)
        return chosen | ({AGAIN: chosen["static"]} if self.seeds > 1 and "static" in chosen else {})

    def order(self, seed: int) -> list[str]:
        """Of this seed's runs. A single seed begins with static, whose time bounds the others; several are balanced."""
        names = sorted(self.trials, key=lambda name: name != "static")
        return names if self.seeds == 1 else balanced_order(names, seed)

    def for_ranks(self, names: list[str]) -> Mapping[str, Trial]:
        """These runs with policies named so that a process elsewhere finds them."""
        return {
            name: replace(trial, policy=trial.policy and str(parse_name(trial.policy).absolute()))
            for name, trial in ((name, self.trials[name]) for name in names)
        }

    def facts(self) -> dict[str, Any]:
        """What a resumed call must have in common with the first, beside scenario and target."""
        return {
            "rows": list(self.rows),
            "mechanism": self.mechanism,
            "policy": policy_facts(self.policy) if "dynamix" in self.rows else None,
            "trials": {row: trial.to_dict() for row, trial in self.trials.items() if row != AGAIN},
        }

    @property
    def scenario_path(self) -> str:
        """The scenario for processes in another working directory."""
        return str(Path(self.scenario).resolve()) if Path(self.scenario).is_file() else self.scenario


def _device_scenarios() -> list[str]:
    return [name for name in shipped_scenarios() if load_scenario(name).device is not None]
