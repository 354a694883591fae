"""Which jobs on which clusters, and which rows, `dynamix bench opponents` compares."""

from __future__ import annotations

from dataclasses import dataclass

from dynamix.emulator import Scenario, load_scenario
from dynamix.errors import ConfigError
from dynamix_lab.opponents.tuning import ROWS
from dynamix_lab.suites.opponents.regimes import is_regime, regime
from dynamix_lab.suites.opponents.verdict import SINGLE
from dynamix_lab.tasks import make_workload

USUAL = (
    *("single", "static", "profiled", "reference", "lb_bsp"),
    *("local", "post_local", "adacomm", "qsr", "diloco"),
    *("goodput", "dynamix"),
)
"""Rows unless others are asked for. DBS is left out: it decides once an epoch, and these runs end in their first."""
REGIME_ROWS = ("single", "static", "lb_bsp", "local", "goodput", "dynamix")
"""Rows of the map of regimes."""


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
        """The scenario: shipped, a file, or a regime's."""
        return regime(self.scenario, self.workload) if is_regime(self.scenario) else load_scenario(self.scenario)

    @property
    def key(self) -> str:
        """For names of files."""
        return f"{self.scenario.rpartition('/')[2].removesuffix('.yaml')}-{self.workload}"


def check_rows(rows: tuple[str, ...]) -> None:
    """Raises `ConfigError` for rows that are not known, and where those that every ratio needs are missing."""
    for row in rows:
        if row not in ROWS:
            raise ConfigError("rows", row, ", ".join(ROWS), "check the spelling")
    for needed in (SINGLE, "static"):
        if needed not in rows:
            raise ConfigError("rows", ", ".join(rows), f"{needed} among them", f"add {needed}: every ratio is to it")
