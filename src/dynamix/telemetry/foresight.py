"""What the job model promised of each allocation, beside what was reached."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dynamix.errors import DynamixError
from dynamix.model import JobModel
from dynamix.model.measured import step_seconds
from dynamix.window import Window

NEWEST, LARGEST = 40, 40  # changes that are kept
CATCH_UP = 3  # windows that tell a model that has left some out how fast workers are


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


@dataclass(frozen=True, eq=False)
class _Seen:
    """A change whose gains are worked out once somebody asks: of the many in a long run, few are kept."""

    change: SizeChange  # without gains
    before: Window
    after: Window
    model: JobModel  # before the change
    learned: JobModel  # after it

    def told(self) -> SizeChange:
        old, new = self.before.batch_size, self.after.batch_size
        with np.errstate(all="ignore"):
            try:
                of_new, of_old = self.model.log_goodput(np.stack([new, old]), unknown="base")
                gained = float(self.learned.achieved(self.after) - self.learned.achieved(self.before))
            except (DynamixError, ArithmeticError, ValueError, IndexError):  # windows that no job could have had
                return self.change
        return dataclasses.replace(
            self.change, gain_expected=_factor(float(of_new - of_old)), gain_reached=_factor(gained)
        )


class Foresight:
    """The job model fitted to a run's windows once more, asked before each window what it would be.

    In a long run most windows are left out by whoever calls `add`. The largest changes are never left out, and the
    newest ones are worked out when somebody asks.

    changes      the newest and the largest changes of sizes, oldest first
    count        all of them
    """

    def __init__(self) -> None:
        self.model = JobModel()
        self.count = 0
        self._last: Window | None = None
        self._recent: deque[_Line] = deque(maxlen=NEWEST + CATCH_UP)
        self._anchors: deque[tuple[int, JobModel]] = deque()  # windows so far, and the model after them
        self._windows = 0
        self._missed = 0  # windows since the last one that the model has taken in
        self._thinned = False
        self._newest: deque[SizeChange | _Seen] = deque(maxlen=NEWEST)
        self._largest: list[tuple[float, int, SizeChange]] = []
        self._errors = [0.0, 0.0, 0]  # of log seconds after a change: sum, sum of absolute values, how many

    def add(self, window: Window, at_s: float, index: int, by: str = "", *, wanted: bool = True) -> float:
        """Take in a window that ended at `at_s`; returns the seconds of a step that were expected of it, or NaN.

        wanted   False: only if it is one of the largest changes
        """
        line = _Line(window, self._last, at_s, index, by)
        self._last = window
        self._windows += 1
        self.count += line.changed
        if not wanted and not (line.changed and self._is_large(line)):
            self._thinned = True
            self._newest.clear()
            self._missed += 1
            self._recent.append(line)
            return math.nan
        if self._missed:  # what the model knows is old: a few windows tell it of today
            for missed in list(self._recent)[-min(self._missed, CATCH_UP) :]:
                self.model, *_ = _taken(self.model, missed)
            self._missed = 0
            self._anchor()
        self._recent.append(line)
        self.model, expected, seen = _taken(self.model, line)
        if seen is not None:
            self._changed(seen, line.size)
        return expected if wanted else math.nan  # the largest changes are no fair sample of a point

    @property
    def changes(self) -> list[SizeChange]:
        """Those that are kept, oldest first."""
        if self._thinned:
            newest = self._newest_again()
        else:
            newest = [seen.told() if isinstance(seen, _Seen) else seen for seen in self._newest]
            self._newest.extend(newest)
        found = {change.window: change for change in [*(c for *_, c in self._largest), *newest]}
        return sorted(found.values(), key=lambda change: (change.at_s, change.window))

    @property
    def error(self) -> tuple[float, float] | None:
        """By how much a step took longer than expected after a change, in the mean, and the mean distance; None without
        any."""
        total, absolute, count = self._errors
        return (math.expm1(total / count), math.expm1(absolute / count)) if count else None

    def _is_large(self, line: _Line) -> bool:
        return len(self._largest) < LARGEST or line.size > self._largest[0][0]

    def _anchor(self) -> None:
        """Keep the model as it is, and as it was before the windows of `_recent`."""
        self._anchors.append((self._windows - 1, self.model))
        while len(self._anchors) > 1 and self._anchors[1][0] <= self._windows - len(self._recent):
            self._anchors.popleft()

    def _newest_again(self) -> list[SizeChange]:
        """The newest changes, by a model that has not met them."""
        first = self._windows - len(self._recent)
        known = [model for at, model in self._anchors if at <= first]
        model, found = known[-1] if known else JobModel(), []
        for line in self._recent:
            model, _, seen = _taken(model, line)
            if seen is not None:
                found.append(seen)
        return [seen.told() for seen in found[-NEWEST:]]

    def _changed(self, seen: _Seen, size: float) -> None:
        change = seen.change
        if not self._thinned:
            self._newest.append(seen)
        if len(self._largest) < LARGEST or size > self._largest[0][0]:
            heapq.heappush(self._largest, (size, self.count, seen.told()))
            if len(self._largest) > LARGEST:
                heapq.heappop(self._largest)
        if change.step_reached_s > 0 and change.step_expected_s > 0:
            off = math.log(change.step_reached_s / change.step_expected_s)
            self._errors = [self._errors[0] + off, self._errors[1] + abs(off), self._errors[2] + 1]


@dataclass(frozen=True, eq=False)
class _Line:
    """A window of a run, the one before it, and what else its line told."""

    window: Window
    before: Window | None
    at_s: float
    index: int
    by: str

    @cached_property
    def follows(self) -> bool:
        """Whether it has as many workers as the one before."""
        return self.before is not None and self.before.batch_size.shape == self.window.batch_size.shape

    @cached_property
    def changed(self) -> bool:
        """Whether sizes are others than in the window before."""
        if self.before is None or not self.follows:
            return False
        return bool((self.before.batch_size != self.window.batch_size).any())

    @cached_property
    def size(self) -> float:
        """How large the change is, in log sizes."""
        assert self.before is not None
        old, new = self.before.batch_size, self.window.batch_size
        before, after = max(int(old.sum()), 1), max(int(new.sum()), 1)
        return float(np.abs(new / after - old / before).sum()) / 2 + abs(math.log(after / before))

    def change(self, expected: float) -> SizeChange:
        assert self.before is not None
        return _change(self.before, self.window, expected, self.at_s, self.index, self.by)


def _taken(model: JobModel, line: _Line) -> tuple[JobModel, float, _Seen | None]:
    """The model after a window, the seconds of a step that were expected of it, and the change of sizes before it."""
    expected = math.nan
    with np.errstate(all="ignore"):
        try:
            if line.follows and model.sizes.shape == line.window.batch_size.shape:
                expected = float(model.step_s(line.window.batch_size))
            learned = model.update(line.window)
            if line.before is None or not line.changed:
                return learned, expected, None
            return learned, expected, _Seen(line.change(expected), line.before, line.window, model, learned)
        except (DynamixError, ArithmeticError, ValueError, IndexError):  # windows that no job could have had
            return JobModel(), expected, None


def _change(before: Window, window: Window, expected: float, at_s: float, index: int, by: str) -> SizeChange:
    """What two windows say of the change between them, without its gains."""
    old, new = before.batch_size, window.batch_size
    total = int(old.sum()), int(new.sum())
    shares = np.abs(new / max(total[1], 1) - old / max(total[0], 1))
    worker = int(shares.argmax())
    return SizeChange(
        at_s=at_s,
        window=index,
        total=total,
        moved=float(shares.sum() / 2),
        most=(worker, int(old[worker]), int(new[worker])),
        step_before_s=float(step_seconds(before)),
        step_expected_s=expected,
        step_reached_s=float(step_seconds(window)),
        gain_expected=math.nan,
        gain_reached=math.nan,
        by=by,
    )


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
