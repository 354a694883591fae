"""The demo, based on the experiment `experiments/demo.toml`: a user's choices, and progress messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.experiment.clusters import Cluster
from dynamix_lab.experiment.experiment import Experiment, load
from dynamix_lab.experiment.places import Place
from dynamix_lab.experiment.suite import ExperimentSuite, read
from dynamix_lab.experiment.table import how_fast
from dynamix_lab.harness.suite import Cell, Context

OURS = "dynamix"  # the policy that the user may replace
QUICK = 1_280  # samples of a smoke run, which takes seconds a row
OVER_LEAST = 1.6  # a row's time over the least time that its devices need, mean over the demo's rows


def demo_plan(
    *,
    scenario: str | None = None,
    rows: tuple[str, ...] | None = None,
    policy: str | None = None,
    seeds: int = 1,
    seed: int = 0,
    quick: bool = False,
) -> Experiment:
    """The demo's experiment with the user's choices. None: no change.

    scenario   of device hosts, a shipped one or a file
    policy     replaces dynamix
    quick      a smoke run

    Raises `ConfigError` for an impossible choice.
    """
    plan = load("demo")
    place = Place.of(plan.places[0])
    places = None if scenario is None else (f"{scenario}/{place.workload}",)
    plan = replace(plan.only(rows=rows, places=places), seeds=seeds, first_seed=seed)
    if policy is not None:
        if not any(row.policy == OURS for row in plan.rows):
            ours = " or ".join(row.name for row in load("demo").rows if row.policy == OURS)
            raise ConfigError("policy", policy, f"with the row {ours}", "add one to --rows")
        chosen = (replace(row, policy=policy) if row.policy == OURS else row for row in plan.rows)
        plan = replace(plan, rows=tuple(chosen))
    return replace(plan, budget=QUICK) if quick else plan


@dataclass(frozen=True)
class DemoSuite(ExperimentSuite):
    """The demo's experiment. It prints how long it will take, and the result of each row when it ends."""

    say: Callable[[str], None] = print

    def begin(self, found: Mapping[str, Any]) -> None:
        self.say(self.plan.about[0])
        missing = [cell for cell in self.cells() if cell.key not in found]
        rows_s = [OVER_LEAST * case.place.least_s(seed, case.batch) for case, _, (seed,) in (c.what for c in missing)]
        if rows_s:
            each, minutes = sum(rows_s) / len(rows_s), sum(rows_s) / 60
            self.say(f"{len(missing)} rows of about {each:.0f} s each, {minutes:.1f} minutes in all")

    def means(self, folder: RunFolder) -> contextlib.AbstractContextManager[Cluster]:
        self.say(f"results: {folder.path}. Ctrl-C keeps the rows that ended; --resume --out {folder.path} goes on")
        return super().means(folder)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        case, row, _ = cell.what
        context.tell(f"{row.name} trains", 0.0)
        made = super().run(cell, context)
        (run,) = made["rows"][row.name]["runs"]
        found = read(case, run)
        rate, waiting = how_fast({name: [value] for name, value in found.items()})
        late = ", too slow a machine for these devices: no measurement" if found["overrun"] else ""
        said = f"{found['seconds']:.1f} s, score {100 * found['score']:.1f}, {rate} samples/s, waiting {waiting}{late}"
        self.say(f"{row.name}, seed {run['seed']}: {said}")
        return made


def about_hosts(mechanisms: Mapping[str, str]) -> str:
    """A sentence on the mechanisms of the hosts on this machine.

    >>> about_hosts({"network": "loopback", "cpu": "device"})
    'hosts: paced devices, meeting over loopback: no root is needed'
    """
    network = mechanisms["network"]
    where = "loopback: no root is needed" if network.startswith("loopback") else f"network namespaces ({network})"
    return f"hosts: paced devices, meeting over {where}"
