"""Runs that a call has finished, seed by seed, in the folder that a later call goes on in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import RunFolder, commit, machine
from dynamix_lab.emulator import Scenario
from dynamix_lab.harness.folder import keep_events
from dynamix_lab.harness.runs import PolicyRun, load_runs, save_runs

_AGREE = ("schema", "scenario_sha256", "workload", "target", "settings")


def facts_of(
    scenario: Scenario,
    order: Mapping[int, Sequence[str]],
    *,
    command: str,
    workload: str,
    target: float,
    quick: bool,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What run.json and result.json say of a call beside what it finds.

    order      seed -> the names of its runs, in their order
    settings   what a resumed call must have in common with the first, beside scenario, workload and target
    """
    return {
        "schema": SCHEMA,
        "command": command,
        "cluster": "emulator",
        "scenario": scenario.name,
        "scenario_sha256": scenario.sha256,
        "workload": workload,
        "target": target,
        "quick": quick,
        "seeds": list(order),
        "order": {str(seed): list(names) for seed, names in order.items()},
        "settings": dict(settings),
    }


class FinishedSeeds:
    """What lies in `folder`/finished. More seeds may be added to those that are there.

    facts   of the call; runs are loaded only where schema, scenario, workload, target, settings, commit and machine
            are those that they were made with
    """

    def __init__(self, folder: RunFolder, facts: dict[str, Any]) -> None:
        self._folder = folder
        self._facts = {"commit": commit(), "machine": machine(), **{name: facts[name] for name in _AGREE}}

    def path(self, seed: int) -> Path:
        """The file of a seed's runs."""
        return self._folder.path / "finished" / f"{seed}.json"

    def load(self, seeds: Sequence[int], say: Callable[[str], None]) -> dict[int, list[PolicyRun]]:
        """Seed -> runs that an earlier call left; events of other runs are dropped. Errors are those of `load_runs`."""
        found = {seed: load_runs(self.path(seed), self._facts) for seed in seeds if self.path(seed).exists()}
        for seed in found:
            say(f"seed {seed}: finished earlier, in {self._folder.path}")
        runs = [run for of_seed in found.values() for run in of_seed]
        events = keep_events(self._folder, _of(runs))
        for run in runs:
            run.events = [event for event in events if run.owns(event)]
        return found

    def save(self, seed: int, runs: Sequence[PolicyRun]) -> None:
        """Those of `runs` with this seed; events of attempts that they replace go."""
        mine = [run for run in runs if run.seed == seed]
        save_runs(self.path(seed), mine, self._facts)
        if any(run.attempt for run in mine):
            keep_events(self._folder, _of(runs))

    def whole(self, runs: Sequence[PolicyRun]) -> list[PolicyRun]:
        """Those of `runs` whose seeds are saved: what a call that is interrupted may conclude from."""
        return [run for run in runs if self.path(run.seed).exists()]


def _of(runs: Sequence[PolicyRun]) -> Callable[[dict[str, Any]], bool]:
    return lambda event: any(run.owns(event) for run in runs)
