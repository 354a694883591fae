"""`dynamix bench rounds`: the rule for how often workers meet, against every fixed number of steps and other rules.

A run is charged for its exchanges afterwards: but for the rule, whose choice depends on them, rows train alike on any
network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from dynamix.errors import ConfigError
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import sections_markdown
from dynamix_lab.suites.rounds import pages
from dynamix_lab.suites.rounds.compare import compared, samples_needed
from dynamix_lab.suites.rounds.jobs import JOBS, RoundsJob, job_named, speeds_of
from dynamix_lab.suites.rounds.product import train_product
from dynamix_lab.suites.rounds.rows import ADACOMM, FIXED, QSR_STEPS, RATIOS
from dynamix_lab.suites.rounds.train import Track, train_apart, train_together
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS

TOGETHER = (4, 8, 16)  # pieces in a global batch where workers meet over gradients
MORE_RATES = 2  # beyond the first three, where the best is at an end
WHOLE = ("perceptron", "convolution")


@dataclass(frozen=True, slots=True)
class RoundsPlan:
    """What one call runs: jobs by name, and how many fresh seeds beside the one on which rates are tuned."""

    jobs: tuple[str, ...] = tuple(JOBS)
    seeds: int = 2

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        for name in self.jobs:
            job_named(name)
        if not 1 <= self.seeds <= 1000:
            raise ConfigError("seeds", self.seeds, "1 to 1000", "take 2 or more")

    @property
    def groups(self) -> list[tuple[str, float]]:
        """Each job with the spreads of speed that it is run at."""
        spreads = {"perceptron": (1.0, 4.0, 2.0), "transformer, AdamW": (1.0,), "perceptron, cosine": (1.0,)}
        return [(name, spread) for name in self.jobs for spread in spreads.get(name, (1.0, 4.0))]


def rows_of(name: str, spread: float) -> list[str]:
    """The rows of a group: first those that are tuned, then those that take their rate from one of these."""
    even, job = spread == 1, JOBS[name]
    rows = [f"together@{pieces}" for pieces in TOGETHER] if even and not job.unlike else []
    rows += [str(steps) for steps in FIXED]
    rows += [f"rule@{ratio:g}" for ratio in RATIOS]
    rows += [f"qsr@{steps}" for steps in QSR_STEPS] if job.cosine else [f"adacomm@{ADACOMM}"]
    return rows + ([f"product@{ratio:g}" for ratio in RATIOS] if spread == 4 and name in WHOLE else [])


@dataclass(frozen=True)
class RoundsSuite(Suite):
    """A cell is a job at a spread of speeds, and a row. Rows that are tuned come before those that follow them."""

    plan: RoundsPlan
    name: str = "rounds"
    grows: ClassVar[frozenset[str]] = frozenset({"jobs"})

    def facts(self) -> dict[str, Any]:
        return {"cluster": "virtual", "mechanisms": {}, "seeds": list(range(self.plan.seeds)), "scenario_sha256": {}}

    def cells(self) -> list[Cell]:
        return [Cell(_key(*group, row), (*group, row)) for group in self.plan.groups for row in rows_of(*group)]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        torch.set_num_threads(1)  # these nets are small: threads would wait for each other
        name, spread, row = cell.what
        job, tried = JOBS[name], dict[str, float | None]()
        train = trainer(row, job, spread)
        follows = leader(row)
        if follows is None:
            rate, tried = tuned(job, row, lambda rate: samples_needed(asdict(train(rate, TUNING_SEEDS[0])), job))
        else:
            rate = float(context.found[_key(name, spread, follows)]["rate"])
        runs = [asdict(train(rate, seed)) for seed in range(self.plan.seeds)]
        for run in runs:
            run["loss"] = [None if not math.isfinite(loss) else loss for loss in run["loss"]]
        return {
            "job": name,
            "spread": spread,
            "row": row,
            "rate": rate,
            "tried": tried,
            "follows": follows,
            "runs": runs,
        }

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        return {"target": None, "policies": {}, "ratios": {}, **compared(list(cells.values()))}

    def table(self, result: Mapping[str, Any]) -> str:
        return sections_markdown(pages.sections(result))


def _key(name: str, spread: float, row: str) -> str:
    return f"{name.replace(', ', '-').replace(' ', '-').lower()}-{spread:g}-{row}"


def trainer(row: str, job: RoundsJob, spread: float) -> Callable[[float, int], Track]:
    """What trains a row at a rate with a seed."""
    speeds, (kind, _, value) = speeds_of(spread), row.partition("@")
    if kind == "together":
        return lambda rate, seed: train_together(job, int(value) * job.piece, rate, speeds, seed)
    if kind == "product":
        return lambda rate, seed: train_product(job, float(value), rate, speeds, seed)
    return lambda rate, seed: train_apart(job, row, rate, speeds, seed)


def leader(row: str) -> str | None:
    """The row whose learning rate a row takes; None: it is tuned itself."""
    kind, _, value = row.partition("@")
    return f"rule@{value}" if kind == "product" else None


def tuned(job: RoundsJob, row: str, needed: Callable[[float], float]) -> tuple[float, dict[str, float | None]]:
    """The best of three rates, and of their neighbours while the best is at an end; with all that were tried."""
    centre = job.rate * (math.sqrt(int(row.partition("@")[2])) if row.startswith("together") else 1.0)
    powers = {power: needed(centre * 2.0**power) for power in (-1, 0, 1)}
    for _ in range(MORE_RATES):
        best = min(powers, key=lambda power: powers[power])
        if min(powers) < best < max(powers):
            break
        beyond = best + (1 if best == max(powers) else -1)
        powers[beyond] = needed(centre * 2.0**beyond)
    best = min(powers, key=lambda power: powers[power])
    said = {f"{centre * 2.0**power:.3g}": powers[power] for power in sorted(powers)}
    return centre * 2.0**best, {rate: value if math.isfinite(value) else None for rate, value in said.items()}
