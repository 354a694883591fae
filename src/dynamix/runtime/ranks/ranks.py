"""The other ranks of a job: what is compared with them before they train, and how an error of one reaches all."""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.ranks.compare import FIXES, GROUPS, PLACE, require_same
from dynamix.runtime.ranks.errors import ALIKE, FIRST_PASS, Explain, JobErrors, unnamed, wait_for
from dynamix.runtime.ranks.group import ControlGroup

_PARTED = {
    "": "Set what optimizers use alike on every rank, by the optimizer step and not by what one rank measures",
    GROUPS: "Call add_param_group alike on every rank",
    **dict.fromkeys(PLACE, "Train every batch that the loader gives, on every rank, and load one state on all"),
}


class Ranks:
    """Those of a controller's own `group`.

    agreed    whether they have compared what they hold, since the start or the last load
    explain   names one that is lost; set by the owner
    """

    def __init__(self, group: ControlGroup) -> None:
        self.group, self.ending, self.agreed = group, JobErrors.of(group), False
        self.explain: Explain = unnamed
        self.watch(group)

    def watch(self, group: ControlGroup) -> None:
        """Let waits in `group`, of the same ranks, be given up where one of them ends the job."""
        ending = self.ending
        group.settle = lambda work: wait_for(work, ending)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compare `facts`, plain values by name. A collective call.

        Raises `UsageError` on every rank, naming what differs, by rank.
        """
        self.agreed = True
        self.ending.setup_goes_on()
        self.ending.agreeing(FIRST_PASS)
        what = "The ranks differ in what they are about to train"
        require_same(facts, self.group, what, FIXES, self.ending, self.explain)

    def compare(self, facts: Mapping[str, Any], near: Mapping[str, float]) -> None:
        """Compare `facts`, whose digests were not alike. A collective call; raises as `agree`, which says the rest."""
        self.ending.agreeing("a comparison of settings and of the place in the data, which have come to differ")
        what = "The ranks have come to differ while they train"
        require_same(facts, self.group, what, _PARTED, self.ending, self.explain, near)

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks are in the collective call `what`.

        Raises `UsageError` on every rank where some wait for something else instead: a later collective would not end.
        """
        self.ending.agreeing(what)
        # As long as the first row of `require_same`: what the others are in may be that comparison.
        mine = torch.tensor([zlib.crc32(what.encode()), -1])
        every = mine.new_zeros(self.group.workers, len(mine))
        try:
            wait_for(self.group.all_gather(mine, every), self.ending)
        except RuntimeError as error:
            if isinstance(error, DynamixError):
                raise
            raise self.explain(error, f"not all ranks came to {what}") from error
        if not bool((every == mine).all()):
            raise self.ending.report(UsageError(f"this rank waits in {what}, another one in something else: {ALIKE}"))

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """An error inside ends the ranks that then wait for this one, unless it goes on."""
        self.ending.setup_goes_on()
        try:
            yield
        except Exception as error:
            self.ending.setup_failed(error)
            raise
