"""The other ranks of a job: what is compared with them before they train, and how an error of one reaches all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dynamix.runtime.agreement import Explain, unnamed
from dynamix.runtime.control import ControlGroup
from dynamix.runtime.ending import Ending
from dynamix.runtime.sameness import FIXES, require_same


class Ranks:
    """Those of a controller's own `group`.

    agreed    whether they have compared what they hold, since the start or the last load
    explain   names one that is lost; set by the owner
    """

    def __init__(self, group: ControlGroup) -> None:
        self.group, self.ending, self.agreed = group, Ending.of(group), False
        self.explain: Explain = unnamed

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compare `facts`, plain values by name. A collective call.

        Raises `UsageError` on every rank, naming what differs, by rank.
        """
        self.agreed = True
        self.ending.setup_goes_on()
        self.ending.agreeing()
        what = "The ranks differ in what they are about to train"
        require_same(facts, self.group, what, FIXES, self.ending, self.explain)

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """An error inside ends the ranks that then wait for this one, unless it goes on."""
        self.ending.setup_goes_on()
        try:
            yield
        except Exception as error:
            self.ending.setup_failed(error)
            raise
