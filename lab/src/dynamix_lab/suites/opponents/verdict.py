"""What the times of one job on one cluster say: does distributing pay, and who is first?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamix_lab.opponents.trial import FIXED_TOTAL
from dynamix_lab.opponents.tuning import FIXED_SHARES, LOCAL
from dynamix_lab.statistics import geometric_mean, paired_ratio

SINGLE = "single"
OPPONENTS = (*FIXED_SHARES, *FIXED_TOTAL)
"""Synchronous opponents: those whose workers meet after every step, ours left out."""
PAYS = 1.5
OVER = (SINGLE, "static", "local", "goodput")
"""Rows that the others' times are divided by over all places, where they ran."""

Times = Mapping[str, Sequence[float]]
"""Row -> seconds to the target by seed, censored, never missing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What opponents alone say of a job on a cluster, before any policy of ours is looked at.

    best_synchronous      the fastest of `OPPONENTS` there, by the geometric mean of its seconds
    over_single           its speed over the fastest worker alone
    best_rarely           the fastest of `LOCAL`; None where none was run
    rarely_over_single    its speed over the fastest worker alone; None likewise
    """

    best_synchronous: str
    over_single: float
    best_rarely: str | None
    rarely_over_single: float | None

    @property
    def pays(self) -> bool:
        """Whether a claim about shares of synchronous steps means something here."""
        return self.over_single >= PAYS

    @property
    def sentence(self) -> str:
        """For a page."""
        best = f"{self.best_synchronous} is {self.over_single:.2f} times as fast as the fastest worker alone"
        if self.pays:
            return f"Distributing pays: {best}."
        if self.rarely_over_single is not None and self.rarely_over_single >= PAYS:
            rarely = f"{self.best_rarely} is {self.rarely_over_single:.2f} times as fast"
            return f"Do not meet after every step: {best}, while {rarely}."
        return f"Do not distribute this job: {best}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "best_synchronous": self.best_synchronous,
            "over_single": self.over_single,
            "best_rarely": self.best_rarely,
            "rarely_over_single": self.rarely_over_single,
            "pays": self.pays,
            "sentence": self.sentence,
        }


def verdict(times: Times) -> Verdict:
    """Read the opponents' times.

    >>> found = verdict({"single": [9.0, 9.0], "static": [4.0, 4.5], "local": [6.0, 6.0], "dynamix": [1.0, 1.0]})
    >>> found.pays, found.best_synchronous, round(found.over_single, 2), found.best_rarely
    (True, 'static', 2.12, 'local')
    """
    means = {row: geometric_mean(list(values)) for row, values in times.items()}
    best = min((row for row in means if row in OPPONENTS), key=means.__getitem__)
    rarely = min((row for row in means if row in LOCAL), key=means.__getitem__, default=None)
    over = None if rarely is None else means[SINGLE] / means[rarely]
    return Verdict(best, means[SINGLE] / means[best], rarely, over)


def over(rows: Sequence[str], usual: Sequence[str | None]) -> list[str]:
    """Those of `usual` that are among the rows, once each; and `dynamix` where the rule without an arbiter ran.

    >>> over(("goodput", "dynamix", "stigmergic"), ("single", "goodput", None))
    ['goodput', 'dynamix']
    """
    asked = (*usual, "dynamix") if "stigmergic" in rows else usual
    return list(dict.fromkeys(name for name in asked if name is not None and name in rows))


def ratios(times: Times) -> dict[str, dict[str, float | None]]:
    """Time over another row's with its interval, by "row/other", for the others that a reader asks about."""
    means = {row: geometric_mean(list(values)) for row, values in times.items()}
    rarely = min((row for row in means if row in LOCAL), key=means.__getitem__, default=None)
    synchronous = min((row for row in means if row in OPPONENTS), key=means.__getitem__, default=None)
    others = over(tuple(times), (SINGLE, "static", synchronous, rarely, "goodput"))
    return {
        f"{row}/{other}": paired_ratio(times[row], times[other]).to_dict()
        for other in others
        for row in times
        if row != other
    }
