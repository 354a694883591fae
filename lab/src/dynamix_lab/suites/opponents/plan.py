"""Which jobs on which clusters, and which rows, `dynamix bench opponents` compares."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError, StateError
from dynamix_lab.emulator import Scenario, load_scenario
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.opponents.tuning import ROWS
from dynamix_lab.suites.opponents.regimes import is_regime, regime
from dynamix_lab.suites.opponents.verdict import SINGLE
from dynamix_lab.suites.scaling.virtual_world import at_workers
from dynamix_lab.tasks import make_workload

USUAL = (
    *("single", "static", "profiled", "reference", "lb_bsp"),
    *("local", "post_local", "adacomm", "qsr", "diloco"),
    *("goodput", "dynamix"),
)
"""Rows unless others are asked for. DBS is left out: it decides once an epoch, and these runs end in their first."""
REGIME_ROWS = ("single", "static", "lb_bsp", "local", "goodput", "dynamix")
"""Rows of the map of regimes."""

AGAIN = "-again"  # of a live row that runs a second time: what pairs with itself tell of the machine
TWICE = ("static", "goodput")
"""Live rows that do: the first that never moves batches, and one that does."""

_TIMES = re.compile(r"(.+)-x([1-9]\d*)")  # a scenario whose hosts are there several times


@dataclass(frozen=True, slots=True)
class Place:
    """A job on a cluster: a scenario and a workload. As text "device-even/teacher".

    >>> Place.of("even/mnist1d").key
    'even-mnist1d'
    """

    scenario: str
    workload: str

    @classmethod
    def of(cls, text: str) -> Place:
        """Raises `ConfigError` for a text that names none."""
        scenario, slash, workload = text.rpartition("/")
        if not slash:
            raise ConfigError("place", text, "a scenario and a workload, as in even/mnist1d", "name both")
        make_workload(workload)
        place = cls(scenario, workload)
        place.load()
        return place

    def load(self) -> Scenario:
        """The scenario: shipped, a file, or a regime's; "device-paper-like-x4" has all hosts of that one four times.

        >>> Place.of("device-paper-like-x2/teacher").load().workers
        16
        """
        if is_regime(self.scenario):
            return regime(self.scenario, self.workload)
        if (times := _TIMES.fullmatch(self.scenario)) is None:
            return load_scenario(self.scenario)
        one = load_scenario(times[1])
        return at_workers(times[1], one.workers * int(times[2]))

    @property
    def key(self) -> str:
        """For names of files."""
        return f"{self.scenario.rpartition('/')[2].removesuffix('.yaml')}-{self.workload}"


def tuned_trials(result: Path) -> tuple[dict[str, dict[str, dict[str, Any]]], str]:
    """What a finished virtual run's rows were tuned to, by place and row, as `Trial.to_dict` has it; and its commit.

    Raises `StateError` for a file that is no such result.
    """
    try:
        tuned = json.loads(result.read_text(encoding="utf-8"))
        known = {
            place: {row: cell["trial"] for row, cell in part["rows"].items()} for place, part in tuned["places"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{result} is no result of `dynamix bench opponents` ({error!r})") from error
    return known, str(tuned.get("commit") or "")


def recorded_runs(result: Path, place: str, row: str, trial: Trial) -> dict[int, dict[str, Any]]:
    """What a finished virtual run says of a row's runs, by seed; nothing where it ran another trial or place.

    Raises `StateError` for a file that is no such result.
    """
    found = json.loads(result.read_text(encoding="utf-8"))
    part = found["places"].get(place)
    if part is None or row not in part["rows"] or Trial.from_dict(part["rows"][row]["trial"]) != trial:
        return {}
    each = zip(found["seeds"], part["times_s"][row], part["arrived"][row], part["samples"][row], strict=True)
    return {
        seed: {"seed": seed, "time_to_target_s": time_s if came else None, "limit_s": time_s, "samples": samples}
        for seed, time_s, came, samples in each
    }


def check_names(rows: Sequence[str]) -> None:
    """Raises `ConfigError` for rows that are not known."""
    for row in rows:
        if row not in ROWS:
            raise ConfigError("rows", row, ", ".join(ROWS), "check the spelling")


def check_rows(rows: Sequence[str]) -> None:
    """Raises `ConfigError` for rows that are not known, and where those that every ratio needs are missing."""
    check_names(rows)
    for needed in (SINGLE, "static"):
        if needed not in rows:
            raise ConfigError("rows", ", ".join(rows), f"{needed} among them", f"add {needed}: every ratio is to it")
