"""Does distributing pay? The verdict from the times of one job on one cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamix_lab.opponents.trial import FIXED_TOTAL
from dynamix_lab.opponents.tuning import FIXED_SHARES, LOCAL
from dynamix_lab.statistics import geometric_mean

SINGLE = "single"
OPPONENTS = (*FIXED_SHARES, *FIXED_TOTAL)
"""Synchronous opponents: their workers average gradients after every step. Our own policies are not among them."""
PAYS = 1.5

Times = Mapping[str, Sequence[float]]
"""Row -> seconds by seed. A run that did not finish has its censored time, so none is missing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of the opponents on a job on a cluster, before any policy of ours is considered.

    best_synchronous      the fastest synchronous opponent, by the geometric mean of its seconds
    over_single           its speed over the fastest worker alone
    best_rarely           the fastest opponent that averages parameters; None if none was run
    rarely_over_single    its speed over the fastest worker alone; None likewise
    """

    best_synchronous: str
    over_single: float
    best_rarely: str | None
    rarely_over_single: float | None

    @property
    def pays(self) -> bool:
        """Whether shares of synchronous steps can help here at all."""
        return self.over_single >= PAYS

    @property
    def sentence(self) -> str:
        """The verdict as a sentence for a page."""
        best = f"{self.best_synchronous} is {self.over_single:.2f} times as fast as the fastest worker alone"
        if self.pays:
            return f"Distributing pays: {best}."
        if self.rarely_over_single is not None and self.rarely_over_single >= PAYS:
            rarely = f"{self.best_rarely} is {self.rarely_over_single:.2f} times as fast"
            return f"Do not meet after every step: {best}, while {rarely}."
        return f"Do not distribute this job: {best}."

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON."""
        return {
            "best_synchronous": self.best_synchronous,
            "over_single": self.over_single,
            "best_rarely": self.best_rarely,
            "rarely_over_single": self.rarely_over_single,
            "pays": self.pays,
            "sentence": self.sentence,
        }


def verdict(times: Times, synchronous: Sequence[str] = OPPONENTS, rarely: Sequence[str] = LOCAL) -> Verdict:
    """Derive the verdict from the opponents' times.

    synchronous   opponents that average gradients after every step
    rarely        opponents that average parameters

    >>> found = verdict({"single": [9.0, 9.0], "static": [4.0, 4.5], "local": [6.0, 6.0], "dynamix": [1.0, 1.0]})
    >>> found.pays, found.best_synchronous, round(found.over_single, 2), found.best_rarely
    (True, 'static', 2.12, 'local')
    """
    means = {row: geometric_mean(list(values)) for row, values in times.items()}
    best = min((row for row in means if row in synchronous), key=means.__getitem__)
    seldom = min((row for row in means if row in rarely), key=means.__getitem__, default=None)
    over = None if seldom is None else means[SINGLE] / means[seldom]
    return Verdict(best, means[SINGLE] / means[best], seldom, over)
