"""What the job model promised of each allocation, beside what was reached."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.errors import DynamixError
from dynamix.model import JobModel
from dynamix.model.measured import step_seconds
from dynamix.window import Window

NEWEST, LARGEST = 40, 40  # changes that are kept


@dataclass(frozen=True)
class SizeChange:
    """A change of sizes between two windows: what the model expected of it, and what the next window measured.

    Times are seconds of a step, gains are factors of goodput (samples a second, times what a sample teaches); NaN
    where unknown. `moved` is the part of the smaller global batch that other workers got.
    """

    at_s: float
    window: int
    total: tuple[int, int]  # before, after
    moved: float
    most: tuple[int, int, int]  # the worker whose share changed most, its size before and after
    step_before_s: float
    step_expected_s: float
    step_reached_s: float
    gain_expected: float
    gain_reached: float
    by: str = ""  # whose answer it was, and why, where the run says so


class Foresight:
    """The job model fitted to a run's windows once more, asked before each window what it would be.

    changes      the newest and the largest changes of sizes, oldest first
    count        all of them
    """

    def __init__(self) -> None:
        self.model = JobModel()
        self.count = 0
        self._last: Window | None = None
        self._newest: deque[SizeChange] = deque(maxlen=NEWEST)
        self._largest: list[tuple[float, int, SizeChange]] = []
        self._errors = [0.0, 0.0, 0]  # of log seconds after a change: sum, sum of absolute values, how many

    def add(self, window: Window, at_s: float, index: int, by: str = "") -> float:
        """Take in a window that ended at `at_s`; returns the seconds of a step that were expected of it, or NaN."""
        before, model = self._last, self.model
        self._last = window
        expected = math.nan
        with np.errstate(all="ignore"):
            try:
                known = before is not None and before.batch_size.shape == window.batch_size.shape
                if known:
                    expected = float(model.step_s(window.batch_size))
                self.model = model.update(window)
                if before is not None and known and (before.batch_size != window.batch_size).any():
                    self._changed(model, before, window, expected, at_s, index, by)
            except (DynamixError, ArithmeticError, ValueError, IndexError):  # windows that no job could have had
                self.model = JobModel()
        return expected

    @property
    def changes(self) -> list[SizeChange]:
        """Those that are kept, oldest first."""
        found = {change.window: change for change in [*(c for *_, c in self._largest), *self._newest]}
        return sorted(found.values(), key=lambda change: (change.at_s, change.window))

    @property
    def error(self) -> tuple[float, float] | None:
        """Over all changes, by how much a step took longer than expected, and the mean distance; None without any."""
        total, absolute, count = self._errors
        return (math.expm1(total / count), math.expm1(absolute / count)) if count else None

    def _changed(
        self, model: JobModel, before: Window, window: Window, expected: float, at_s: float, index: int, by: str
    ) -> None:
        old, new = before.batch_size, window.batch_size
        shares = new / max(int(new.sum()), 1) - old / max(int(old.sum()), 1)
        worker = int(np.abs(shares).argmax())
        reached = float(step_seconds(window))
        of_new, of_old = model.log_goodput(np.stack([new, old]), unknown="base")
        gained = float(self.model.achieved(window) - self.model.achieved(before))
        change = SizeChange(
            at_s=at_s,
            window=index,
            total=(int(old.sum()), int(new.sum())),
            moved=float(np.abs(shares).sum() / 2),
            most=(worker, int(old[worker]), int(new[worker])),
            step_before_s=float(step_seconds(before)),
            step_expected_s=expected,
            step_reached_s=reached,
            gain_expected=_factor(float(of_new - of_old)),
            gain_reached=_factor(gained),
            by=by,
        )
        self.count += 1
        self._newest.append(change)
        size = change.moved + abs(math.log(max(change.total[1], 1) / max(change.total[0], 1)))
        heapq.heappush(self._largest, (size, self.count, change))
        if len(self._largest) > LARGEST:
            heapq.heappop(self._largest)
        if reached > 0 and expected > 0:
            off = math.log(reached / expected)
            self._errors = [self._errors[0] + off, self._errors[1] + abs(off), self._errors[2] + 1]


def _factor(log: float) -> float:
    return math.exp(log) if abs(log) < 50 else math.nan


def reason(fields: dict[str, Any]) -> str:
    """Whose answer a line's decision was, and what a learned policy changed of the rule's; empty where it is not told.

    >>> reason({"guard": {"by": "policy", "reason": "trusted"}, "residual": {"total": 0.9, "moved": 0.052}})
    "the policy, trusted; its net moved 5.2 % of the rule's shares, global batch -10.0 %"
    """
    said = []
    guard = fields.get("guard")
    if isinstance(guard, dict) and guard.get("by") in ("policy", "rule"):
        said.append(_GUARD.get((guard["by"], str(guard.get("reason"))), f"the {guard['by']}"))
    residual = fields.get("residual")
    if isinstance(residual, dict) and all(type(residual.get(name)) is float for name in ("total", "moved")):
        total, moved = residual["total"] - 1, residual["moved"]
        said.append(f"its net moved {100 * moved:.1f} % of the rule's shares, global batch {100 * total:+.1f} %")
    return "; ".join(said)


_GUARD = {
    ("policy", "trusted"): "the policy, trusted",
    ("policy", "check"): "the policy, in a comparison with the rule",
    ("rule", "check"): "the rule, in a comparison with the policy",
    ("rule", "worse"): "the rule, as the policy did worse",
    ("rule", "refused"): "the rule, as the policy's answer looked bad",
    ("rule", "fault"): "the rule, as the policy failed",
}
